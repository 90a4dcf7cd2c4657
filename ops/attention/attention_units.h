// The 32-bit units in which attention multiplies: single floats, or pairs of bf16. Included only by
// *attention_kernels.cc; local to each target.
//
//     kPair                              values that are summed together, the second one first: 1 or 2; an odd count is
//                                        padded with a zero
//     kUnit                              values in a unit
//     StorePair(to, stride, a, b)        store a and b as one unit, or two units `stride` apart; only a if kPair is 1
//     StoreWeights(to, stride, a, b)     StorePair for weights in 0 … 1; a NaN may become any value
//     StoreRow(row, d, a)                store kLanes values of a row, from value d on, as units
//     MultiplyAddUnits(a, b, c)          a b + c, with a and b units, c floats
//     kFlushes                           denormal floats count as zero
//     kInTiles                           products use AMX tiles (attention_tiles.h)
#pragma once

#include <cstdint>

namespace ortolan {
namespace {

// Rows of an AMX tile, and units in each row. All kernels pad key rows to full tiles.
constexpr int64_t kTileUnits = 16;

template <typename Simd>
struct FloatUnits : Simd {
  using Float = typename Simd::Float;
  static constexpr int64_t kPair = 1;
  static constexpr int64_t kUnit = 1;
  static constexpr bool kFlushes = false;
  static constexpr bool kInTiles = false;
  static void StorePair(float* to, int64_t, Float a, Float) { Simd::Store(to, a); }
  static void StoreWeights(float* to, int64_t, Float a, Float) { Simd::Store(to, a); }
  static void StoreRow(float* row, int64_t d, Float a) { Simd::Store(row + d, a); }
  static Float MultiplyAddUnits(Float a, Float b, Float c) { return Simd::MultiplyAdd(a, b, c); }
};

// Emulates bf16 dot products: each bf16 value is a float, and sums have the same order.
template <typename Simd>
struct Bf16Units : Simd {
  using Float = typename Simd::Float;
  static constexpr bool kFlushes = true;
  static constexpr bool kInTiles = false;
  static constexpr int64_t kPair = 2;
  static constexpr int64_t kUnit = 1;
  static void StorePair(float* to, int64_t stride, Float a, Float b) {
    Simd::Store(to, Round(b));
    Simd::Store(to + stride, Round(a));
  }
  static void StoreWeights(float* to, int64_t stride, Float a, Float b) {
    Simd::Store(to, RoundWeight(b));
    Simd::Store(to + stride, RoundWeight(a));
  }
  static void StoreRow(float* row, int64_t d, Float a) {
    if constexpr (Simd::kLanes == 1) {
      Simd::Store(row + (d ^ 1), Round(a));
    } else {
      Simd::Store(row + d, Simd::SwapPairs(Round(a)));
    }
  }
  static Float MultiplyAddUnits(Float a, Float b, Float c) { return Simd::MultiplyAdd(a, b, c); }

 private:
  // RoundToBf16 for values that are neither NaN nor denormal.
  static Float RoundWeight(Float a) {
    const auto bits = Simd::BitsOf(a);
    const auto lowest = Simd::AndInt(Simd::template ShiftRightInt<16>(bits), Simd::SetInt(1));
    return Simd::OddBf16(Simd::AddInt(Simd::AddInt(bits, Simd::SetInt(0x7fff)), lowest));
  }
  // Multiplying by 1 flushes denormals to zero. Simd::Rounded keeps the compiler from removing the product.
  static Float Round(Float a) { return Simd::RoundToBf16(Simd::Multiply(a, Simd::Rounded(Simd::Set(1.0f)))); }
};

template <typename Simd>
  requires Simd::kDotBf16
struct Bf16Units<Simd> : Simd {
  using Float = typename Simd::Float;
  static constexpr bool kFlushes = true;
  static constexpr bool kInTiles = false;
  static constexpr int64_t kPair = 2;
  static constexpr int64_t kUnit = 2;
  static void StorePair(float* to, int64_t, Float a, Float b) { Simd::Store(to, Simd::PackUnits(a, b)); }
  static void StoreWeights(float* to, int64_t, Float a, Float b) { Simd::Store(to, Simd::PackUnits(a, b)); }
  static void StoreRow(float* row, int64_t d, Float a) { Simd::StoreUnits(row + d / kUnit, a); }
};

}  // namespace
}  // namespace ortolan
