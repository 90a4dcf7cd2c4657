// One lane: what simd/math.h asks for, on any CPU. Included by kernels only; local to each.
#pragma once

#include <cstdint>

#include "simd/at_byte.h"
#include "simd/math.h"

namespace ortolan::simd {
namespace {

struct scalar {
  using Float = float;
  static constexpr int64_t kLanes = 1;
  static constexpr int kRegisters = 16;

  static float Set(float value) { return value; }
  static float Load(const float* from) { return *from; }
  static float LoadFirst(const float* from, int64_t count) { return count > 0 ? *from : 0.0f; }
  static void Store(float* to, float a) { *to = a; }
  static void StoreFirst(float* to, int64_t count, float a) {
    if (count > 0) *to = a;
  }

  static float Add(float a, float b) { return a + b; }
  static float Subtract(float a, float b) { return a - b; }
  static float Multiply(float a, float b) { return a * b; }
  static float Divide(float a, float b) { return a / b; }
  static float MultiplyAdd(float a, float b, float c) { return a * b + c; }
  static float Max(float a, float b) { return a > b ? a : b; }
  static float Min(float a, float b) { return a < b ? a : b; }
  static float Abs(float a) { return __builtin_fabsf(a); }
  static uint32_t NonZero(float a) { return a != 0.0f ? 1 : 0; }
  static bool HasNan(float a) { return a != a; }
  static float SumOfLanes(float a) { return a; }
  static float ExponentFromLowBits(float a) { return __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, a) << 23); }
  static float SelectLess(float a, float b, float x, float y) { return a < b ? x : y; }
  static float Exp2(float a) { return VectorMath<scalar>::Exp2(Max(-127.0f, a), 1.0f); }
  static float MaxOfLanes(float a) { return a; }
  static float Rounded(float a) {
#if defined(__x86_64__)
    __asm__("" : "+x"(a));
#elif defined(__aarch64__)
    __asm__("" : "+w"(a));
#endif
    return a;
  }

  // Floats: between lanes.
  static void Transpose4(const float* from, int64_t row_bytes, float* to, int64_t) {
    for (int i = 0; i < 4; ++i) to[i] = *AtByte(from, i * row_bytes);
  }
  static void Transpose(float (&)[1]) {}
  static float LoadStrided(const float* from, int64_t) { return *from; }
  static float Lookup16(const float* table, uint32_t index) { return table[index & 15]; }

  // Floats from and to bytes.
  static float LoadBf16(const uint8_t* from) {
    uint16_t bits;
    __builtin_memcpy(&bits, from, sizeof(bits));
    return __builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16);
  }
  static float LoadInt8(const uint8_t* from) { return static_cast<float>(static_cast<int8_t>(*from)); }
  static void StoreBytes(uint8_t* to, float a) { *to = static_cast<uint8_t>(__builtin_nearbyintf(a)); }
  static void StoreInt8(uint8_t* to, float a) {
    *to = static_cast<uint8_t>(static_cast<int32_t>(__builtin_nearbyintf(a)));
  }
  template <int kByte>
  static float SignedByte(uint32_t a) {
    return static_cast<float>(static_cast<int8_t>(a >> 8 * kByte));
  }

  // Units: 32 bits of a lane that are multiplied at once.
  static constexpr int64_t kUnit = 1;
  static float PackUnits(float a, float) { return a; }
  static void StoreUnits(float* to, float a) { *to = a; }
  static float MultiplyAddUnits(float a, float b, float c) { return MultiplyAdd(a, b, c); }

  // Integers of 32 bits.
  using Int = uint32_t;
  static uint32_t SetInt(int32_t value) { return static_cast<uint32_t>(value); }
  static uint32_t LoadInt(const void* from) {
    uint32_t value;
    __builtin_memcpy(&value, from, sizeof(value));
    return value;
  }
  static uint32_t LoadFirstInt(const void* from, int64_t) { return LoadInt(from); }
  static uint32_t ExpandBytes(const uint8_t* from) { return *from; }
  static void StoreInt(void* to, uint32_t a) { __builtin_memcpy(to, &a, sizeof(a)); }
  static uint32_t BitsOf(float a) { return __builtin_bit_cast(uint32_t, a); }
  static float FloatOf(uint32_t a) { return __builtin_bit_cast(float, a); }
  static float ToFloat(uint32_t a) { return static_cast<float>(static_cast<int32_t>(a)); }
  static uint32_t OrInt(uint32_t a, uint32_t b) { return a | b; }
  static uint32_t SelectBits(uint32_t where, uint32_t a, uint32_t b) { return (where & a) | (~where & b); }
  template <int kBits>
  static uint32_t ShiftLeftInt(uint32_t a) {
    return a << kBits;
  }
  template <int kBits>
  static uint32_t ShiftRightInt(uint32_t a) {
    return a >> kBits;
  }
};

}  // namespace
}  // namespace ortolan::simd
