// The minimum and maximum of a row of x. Included by *kernels.cc only; local to each.
#pragma once

#include <cstdint>

namespace ortolan {
namespace {

struct Extremes {
  float least, most;  // least <= 0 <= most; undefined if the row is not finite
  bool finite;
};

template <typename Simd>
Extremes ExtremesOf(const float* x, int64_t k) {
  using Float = typename Simd::Float;
  constexpr int kChains = 4;  // independent chains
  const Float zero = Simd::Set(0.0f);
  Float least[kChains] = {zero, zero, zero, zero}, most[kChains] = {zero, zero, zero, zero};
  Float nan[kChains] = {zero, zero, zero, zero};
  const auto add = [&](int i, Float v) {
    least[i] = Simd::Min(v, least[i]);
    most[i] = Simd::Max(v, most[i]);
    nan[i] = Simd::MultiplyAdd(v, zero, nan[i]);  // Inf or NaN makes it NaN and it stays NaN
  };
  int64_t l = 0;
  for (; l + kChains * Simd::kLanes <= k; l += kChains * Simd::kLanes) {
#pragma GCC unroll 4
    for (int i = 0; i < kChains; ++i) add(i, Simd::Load(x + l + i * Simd::kLanes));
  }
  for (; l < k; l += Simd::kLanes) add(0, Simd::LoadSome(x + l, k - l));
  for (int i = 1; i < kChains; ++i) {
    least[0] = Simd::Min(least[0], least[i]);
    most[0] = Simd::Max(most[0], most[i]);
    nan[0] = Simd::Add(nan[0], nan[i]);
  }
  return {-Simd::MaxOfLanes(Simd::Abs(least[0])), Simd::MaxOfLanes(most[0]), !Simd::HasNan(nan[0])};
}

}  // namespace
}  // namespace ortolan
