// What attention multiplies, in units of 32 bits: floats, or bf16 in pairs. Included by *attention_kernels.cc only;
// local to each.
//
//     kPair                              numbers that a sum takes one after another: 1, or 2, of which the second comes
//                                        first. Behind an odd number of them stands a zero
//     kUnit                              numbers of a unit
//     StorePair(to, stride, a, b)        numbers a and b as units: one at `to`, or two, the other `stride` behind it.
//                                        Where kPair is 1, a alone
//     StoreWeights(to, stride, a, b)     the same of weights, 0 … 1, where NaN may become any number
//     StoreRow(row, d, a)                kLanes numbers of a row, from number d on, as units
//     MultiplyAddUnits(a, b, c)          a b + c of units a and b, floats c
//     kFlushes                           denormal floats count as zero
//     kInTiles                           products are those of tiles (attention_tiles.h)
#pragma once

#include <cstdint>

namespace ortolan {
namespace {

// Rows of an AMX tile, and units in each of them. Keys have whole tiles of units in all kernels.
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

// Without products of pairs: floats that hold a bf16, and the same steps one by one.
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
  // Neither NaN nor denormal: to nearest even, as RoundToBf16.
  static Float RoundWeight(Float a) {
    const auto bits = Simd::BitsOf(a);
    const auto lowest = Simd::AndInt(Simd::template ShiftRightInt<16>(bits), Simd::SetInt(1));
    return Simd::OddBf16(Simd::AddInt(Simd::AddInt(bits, Simd::SetInt(0x7fff)), lowest));
  }
  // The product is a, or zero for a denormal, which the compiler must not know.
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
