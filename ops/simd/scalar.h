// Vectors of one lane in portable C++; target.h specifies each function. Included by kernels only; local to each.
#pragma once

#include <cstddef>
#include <cstdint>

#include "simd/at_byte.h"
#include "simd/vectors.h"

namespace ortolan::simd {
namespace {

struct scalar_types {
  using Float = float;
  using Int = uint32_t;
  using Unsigned = uint32_t;
  using Signed = int32_t;
};

struct scalar : Vectors<scalar, scalar_types> {
  using Vectors::Transpose;  // and that below
  static constexpr int kRegisters = 16;

  static float Set(float value) { return value; }
  static float Load(const float* from) { return Get<float>(from); }
  static float LoadFirst(const float* from, int64_t count) { return count > 0 ? Load(from) : 0.0f; }
  static void Store(float* to, float a) { __builtin_memcpy(to, &a, sizeof(a)); }
  static void StoreFirst(float* to, int64_t count, float a) {
    if (count > 0) Store(to, a);
  }

  static float MultiplyAdd(float a, float b, float c) {
#if defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    // Computed in double: the product is exact. Rounding the sum to double and then to float is wrong only if the
    // double is halfway between two floats. (The C library's fma would change the rounding mode.)
    const double product = static_cast<double>(a) * static_cast<double>(b);
    const double sum = product + static_cast<double>(c);
    const uint64_t bits = __builtin_bit_cast(uint64_t, sum);
    const bool half_way = (bits & 0x1fffffff) == 0x10000000 || __builtin_fabs(sum) < 0x1p-126;
    if (__builtin_expect(half_way, 0)) return RoundToOdd(product, static_cast<double>(c));
    return static_cast<float>(sum);
#endif
  }
  static float Max(float a, float b) { return a > b ? a : b; }
  static float Min(float a, float b) { return a < b ? a : b; }
  static float Abs(float a) { return __builtin_fabsf(a); }
  static uint32_t NonZero(float a) { return a != 0.0f ? 1 : 0; }
  static bool HasNan(float a) { return a != a; }
  static float SumOfLanes(float a) { return a; }
  static float SelectLess(float a, float b, float x, float y) { return a < b ? x : y; }
  static float MaxOfLanes(float a) { return a; }
  static float Rounded(float a) {
#if defined(__x86_64__)
    __asm__("" : "+x"(a));
#elif defined(__aarch64__)
    __asm__("" : "+w"(a));
#endif
    return a;
  }

  // Floats between lanes.
  static void Transpose4(const float* from, int64_t row_bytes, float* to, int64_t) {
    for (int i = 0; i < 4; ++i) to[i] = Load(AtByte(from, i * row_bytes));
  }
  static void Transpose(float (&)[1]) {}
  static float LoadStrided(const float* from, int64_t) { return Load(from); }
  struct Four {
    float at[4];
  };
  static Four RepeatFour(const float* from) { return Get<Four>(from); }
  static float PickFloats(const Four& four, uint32_t index) { return four.at[index & 3]; }
  static float Lookup16(const float* table, uint32_t index) { return table[index & 15]; }

  // Conversions between floats and bytes.
  static float LoadBf16(const uint8_t* from) {
    uint16_t bits;
    __builtin_memcpy(&bits, from, sizeof(bits));
    return __builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16);
  }
  static float LoadInt8(const uint8_t* from) { return static_cast<float>(static_cast<int8_t>(*from)); }
  static void StoreBytes(uint8_t* to, float a) { *to = static_cast<uint8_t>(__builtin_nearbyintf(a)); }

  // Operations on 32-bit integers.
  static uint32_t SetInt(int32_t value) { return static_cast<uint32_t>(value); }
  static uint32_t LoadInt(const void* from) { return Get<uint32_t>(from); }
  static uint32_t LoadFirstInt(const void* from, int64_t) { return LoadInt(from); }
  static uint32_t LoadUint8(const uint8_t* from) { return *from; }
  static uint32_t LoadSignedBytes(const uint8_t* from) { return static_cast<uint32_t>(static_cast<int8_t>(*from)); }
  static void StoreInt(void* to, uint32_t a) { __builtin_memcpy(to, &a, sizeof(a)); }
  static float ToFloat(uint32_t a) { return static_cast<float>(static_cast<int32_t>(a)); }
  static uint32_t SelectBits(uint32_t where, uint32_t a, uint32_t b) { return (where & a) | (~where & b); }
  static float LoadF16(const uint8_t* from) {
    const uint32_t bits = Get<uint16_t>(from);
    // Inf and NaN keep the largest exponent; all other values, denormals included, are scaled by 2^112.
    const uint32_t magnitude = (bits & 0x7fffu) << 13;
    const float value = (bits & 0x7c00u) == 0x7c00u ? __builtin_bit_cast(float, magnitude | 0x7f800000u)
                                                    : __builtin_bit_cast(float, magnitude) * 0x1p112f;
    return (bits & 0x8000u) != 0 ? -value : value;
  }

