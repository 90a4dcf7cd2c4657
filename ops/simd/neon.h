// NEON, which every 64-bit Arm CPU has: vectors of floats, integers and bytes; target.h specifies each function. Local
// to each file that includes it.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "simd/at_byte.h"
#include "simd/expand_controls.h"
#include "simd/spread_control.h"
#include "simd/vectors.h"

namespace ortolan::simd {
namespace {

struct neon_types {
  using Float = float32x4_t;
  using Int = int32x4_t;
  using Unsigned = uint32x4_t;
  using Signed = int32x4_t;
};

struct neon : Vectors<neon, neon_types> {
  using Vectors::RepeatQuad;  // and those below
  using Vectors::Transpose;
  static constexpr int kRegisters = 32;

  static float32x4_t Set(float value) { return vdupq_n_f32(value); }
  static float32x4_t Load(const float* from) { return vld1q_f32(from); }
  static float32x4_t LoadFirst(const float* from, int64_t count) {
    if (count >= kLanes) return Load(from);
    if (count < 2) return count < 1 ? Set(0.0f) : vld1q_lane_f32(from, Set(0.0f), 0);
    const float32x4_t two = vcombine_f32(vld1_f32(from), vdup_n_f32(0.0f));
    return count < 3 ? two : vld1q_lane_f32(from + 2, two, 2);
  }
  static void Store(float* to, float32x4_t a) { vst1q_f32(to, a); }
  static void StoreFirst(float* to, int64_t count, float32x4_t a) {
    if (count >= kLanes) return Store(to, a);
    if (count == 1) vst1q_lane_f32(to, a, 0);
    if (count >= 2) vst1_f32(to, vget_low_f32(a));
    if (count == 3) vst1q_lane_f32(to + 2, a, 2);
  }

  static float32x4_t MultiplyAdd(float32x4_t a, float32x4_t b, float32x4_t c) { return vfmaq_f32(c, a, b); }
  // FMAX returns NaN if either operand is NaN, and +0 for two zeros, so it cannot be used.
  static float32x4_t Max(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
  static float32x4_t Min(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
  static float32x4_t Abs(float32x4_t a) { return vabsq_f32(a); }
  static uint32_t NonZero(float32x4_t a) {
    constexpr uint32_t kBits[] = {1, 2, 4, 8};
    return vaddvq_u32(vbicq_u32(vld1q_u32(kBits), vceqzq_f32(a)));
  }
  static bool HasNan(float32x4_t a) { return vminvq_u32(vceqq_f32(a, a)) == 0; }
  static float SumOfLanes(float32x4_t a) { return vpadds_f32(vadd_f32(vget_low_f32(a), vget_high_f32(a))); }
  static float32x4_t SelectLess(float32x4_t a, float32x4_t b, float32x4_t x, float32x4_t y) {
    return vbslq_f32(vcltq_f32(a, b), x, y);
  }
  static float MaxOfLanes(float32x4_t a) {
    const float32x4_t two = Max(a, vextq_f32(a, a, 2));
    return vgetq_lane_f32(Max(two, vextq_f32(two, two, 1)), 0);
  }
  static float32x4_t Rounded(float32x4_t a) {
    __asm__("" : "+w"(a));
    return a;
  }

  // Floats between lanes.
  static void Transpose(float32x4_t (&a)[4]) {
    const float32x4_t even = vtrn1q_f32(a[0], a[1]), odd = vtrn2q_f32(a[0], a[1]);
    const float32x4_t even2 = vtrn1q_f32(a[2], a[3]), odd2 = vtrn2q_f32(a[2], a[3]);
    a[0] = LowHalves(even, even2), a[1] = LowHalves(odd, odd2);
    a[2] = HighHalves(even, even2), a[3] = HighHalves(odd, odd2);
  }
  static void Transpose4(const float* from, int64_t row_bytes, float* to, int64_t to_row_bytes) {
    float32x4_t rows[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) rows[i] = Load(AtByte(from, i * row_bytes));
    Transpose(rows);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) Store(AtByte(to, i * to_row_bytes), rows[i]);
  }
  template <typename Op>
  static float32x4_t ReduceFour(const float32x4_t (&a)[4], const Op& op) {
    const float32x4_t pair = op(vzip1q_f32(a[0], a[1]), vzip2q_f32(a[0], a[1]));
    const float32x4_t other = op(vzip1q_f32(a[2], a[3]), vzip2q_f32(a[2], a[3]));
    return op(LowHalves(pair, other), HighHalves(pair, other));
  }
  static float32x4_t LoadStrided(const float* from, int64_t stride) {
    float32x4_t lanes = vld1q_dup_f32(from);
    lanes = vld1q_lane_f32(from + stride, lanes, 1);
    lanes = vld1q_lane_f32(from + 2 * stride, lanes, 2);
    return vld1q_lane_f32(from + 3 * stride, lanes, 3);
  }
  static float32x4_t LoadTwice(const float* from) {
    const float32x2_t two = vld1_f32(from);
    return vcombine_f32(vdup_lane_f32(two, 0), vdup_lane_f32(two, 1));
  }
  static float32x4_t SwapPairs(float32x4_t a) { return vrev64q_f32(a); }
  static float32x4_t SubtractAdd(float32x4_t a, float32x4_t b) {
    const uint32x4_t even_signs = vreinterpretq_u32_u64(vdupq_n_u64(0x80000000u));
    return vaddq_f32(a, vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(b), even_signs)));
  }
  static float32x4_t Lookup16(const float* table, int32x4_t index) {
    return vreinterpretq_f32_u8(LookupQuads(reinterpret_cast<const uint8_t*>(table), index));
  }
  static float32x4_t RepeatFour(const float* from) { return Load(from); }
  static float32x4_t PickFloats(float32x4_t four, int32x4_t index) {
    const uint8x16_t quads = QuadsAt(vandq_s32(index, vdupq_n_s32(3)));
    return vreinterpretq_f32_u8(vqtbl1q_u8(vreinterpretq_u8_f32(four), quads));
  }

