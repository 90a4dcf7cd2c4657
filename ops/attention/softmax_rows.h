// The softmax functions of decode.h, for all targets. Included only by decode_loop.h; local to each target.
#pragma once

#include "attention/decode.h"
#include "attention/softcap.h"
#include "simd/at_byte.h"
#include "simd/target.h"

namespace ortolan {
namespace {

using Float = Simd::Float;
constexpr int64_t kLanes = Simd::kLanes;
constexpr float kLowest = -0x1.fffffep127f;
constexpr float kMinusInfinity = -__builtin_inff();
constexpr int64_t kStep = 8 * kLanes;             // mask elements at a time
constexpr float kLeastVisible = kHidden + 64.0f;  // the next float above kHidden
constexpr float kLeastNormal = 0x1p-126f;

// Counts the elements of a step that are not less than the bound, NaN included.
float CountFrom(const float* mask, Float bound, bool magnitude) {
  Float count = Simd::Set(0.0f);
#pragma GCC unroll 8
  for (int64_t i = 0; i < kStep; i += kLanes) {
    Float value = Simd::Load(mask + i);
    if (magnitude) value = Simd::Abs(value);
    count = Simd::Add(count, Simd::SelectLess(value, bound, Simd::Set(0.0f), Simd::Set(1.0f)));
  }
  return Simd::SumOfLanes(count);
}

bool IsHidden(float mask) { return mask <= kHidden; }

VisibleRange VisibleOf(const float* mask, int64_t count) {
  const Float visible = Simd::Set(kLeastVisible);
  VisibleRange range{0, count, true};
  while (range.begin + kStep <= count && CountFrom(mask + range.begin, visible, false) == 0) range.begin += kStep;
  while (range.begin < count && IsHidden(mask[range.begin])) ++range.begin;
  while (range.end - kStep >= range.begin && CountFrom(mask + range.end - kStep, visible, false) == 0) {
    range.end -= kStep;
  }
  while (range.end > range.begin && IsHidden(mask[range.end - 1])) --range.end;
  const Float least = Simd::Set(kLeastNormal);
  int64_t j = range.begin;
  for (; j + kStep <= range.end && range.plain; j += kStep) range.plain = CountFrom(mask + j, least, true) == 0;
  for (; j < range.end && range.plain; ++j) range.plain = __builtin_fabsf(mask[j]) < kLeastNormal;
  return range;
}

// Caps `count` scores, a multiple of kLanes.
void CapScores(float* scores, int64_t count, float softcap) {
  const Softcap<Simd> cap(softcap);
  for (int64_t i = 0; i < count; i += kLanes) Simd::Store(scores + i, cap.Of(Simd::Load(scores + i)));
}

void WeighScores(float* scores, int64_t count, float factor, float softcap, float* maximum, float* sum) {
  const int64_t end = (count + kLanes - 1) / kLanes * kLanes;
  for (int64_t i = count; i < end; ++i) scores[i] = scores[0];
  for (int64_t i = 0; i < end; i += kLanes) {
    Simd::Store(scores + i, Simd::Multiply(Simd::Load(scores + i), Simd::Set(factor)));
  }
  if (softcap != 0) CapScores(scores, end, softcap);
  Float most = Simd::Set(kLowest);
  for (int64_t i = 0; i < end; i += kLanes) {
    most = Simd::Max(Simd::Load(scores + i), most);
  }
  *maximum = Simd::MaxOfLanes(most);
  for (int64_t i = count; i < end; ++i) scores[i] = kMinusInfinity;
  Float sums = Simd::Set(0.0f);
  for (int64_t i = 0; i < end; i += kLanes) {
    const Float weight = Simd::Exp2(Simd::Subtract(Simd::Load(scores + i), Simd::Set(*maximum)));
    Simd::Store(scores + i, weight);
    sums = Simd::Add(sums, weight);
  }
  *sum = Simd::SumOfLanes(sums);
}

void MergePartial(int64_t heads, int64_t head_dim, const DecodePartial& from, const DecodePartial& into) {
  for (int64_t h = 0; h < heads; ++h) {
    const float most = from.max[h] < into.max[h] ? into.max[h] : from.max[h];
    const float a = __builtin_exp2f(from.max[h] - most);
    const float b = __builtin_exp2f(into.max[h] - most);
    into.max[h] = most;
    const Float as = Simd::Set(a);
    const Float bs = Simd::Set(b);
    // Rounds each product and sum separately, for the same bits on every target.
    const auto merge = [as, bs](Float x, Float y) {
      return Simd::Add(Simd::Rounded(Simd::Multiply(as, x)), Simd::Rounded(Simd::Multiply(bs, y)));
    };
    float sums[kLanes];
    Simd::Store(sums, merge(Simd::Set(from.sum[h]), Simd::Set(into.sum[h])));
    into.sum[h] = sums[0];
    const float* y = from.y + h * head_dim;
    float* to = into.y + h * head_dim;
    int64_t d = 0;
    for (; d + kLanes <= head_dim; d += kLanes) {
      Simd::Store(to + d, merge(Simd::Load(y + d), Simd::Load(to + d)));
    }
    const int64_t rest = head_dim - d;
    if (rest == 0) continue;
    Simd::StoreFirst(to + d, rest, merge(Simd::LoadFirst(y + d, rest), Simd::LoadFirst(to + d, rest)));
  }
}

void FinishPartial(int64_t heads, int64_t head_dim, const DecodePartial& partial, float* y, int64_t y_head_bytes) {
  for (int64_t h = 0; h < heads; ++h) {
    const float* from = partial.y + h * head_dim;
    float* to = AtByte(y, h * y_head_bytes);
    const Float inverse = Simd::Set(1 / partial.sum[h]);
    int64_t d = 0;
    for (; d + kLanes <= head_dim; d += kLanes) Simd::Store(to + d, Simd::Multiply(Simd::Load(from + d), inverse));
    const int64_t rest = head_dim - d;
    if (rest == 0) continue;
    Simd::StoreFirst(to + d, rest, Simd::Multiply(Simd::LoadFirst(from + d, rest), inverse));
  }
}

}  // namespace
}  // namespace ortolan
