// One lane: what simd/math.h asks for, on any CPU. Included by kernels only; local to each.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace ortolan::simd {
namespace {

struct scalar {
  using Float = float;
  static constexpr int64_t kLanes = 1;

  static float Set(float value) { return value; }
  static float Load(const float* from) { return *from; }
  static float LoadFirst(const float* from, int64_t) { return *from; }
  static void Store(float* to, float a) { *to = a; }
  static void StoreFirst(float* to, int64_t, float a) { *to = a; }

  static float Add(float a, float b) { return a + b; }
  static float Subtract(float a, float b) { return a - b; }
  static float Multiply(float a, float b) { return a * b; }
  static float Divide(float a, float b) { return a / b; }
  static float MultiplyAdd(float a, float b, float c) { return a * b + c; }
  static float Max(float a, float b) { return a > b ? a : b; }
  static float Min(float a, float b) { return a < b ? a : b; }
  static float Abs(float a) { return std::fabs(a); }
  static float SumOfLanes(float a) { return a; }
  static float ExponentFromLowBits(float a) { return std::bit_cast<float>(std::bit_cast<uint32_t>(a) << 23); }
};

}  // namespace
}  // namespace ortolan::simd