  // Integers: arithmetic modulo 2^32.
  static void StoreInt8(void* to, uint32_t a) {
    const int32_t value = static_cast<int32_t>(a);
    *static_cast<int8_t*>(to) = static_cast<int8_t>(value < -128 ? -128 : value > 127 ? 127 : value);
  }
  static int32_t SumOfIntLanes(uint32_t a) { return static_cast<int32_t>(a); }
  static int32_t MaxOfIntLanes(uint32_t a) { return static_cast<int32_t>(a); }
  static uint32_t MaxInt(uint32_t a, uint32_t b) { return static_cast<int32_t>(a) > static_cast<int32_t>(b) ? a : b; }
  static uint32_t RoundToInt(float a) { return static_cast<uint32_t>(static_cast<int32_t>(__builtin_nearbyintf(a))); }
  static uint32_t DotPair(uint32_t sums, uint32_t a, uint32_t b) {
    for (int i = 0; i < 32; i += 16) {
      sums += static_cast<uint32_t>(static_cast<int16_t>(a >> i) * static_cast<int16_t>(b >> i));
    }
    return sums;
  }

  // Bytes.
  static void StoreBytes(uint8_t* to, uint32_t a) { __builtin_memcpy(to, &a, sizeof(a)); }
  static uint32_t SetBytes(int value) { return 0x01010101u * static_cast<uint8_t>(value); }
  static uint32_t SubtractBytes(uint32_t a, uint32_t b) {
    // With the top bits masked, no byte borrows from the next one.
    return ((a | 0x80808080u) - (b & 0x7f7f7f7fu)) ^ ((a ^ ~b) & 0x80808080u);
  }
  static uint32_t MultiplyBytes(uint32_t a, uint32_t b) {
    // Products below 256 do not carry.
    uint32_t products = 0;
    for (int i = 0; i < 32; i += 8) products |= ((a >> i & 0xff) * (b >> i & 0xff)) << i;
    return products;
  }
  static uint32_t ExpandBytes(uint64_t mask, const uint8_t* stored, int first) {
    return ExpandBytesElse(0, mask, stored, first);
  }
  static uint32_t ExpandBytesElse(int fill, uint64_t mask, const uint8_t* stored, int first) {
    return Expand<uint8_t>(static_cast<uint8_t>(fill), mask, stored, first);
  }
  static uint32_t ExpandWords(uint64_t mask, const uint8_t* stored, int first) {
    return Expand<uint16_t>(uint16_t{0}, mask, stored, first);
  }
  using Eight = uint64_t;
  static uint64_t RepeatEight(const void* from) { return Get<uint64_t>(from); }
  static uint32_t PickBytes(uint64_t eight, uint32_t positions) {
    uint32_t picked = 0;
    for (int i = 0; i < 32; i += 8)
      picked |= static_cast<uint32_t>((eight >> (8 * ((positions >> i) & 7))) & 0xff) << i;
    return picked;
  }
  template <int kHalf>
  static uint32_t SpreadBytes(uint32_t a, uint32_t positions) {
    return static_cast<uint32_t>(Spread<8>(a >> (16 * kHalf), positions >> (16 * kHalf)));
  }
  template <int kHalf>
  static uint32_t SpreadWords(uint32_t a, uint32_t positions) {
    return static_cast<uint32_t>(Spread<16>(a, positions) >> (32 * kHalf));
  }
  static constexpr uint32_t kInt8Bias = 0;
  // Not inlined: a panel has sixteen of them per row, and gcc 12 needs a minute to compile them in one function.
  [[gnu::noinline]] static uint32_t DotInt8(uint32_t sums, uint32_t a, uint32_t b) {
    for (int i = 0; i < 32; i += 8) {
      sums += static_cast<uint32_t>(static_cast<int8_t>(a >> i) * static_cast<int8_t>(b >> i));
    }
    return sums;
  }

 private:
  // a + b as a double rounded to odd, then as a float: rounding to odd keeps what the second rounding needs. Zero is
  // exact.
  [[gnu::noinline]] static float RoundToOdd(double a, double b) {
    const double sum = a + b;
    const double added = sum - a;
    const double lost = (a - (sum - added)) + (b - added);
    uint64_t bits = __builtin_bit_cast(uint64_t, sum);
    const bool inexact = lost > 0 || lost < 0;  // false for NaN
    if (inexact && bits % 2 == 0) bits += (lost > 0) == (sum > 0) ? 1 : ~uint64_t{0};
    return static_cast<float>(__builtin_bit_cast(double, bits));
  }
  // Move two values to their positions of four.
  template <int kBits>
  [[gnu::noinline]] static uint64_t Spread(uint32_t a, uint32_t positions) {
    constexpr uint64_t kAll = (uint64_t{1} << kBits) - 1;
    return (a & kAll) << (kBits * (positions & 3)) | ((a >> kBits) & kAll) << (kBits * ((positions >> kBits) & 3));
  }
  template <typename T>
  static T Get(const void* from) {
    T value;
    __builtin_memcpy(&value, from, sizeof(value));
    return value;
  }
  // Not inlined, for the reason given at DotInt8.
  template <typename Value>
  [[gnu::noinline]] static uint32_t Expand(Value fill, uint64_t mask, const uint8_t* stored, int first) {
    stored += sizeof(Value) * static_cast<size_t>(__builtin_popcountll(mask & ((uint64_t{1} << first) - 1)));
    uint32_t spread = 0;
    for (int i = 0; i < static_cast<int>(4 / sizeof(Value)); ++i) {
      Value value = fill;
      if (((mask >> (first + i)) & 1) != 0) {
        value = Get<Value>(stored);
        stored += sizeof(Value);
      }
      spread |= uint32_t{value} << (8 * sizeof(Value) * static_cast<size_t>(i));
    }
    return spread;
  }
};

}  // namespace
}  // namespace ortolan::simd
