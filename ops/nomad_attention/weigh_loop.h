// Weights of a row of scores (WeighScoresFn of decode_attention.h), once for all x86 tiers. Included by x86_*.cc only;
// local to each. Tier: see decode_loop.h.
#pragma once

#include "nomad_attention/decode_attention.h"

namespace ortolan {
namespace {

template <typename Tier>
void WeighLoop(float* scores, int64_t count, float factor, float* maximum, float* sum) {
  using Simd = typename Tier::Floats;
  using Float = typename Simd::Float;
  constexpr int64_t kLanes = Simd::kLanes;
  const int64_t end = (count + kLanes - 1) / kLanes * kLanes;
  for (int64_t i = count; i < end; ++i) scores[i] = scores[0];
  Float most = Simd::Set(-0x1.fffffep127f);
  for (int64_t i = 0; i < end; i += kLanes) {
    const Float score = Simd::Multiply(Simd::Load(scores + i), Simd::Set(factor));
    Simd::Store(scores + i, score);
    most = Simd::Max(score, most);
  }
  *maximum = Tier::ReduceMax(most);
  for (int64_t i = count; i < end; ++i) scores[i] = -__builtin_inff();
  Float sums = Simd::Set(0.0f);
  for (int64_t i = 0; i < end; i += kLanes) {
    const Float weight = Simd::Exp2(Simd::Subtract(Simd::Load(scores + i), Simd::Set(*maximum)));
    Simd::Store(scores + i, weight);
    sums = Simd::Add(sums, weight);
  }
  *sum = Tier::ReduceAdd(sums);
}

}  // namespace
}  // namespace ortolan