  // Conversions between floats and bytes.
  static float32x4_t LoadBf16(const uint8_t* from) { return FloatOf(Int(vshll_n_u16(LoadHalves(from), 16))); }
  static float32x4_t LoadF16(const uint8_t* from) { return vcvt_f32_f16(vreinterpret_f16_u16(LoadHalves(from))); }
  static float32x4_t LoadInt8(const uint8_t* from) {
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(LoadQuad(from))))));
  }
  static void StoreBytes(uint8_t* to, float32x4_t a) {
    const uint16x4_t words = vqmovun_s32(RoundToInt(a));
    StoreQuad(to, vqmovn_u16(vcombine_u16(words, words)));
  }

  // Operations on 32-bit integers.
  static int32x4_t SetInt(int32_t value) { return vdupq_n_s32(value); }
  static int32x4_t LoadInt(const void* from) { return IntOf(vld1q_u8(static_cast<const uint8_t*>(from))); }
  static int32x4_t LoadFirstInt(const void* from, int64_t count) {
    return BitsOf(LoadFirst(static_cast<const float*>(from), count));
  }
  static int32x4_t LoadUint8(const uint8_t* from) { return Int(vmovl_u16(vget_low_u16(vmovl_u8(LoadQuad(from))))); }
  static int32x4_t LoadSignedBytes(const uint8_t* from) {
    return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(LoadQuad(from)))));
  }
  static void StoreInt(void* to, int32x4_t a) { vst1q_u8(static_cast<uint8_t*>(to), BytesOf(a)); }
  static int32x4_t RoundToInt(float32x4_t a) { return vcvtnq_s32_f32(a); }
  static float32x4_t ToFloat(int32x4_t a) { return vcvtq_f32_s32(a); }
  static int32x4_t SelectBits(int32x4_t where, int32x4_t a, int32x4_t b) {
    return vbslq_s32(vreinterpretq_u32_s32(where), a, b);
  }

  // Integers: arithmetic.
  static void StoreInt8(void* to, int32x4_t a) {
    const int16x4_t words = vqmovn_s32(a);
    StoreQuad(static_cast<uint8_t*>(to), vreinterpret_u8_s8(vqmovn_s16(vcombine_s16(words, words))));
  }
  static int32_t SumOfIntLanes(int32x4_t a) { return vaddvq_s32(a); }
  static int32_t MaxOfIntLanes(int32x4_t a) { return vmaxvq_s32(a); }
  static int32x4_t MaxInt(int32x4_t a, int32x4_t b) { return vmaxq_s32(a, b); }
  static int32x4_t DotPair(int32x4_t sums, int32x4_t a, int32x4_t b) {
    const int16x8_t x = vreinterpretq_s16_s32(a), y = vreinterpretq_s16_s32(b);
    const int32x4_t low = vmull_s16(vget_low_s16(x), vget_low_s16(y));
    return vaddq_s32(sums, vpaddq_s32(low, vmull_high_s16(x, y)));
  }

  // Bytes.
  static void StoreBytes(uint8_t* to, int32x4_t a) { vst1q_u8(to, BytesOf(a)); }
  static int32x4_t SetBytes(int value) { return IntOf(vdupq_n_u8(static_cast<uint8_t>(value))); }
  static int32x4_t SubtractBytes(int32x4_t a, int32x4_t b) { return IntOf(vsubq_u8(BytesOf(a), BytesOf(b))); }
  static int32x4_t MultiplyBytes(int32x4_t a, int32x4_t b) { return IntOf(vmulq_u8(BytesOf(a), BytesOf(b))); }
  static int32x4_t RepeatEachByte(const uint8_t* from) {
    int32_t four;
    __builtin_memcpy(&four, from, sizeof(four));
    return IntOf(vqtbl1q_u8(BytesOf(vdupq_n_s32(four)), vld1q_u8(kRepeatControl.at)));
  }
  static int32x4_t HighNibbles(int32x4_t a) { return IntOf(vshrq_n_u8(BytesOf(a), 4)); }
  static int32x4_t ExpandBytes(uint64_t mask, const uint8_t* stored, int first) {
    const uint64_t before = (uint64_t{1} << first) - 1;
    return IntOf(vqtbl1q_u8(vld1q_u8(stored + __builtin_popcountll(mask & before)), ExpandControl(mask >> first)));
  }
  static int32x4_t ExpandBytesElse(int fill, uint64_t mask, const uint8_t* stored, int first) {
    const uint64_t before = (uint64_t{1} << first) - 1;
    const uint8x16_t values = vld1q_u8(stored + __builtin_popcountll(mask & before));
    return IntOf(vqtbx1q_u8(vdupq_n_u8(static_cast<uint8_t>(fill)), values, ExpandControl(mask >> first)));
  }
  static int32x4_t ExpandWords(uint64_t mask, const uint8_t* stored, int first) {
    const uint64_t before = (uint64_t{1} << first) - 1;
    const uint8x16_t values = vld1q_u8(stored + 2 * __builtin_popcountll(mask & before));
    return IntOf(vqtbl1q_u8(values, vld1q_u8(kExpandWordControls.control[(mask >> first) & 0xff])));
  }
  // Repeat16(p) and RepeatQuad(a, which): `which` is a constant once the loop is unrolled.
  static int32x4_t Repeat16(const void* from) { return LoadInt(from); }
  static int32x4_t RepeatQuad(int32x4_t a, int which) {
    switch (which) {
      case 0:
        return vdupq_laneq_s32(a, 0);
      case 1:
        return vdupq_laneq_s32(a, 1);
      case 2:
        return vdupq_laneq_s32(a, 2);
      default:
        return vdupq_laneq_s32(a, 3);
    }
  }
  static int32x4_t RepeatEight(const void* from) {
    const uint8x8_t eight = vld1_u8(static_cast<const uint8_t*>(from));
    return IntOf(vcombine_u8(eight, eight));
  }
  static int32x4_t PickBytes(int32x4_t eight, int32x4_t positions) {
    return IntOf(vqtbl1q_u8(BytesOf(eight), BytesOf(positions)));
  }
  template <int kHalf>
  static int32x4_t SpreadBytes(int32x4_t a, int32x4_t positions) {
    const int32x4_t both = ShiftRightInt<16 * kHalf>(positions);
    const int32x4_t index = AddInt(ShiftLeftInt<1>(both), ShiftRightInt<8>(both));  // the index is in the lowest bits
    const uint8x16_t quad = vaddq_u8(vld1q_u8(kSpreadControl.quad), vdupq_n_u8(2 * kHalf));
    return IntOf(vqtbl1q_u8(BytesOf(a), vaddq_u8(LookupQuads(kSpreadControl.control[0], index), quad)));
  }
  // Positions ascend, so each word goes to one position of each half: its own or, after the swap, the other one.
  template <int kHalf>
  static int32x4_t SpreadWords(int32x4_t a, int32x4_t positions) {
    const uint16x8_t here = vreinterpretq_u16_u32(vdupq_n_u32((2 * kHalf + 1) << 16 | 2 * kHalf));
    const uint16x8_t words = vreinterpretq_u16_s32(a), of = vreinterpretq_u16_s32(positions);
    const uint16x8_t own = vandq_u16(words, vceqq_u16(of, here));
    const uint16x8_t other = vandq_u16(vrev32q_u16(words), vceqq_u16(vrev32q_u16(of), here));
    return vreinterpretq_s32_u16(vorrq_u16(own, other));
  }

  // Dot products of bytes: sums of two products fit 16 bits (2 x 128 x 127).
  static constexpr uint32_t kInt8Bias = 0;
  static int32x4_t DotInt8(int32x4_t sums, int32x4_t a, int32x4_t b) { return vpadalq_s16(sums, PairSums(a, b)); }
  // Eight products of nibbles fit 16 bits, as in avx2.h.
  static constexpr bool kNarrowNibbleSums = true;
  static int32x4_t StartNibbleSums(int32x4_t) { return vdupq_n_s32(0); }
  static int32x4_t DotNibbles(int32x4_t sums, int32x4_t nibbles, int32x4_t b) {
    return vreinterpretq_s32_s16(vaddq_s16(vreinterpretq_s16_s32(sums), PairSums(nibbles, b)));
  }
  static int32x4_t EndNibbleSums(int32x4_t sums, int32x4_t narrow) {
    return vpadalq_s16(sums, vreinterpretq_s16_s32(narrow));
  }

  // Rows of words: lanes are tokens, weights are selected by lane.
  using RowElement = int16_t;
  template <int kTokens>
  static constexpr int kRowWords = kTokens;
  // By output, then four tokens at a time.
  template <int kTokens>
  static constexpr int kRowSums = kTokens;
  static int32x4_t PackWords(int32x4_t a, int32x4_t b, int32_t least, int32_t most) {
    const int16x8_t words = vcombine_s16(vqmovn_s32(a), vqmovn_s32(b));
    const int16x8_t cut = vmaxq_s16(words, vdupq_n_s16(static_cast<int16_t>(least)));
    return vreinterpretq_s32_s16(vminq_s16(cut, vdupq_n_s16(static_cast<int16_t>(most))));
  }
  template <int kTokens>
  static void StoreInputs(const int32x4_t (&tokens)[kTokens], int16_t* to) {
    static_assert(kTokens == 4 || kTokens == 8);
    const auto words = [&](int i) { return vreinterpretq_s16_s32(tokens[i]); };
    // A named array: clang defines stores of several vectors as macros, which cannot take braces.
    if constexpr (kTokens == 4) {
      const int16x8x4_t all{{words(0), words(1), words(2), words(3)}};
      vst4q_s16(to, all);
    } else {
      const auto low = [&](int i) { return vreinterpretq_s32_s16(vzip1q_s16(words(i), words(i + 1))); };
      const auto high = [&](int i) { return vreinterpretq_s32_s16(vzip2q_s16(words(i), words(i + 1))); };
      const int32x4x4_t lows{{low(0), low(2), low(4), low(6)}}, highs{{high(0), high(2), high(4), high(6)}};
      vst4q_s32(reinterpret_cast<int32_t*>(to), lows);
      vst4q_s32(reinterpret_cast<int32_t*>(to + 32), highs);
    }
  }
  template <int kTokens>
  static void DotRows(int32x4_t (&sums)[kRowSums<kTokens>], const int16_t* const (&rows)[4], const int8_t* weights) {
    const int8x16_t bytes = vld1q_s8(weights);
    const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);  // two outputs each
    AddRow<kTokens, 0>(sums, rows, low, high);
    AddRow<kTokens, 1>(sums, rows, low, high);
    AddRow<kTokens, 2>(sums, rows, low, high);
    AddRow<kTokens, 3>(sums, rows, low, high);
  }
  template <int kVectors>
  static void EndRowSums(const int32x4_t (&sums)[4 * kVectors], int32x4_t (&of)[4][kVectors]) {
#pragma GCC unroll 8
    for (int i = 0; i < 4 * kVectors; ++i) of[i / kVectors][i % kVectors] = sums[i];
  }
  template <int kVectors>
  static void StoreRows(int16_t* to, int32x4_t bytes, int32_t zero) {
    const uint16x8_t zeros = vdupq_n_u16(static_cast<uint16_t>(zero));
    const uint16x8_t low = vmovl_u8(vget_low_u8(BytesOf(bytes))), high = vmovl_high_u8(BytesOf(bytes));
    vst1q_s16(to, vreinterpretq_s16_u16(vsubq_u16(low, zeros)));
    vst1q_s16(to + 8, vreinterpretq_s16_u16(vsubq_u16(high, zeros)));
  }

  static int32x4_t PackBytes(const int32x4_t (&integers)[4], int32_t offset) {
    const int16x8_t words = vdupq_n_s16(static_cast<int16_t>(offset));
    const auto two = [&](int i) { return vcombine_s16(vqmovn_s32(integers[i]), vqmovn_s32(integers[i + 1])); };
    const uint8x8_t low = vqmovun_s16(vqaddq_s16(two(0), words)), high = vqmovun_s16(vqaddq_s16(two(2), words));
    return IntOf(vcombine_u8(low, high));
  }

  // Tables: an instruction looks up 64 entries and returns zero, or keeps the destination, for other indices.
  struct ByteTable {
    uint8x16x4_t quarters[4];
    explicit ByteTable(const uint8_t* entries) {
      for (int i = 0; i < 4; ++i) quarters[i] = vld1q_u8_x4(entries + 64 * i);
    }
  };
  static int32x4_t Lookup256(const ByteTable& table, int32x4_t bytes) {
    uint8x16_t index = BytesOf(bytes);
    uint8x16_t found = vqtbl4q_u8(table.quarters[0], index);
#pragma GCC unroll 3
    for (int i = 1; i < 4; ++i) {
      index = vsubq_u8(index, vdupq_n_u8(64));
      found = vqtbx4q_u8(found, table.quarters[i], index);
    }
    return IntOf(found);
  }
  template <int kParts>
  static int32x4_t DealBytes(int32x4_t a) {
    return a;
  }
  static void InterleaveBytes(const int32x4_t (&parts)[2], int32x4_t (&to)[2]) {
    to[0] = IntOf(vzip1q_u8(BytesOf(parts[0]), BytesOf(parts[1])));
    to[1] = IntOf(vzip2q_u8(BytesOf(parts[0]), BytesOf(parts[1])));
  }
  static void InterleaveBytes(const int32x4_t (&parts)[4], int32x4_t (&to)[4]) {
    const uint16x8_t low01 = vreinterpretq_u16_u8(vzip1q_u8(BytesOf(parts[0]), BytesOf(parts[1])));
    const uint16x8_t high01 = vreinterpretq_u16_u8(vzip2q_u8(BytesOf(parts[0]), BytesOf(parts[1])));
    const uint16x8_t low23 = vreinterpretq_u16_u8(vzip1q_u8(BytesOf(parts[2]), BytesOf(parts[3])));
    const uint16x8_t high23 = vreinterpretq_u16_u8(vzip2q_u8(BytesOf(parts[2]), BytesOf(parts[3])));
    to[0] = vreinterpretq_s32_u16(vzip1q_u16(low01, low23));
    to[1] = vreinterpretq_s32_u16(vzip2q_u16(low01, low23));
    to[2] = vreinterpretq_s32_u16(vzip1q_u16(high01, high23));
    to[3] = vreinterpretq_s32_u16(vzip2q_u16(high01, high23));
  }
  static constexpr bool kGathersBytes = false;

 protected:
  static uint8x16_t BytesOf(int32x4_t a) { return vreinterpretq_u8_s32(a); }
  static int32x4_t IntOf(uint8x16_t a) { return vreinterpretq_s32_u8(a); }
  static float32x4_t LowHalves(float32x4_t a, float32x4_t b) { return vcombine_f32(vget_low_f32(a), vget_low_f32(b)); }
  static float32x4_t HighHalves(float32x4_t a, float32x4_t b) {
    return vcombine_f32(vget_high_f32(a), vget_high_f32(b));
  }
  static uint16x4_t LoadHalves(const uint8_t* from) { return vreinterpret_u16_u8(vld1_u8(from)); }
  static uint8x8_t LoadQuad(const uint8_t* from) {
    uint32_t quad;
    __builtin_memcpy(&quad, from, sizeof(quad));
    return vreinterpret_u8_u32(vdup_n_u32(quad));
  }
  static void StoreQuad(uint8_t* to, uint8x8_t bytes) {
    const uint32_t quad = vget_lane_u32(vreinterpret_u32_u8(bytes), 0);
    __builtin_memcpy(to, &quad, sizeof(quad));
  }
  // The byte positions of the quads with these indices, 0 … 63.
  static uint8x16_t QuadsAt(int32x4_t indices) {
    return BytesOf(vmlaq_n_s32(vdupq_n_s32(0x03020100), indices, 0x04040404));
  }
  // Look up 16 quads by the low 4 bits of each index.
  static uint8x16_t LookupQuads(const uint8_t* table, int32x4_t indices) {
    return vqtbl4q_u8(vld1q_u8_x4(table), QuadsAt(vandq_s32(indices, vdupq_n_s32(15))));
  }
  // The shuffle control for the low 16 bits of a mask (expand_controls.h).
  static uint8x16_t ExpandControl(uint64_t mask) {
    const uint8x8_t low = vld1_u8(kExpandByteControls.control[mask & 0xff]);
    const uint8x8_t high = vld1_u8(kExpandByteControls.control[(mask >> 8) & 0xff]);
    return vcombine_u8(low, vadd_u8(high, vdup_n_u8(static_cast<uint8_t>(__builtin_popcountll(mask & 0xff)))));
  }
  // Sums of pairs of byte products.
  static int16x8_t PairSums(int32x4_t a, int32x4_t b) {
    const int8x16_t x = vreinterpretq_s8_s32(a), y = vreinterpretq_s8_s32(b);
    return vpaddq_s16(vmull_s8(vget_low_s8(x), vget_low_s8(y)), vmull_high_s8(x, y));
  }
  // Add the products of one input's row with its weights.
  template <int kTokens, int kInput>
  static void AddRow(int32x4_t (&sums)[kTokens], const int16_t* const (&rows)[4], int16x8_t low, int16x8_t high) {
    const int16_t* const row = rows[kInput];
    if constexpr (kTokens == 4) {
      const int16x4_t tokens = vld1_s16(row);
      sums[0] = vmlal_laneq_s16(sums[0], tokens, low, kInput);
      sums[1] = vmlal_laneq_s16(sums[1], tokens, low, 4 + kInput);
      sums[2] = vmlal_laneq_s16(sums[2], tokens, high, kInput);
      sums[3] = vmlal_laneq_s16(sums[3], tokens, high, 4 + kInput);
    } else {
      const int16x8_t tokens = vld1q_s16(row);
      sums[0] = vmlal_laneq_s16(sums[0], vget_low_s16(tokens), low, kInput);
      sums[1] = vmlal_high_laneq_s16(sums[1], tokens, low, kInput);
      sums[2] = vmlal_laneq_s16(sums[2], vget_low_s16(tokens), low, 4 + kInput);
      sums[3] = vmlal_high_laneq_s16(sums[3], tokens, low, 4 + kInput);
      sums[4] = vmlal_laneq_s16(sums[4], vget_low_s16(tokens), high, kInput);
      sums[5] = vmlal_high_laneq_s16(sums[5], tokens, high, kInput);
      sums[6] = vmlal_laneq_s16(sums[6], vget_low_s16(tokens), high, 4 + kInput);
      sums[7] = vmlal_high_laneq_s16(sums[7], tokens, high, 4 + kInput);
    }
  }
};

}  // namespace
}  // namespace ortolan::simd
