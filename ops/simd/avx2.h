// AVX2: vectors of floats, integers and bytes (column.h says what each function does). Local to each file
// that includes it.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "simd/at_byte.h"
#include "simd/vectors.h"

namespace ortolan::simd {
namespace {

// Expansion by shuffles, as there is no instruction for it: for each byte of mask bits the control that moves the next
// stored value, of kBytes bytes, to every place whose bit is set, and zero elsewhere (a control byte with its top bit
// set gives zero).
template <int kBytes>
struct ExpandControls {
  constexpr ExpandControls() {
    for (int mask = 0; mask < 256; ++mask) {
      int next = 0;
      for (int place = 0; place < 8; ++place) {
        const bool stored = ((mask >> place) & 1) != 0;
        for (int i = 0; i < kBytes; ++i) {
          control[mask][place * kBytes + i] = static_cast<uint8_t>(stored ? next++ : 0x80);
        }
      }
    }
  }
  alignas(64) uint8_t control[256][8 * kBytes] = {};
};

constexpr ExpandControls<1> kExpandByteControls;
constexpr ExpandControls<2> kExpandWordControls;

struct avx2_types {
  using Float = __m256;
  using Int = __m256i;
  using Unsigned [[gnu::vector_size(32)]] = uint32_t;
  using Signed [[gnu::vector_size(32)]] = int32_t;
};

struct avx2 : Vectors<avx2, avx2_types> {
  using Vectors::Transpose;  // and those below
  static constexpr int kRegisters = 16;

  static __m256i FirstLanes(int64_t count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static __m256 Set(float value) { return _mm256_set1_ps(value); }
  static __m256 Load(const float* from) { return _mm256_loadu_ps(from); }
  static __m256 LoadFirst(const float* from, int64_t count) { return _mm256_maskload_ps(from, FirstLanes(count)); }
  static void Store(float* to, __m256 a) { _mm256_storeu_ps(to, a); }
  static void StoreFirst(float* to, int64_t count, __m256 a) { _mm256_maskstore_ps(to, FirstLanes(count), a); }

  static __m256 MultiplyAdd(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
  static __m256 Max(__m256 a, __m256 b) { return _mm256_max_ps(a, b); }
  static __m256 Min(__m256 a, __m256 b) { return _mm256_min_ps(a, b); }
  static __m256 Abs(__m256 a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
  static uint32_t NonZero(__m256 a) {
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, _mm256_setzero_ps(), _CMP_NEQ_UQ)));
  }
  static bool HasNan(__m256 a) { return _mm256_movemask_ps(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)) != 0; }
  static float SumOfLanes(__m256 a) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
  static __m256 SelectLess(__m256 a, __m256 b, __m256 x, __m256 y) {
    return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
  }
  static float MaxOfLanes(__m256 a) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
  }
  static __m256 Rounded(__m256 a) {
    __asm__("" : "+x"(a));
    return a;
  }

  // Floats: between lanes.
  static void Transpose4(const float* from, int64_t row_bytes, float* to, int64_t to_row_bytes) {
    for (int l = 0; l < kLanes; l += 4) {
      __m128 a = _mm_loadu_ps(from + l), b = _mm_loadu_ps(AtByte(from, row_bytes) + l);
      __m128 c = _mm_loadu_ps(AtByte(from, 2 * row_bytes) + l), d = _mm_loadu_ps(AtByte(from, 3 * row_bytes) + l);
      _MM_TRANSPOSE4_PS(a, b, c, d);
      _mm_storeu_ps(AtByte(to, l * to_row_bytes), a);
      _mm_storeu_ps(AtByte(to, (l + 1) * to_row_bytes), b);
      _mm_storeu_ps(AtByte(to, (l + 2) * to_row_bytes), c);
      _mm_storeu_ps(AtByte(to, (l + 3) * to_row_bytes), d);
    }
  }
  static void Transpose(__m256 (&a)[8]) {
    __m256 b[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
      b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
      b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {  // halves of lanes hold 4 x 4 blocks, transposed
      a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
      a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xEE);
      a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
      a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xEE);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m256 low = a[i];
      a[i] = _mm256_permute2f128_ps(low, a[i + 4], 0x20);
      a[i + 4] = _mm256_permute2f128_ps(low, a[i + 4], 0x31);
    }
  }
  template <typename Op>
  static __m256 ReduceFour(const __m256 (&a)[4], const Op& op) {
    const __m256 pair = op(_mm256_unpacklo_ps(a[0], a[1]), _mm256_unpackhi_ps(a[0], a[1]));
    const __m256 other = op(_mm256_unpacklo_ps(a[2], a[3]), _mm256_unpackhi_ps(a[2], a[3]));
    const __m256 four = op(_mm256_shuffle_ps(pair, other, 0x44), _mm256_shuffle_ps(pair, other, 0xEE));
    return op(four, _mm256_permute2f128_ps(four, four, 0x01));
  }
  static __m256 LoadStrided(const float* from, int64_t stride) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_i32gather_ps(from, _mm256_mullo_epi32(lanes, _mm256_set1_epi32(static_cast<int>(stride))), 4);
  }
  static __m256 LoadTwice(const float* from) {
    const __m256i twice = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
    return _mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_loadu_ps(from)), twice);
  }
  static __m256 SwapPairs(__m256 a) { return _mm256_permute_ps(a, 0xB1); }
  static __m256 SubtractAdd(__m256 a, __m256 b) { return _mm256_addsub_ps(a, b); }
  static __m256 Lookup16(const float* table, __m256i index) {
    const __m256 low = _mm256_permutevar8x32_ps(Load(table), index);
    const __m256 high = _mm256_permutevar8x32_ps(Load(table + 8), index);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
  }

  // Floats from and to bytes.
  static __m256 LoadBf16(const uint8_t* from) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  static __m256 LoadInt8(const uint8_t* from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
  }
  static void StoreBytes(uint8_t* to, __m256 a) {
    const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(a), _mm256_setzero_si256());
    const __m128i halves = _mm_unpacklo_epi64(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(halves, halves));
  }

  // Integers of 32 bits.
  static __m256i SetInt(int32_t value) { return _mm256_set1_epi32(value); }
  static __m256i LoadInt(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
  static __m256i LoadFirstInt(const void* from, int64_t count) {
    return _mm256_maskload_epi32(static_cast<const int*>(from), FirstLanes(count));
  }
  static __m256i LoadUint8(const uint8_t* from) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  }
  static void StoreInt(void* to, __m256i a) { _mm256_storeu_si256(static_cast<__m256i*>(to), a); }
  static __m256i DotPair(__m256i sums, __m256i a, __m256i b) { return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b)); }
  static __m256i RoundToInt(__m256 a) { return _mm256_cvtps_epi32(a); }
  static __m256 ToFloat(__m256i a) { return _mm256_cvtepi32_ps(a); }
  static __m256i SelectBits(__m256i where, __m256i a, __m256i b) {
    return _mm256_or_si256(_mm256_and_si256(where, a), _mm256_andnot_si256(where, b));
  }
  static __m256 LoadF16(const uint8_t* from) { return _mm256_cvtph_ps(Load128(from)); }

  // Integers: arithmetic.
  static void StoreInt8(void* to, __m256i a) {
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    _mm_storel_epi64(static_cast<__m128i*>(to), _mm_packs_epi16(words, words));
  }
  static int32_t SumOfIntLanes(__m256i a) {
    __m128i sums = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    sums = _mm_add_epi32(sums, _mm_unpackhi_epi64(sums, sums));
    return _mm_cvtsi128_si32(sums) + _mm_extract_epi32(sums, 1);
  }
  static int32_t MaxOfIntLanes(__m256i a) {
    __m128i most = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    most = _mm_max_epi32(most, _mm_unpackhi_epi64(most, most));
    const int32_t even = _mm_cvtsi128_si32(most);
    const int32_t odd = _mm_extract_epi32(most, 1);
    return even > odd ? even : odd;
  }
  static __m256i MaxInt(__m256i a, __m256i b) { return _mm256_max_epi32(a, b); }

  // Bytes.
  static void StoreBytes(uint8_t* to, __m256i a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), a); }
  static __m256i SetBytes(int value) { return _mm256_set1_epi8(static_cast<char>(value)); }
  static __m256i SubtractBytes(__m256i a, __m256i b) { return _mm256_sub_epi8(a, b); }
  static __m256i ExpandBytes(uint64_t mask, const uint8_t* stored, int first) {
    return ExpandEach(mask, first, [&](int64_t place) { return Load64(stored + place); });
  }
  // The fill is taken off what is stored, and put on again where nothing is.
  static __m256i ExpandBytesElse(int fill, uint64_t mask, const uint8_t* stored, int first) {
    const __m128i each = _mm_set1_epi8(static_cast<char>(fill));
    const auto load = [&](int64_t place) { return _mm_xor_si128(Load128(stored + place), each); };
    return _mm256_xor_si256(ExpandEach(mask, first, load), SetBytes(fill));
  }
  static __m256i ExpandWords(uint64_t mask, const uint8_t* stored, int first) {
    const auto eight = [&](int place) {
      const uint64_t before = (uint64_t{1} << place) - 1;
      const uint8_t* control = kExpandWordControls.control[(mask >> place) & 0xff];
      return _mm_shuffle_epi8(Load128(stored + 2 * __builtin_popcountll(mask & before)), Load128(control));
    };
    return _mm256_set_m128i(eight(first + 8), eight(first));
  }

  // Dot products of bytes. There is no exact product of unsigned and signed bytes: the sums of two may saturate. |a| as
  // unsigned operand and b with the sign of a do not: 2 x 128 x 127 fits, and -128 is its own |a|.
  static constexpr uint32_t kInt8Bias = 0;
  static __m256i DotInt8(__m256i sums, __m256i a, __m256i b) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(a), _mm256_sign_epi8(b, a));
    return AddPairs(sums, pairs);
  }
  // Eight products of nibbles fit 16 bits (8 x 2 x 15 x 127 = 30480), and are widened together.
  static constexpr bool kNarrowNibbleSums = true;
  static __m256i StartNibbleSums(__m256i) { return _mm256_setzero_si256(); }
  // By hand: see AddPairs.
  static __m256i DotNibbles(__m256i sums, __m256i nibbles, __m256i b) {
    __asm__("vpaddw %1, %0, %0" : "+x"(sums) : "x"(_mm256_maddubs_epi16(nibbles, b)));
    return sums;
  }
  static __m256i EndNibbleSums(__m256i sums, __m256i narrow) { return AddPairs(sums, narrow); }

  // Rows of bytes
  // vpmaddubsw saturates on sums of u8 x int8: inputs 0 and 1, and 2 and 3, as words.
  struct Quads {
    __m256i pairs[2];
  };
  template <int kVectors>
  static void InterleaveRows(const uint8_t* const (&rows)[4], Quads (&quads)[kVectors]) {
#pragma GCC unroll 2
    for (int p = 0; p < 2; ++p) {
      const uint8_t *const a = rows[2 * p], *const b = rows[2 * p + 1];
      if constexpr (kVectors == 2) {
        const __m128i first = Load128(a), second = Load128(b);
        quads[0].pairs[p] = _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(first, second));
        quads[1].pairs[p] = _mm256_cvtepu8_epi16(_mm_unpackhi_epi8(first, second));
      } else {
        const __m128i first = Load64(a), second = Load64(b);
        quads[0].pairs[p] = _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(first, second));
      }
    }
  }
  template <int kVectors>
  static void DeinterleaveRows(const __m256i (&quads)[kVectors], __m256i (&rows)[kVectors]) {
    const __m256i bytes =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    if constexpr (kVectors == 2) {
      const __m256i order = _mm256_setr_epi32(0, 4, 2, 6, 1, 5, 3, 7);
      const __m256i a = _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(quads[0], bytes), order);
      const __m256i b = _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(quads[1], bytes), order);
      rows[0] = _mm256_unpacklo_epi64(a, b);
      rows[1] = _mm256_unpackhi_epi64(a, b);
    } else {
      const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
      rows[0] = _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(quads[0], bytes), order);
    }
  }
  static __m256i PackBytes(const __m256i (&numbers)[4], int32_t offset) {
    const __m256i words = _mm256_set1_epi16(static_cast<int16_t>(offset));
    const __m256i low = _mm256_adds_epi16(_mm256_packs_epi32(numbers[0], numbers[1]), words);
    const __m256i high = _mm256_adds_epi16(_mm256_packs_epi32(numbers[2], numbers[3]), words);
    const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    return _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), in_order);
  }
  template <int kVectors>
  static __m256i PackRows(const __m256i (&numbers)[4], int32_t offset) {
    return PackBytes(numbers, offset);
  }

  struct QuadWeights {
    alignas(32) int32_t pairs[8];  // of words
    explicit QuadWeights(const int8_t* values) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values));
      _mm256_store_si256(reinterpret_cast<__m256i*>(pairs), _mm256_cvtepi8_epi16(bytes));
    }
  };
  template <int kVectors>
  static void DotQuadWeights(__m256i (&sums)[kVectors], const Quads (&quads)[kVectors], const QuadWeights& weights,
                             int output) {
#pragma GCC unroll 2
    for (int p = 0; p < 2; ++p) {
      const __m256i weight = _mm256_set1_epi32(weights.pairs[2 * output + p]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sums[v] = DotPair(sums[v], quads[v].pairs[p], weight);
    }
  }

  // Tables
  // Rows of 16 entries, looked up by the low four bits, of which the high four choose.
  struct ByteTable {
    __m256i rows[16];
    explicit ByteTable(const uint8_t* entries) {
      for (int r = 0; r < 16; ++r) rows[r] = _mm256_broadcastsi128_si256(Load128(entries + 16 * r));
    }
  };
  static __m256i Lookup256(const ByteTable& table, __m256i bytes) {
    const __m256i low = _mm256_and_si256(bytes, SetBytes(0x0f));
    // vpblendvb looks at bit 7 of each byte: bits 4, 5 and 6 are shifted there.
    __m256i found[8];
    const __m256i bit4 = _mm256_slli_epi16(bytes, 3);
    for (int r = 0; r < 8; ++r) {
      found[r] = _mm256_blendv_epi8(_mm256_shuffle_epi8(table.rows[2 * r], low),
                                    _mm256_shuffle_epi8(table.rows[2 * r + 1], low), bit4);
    }
    const __m256i bit5 = _mm256_slli_epi16(bytes, 2);
    for (int r = 0; r < 4; ++r) found[r] = _mm256_blendv_epi8(found[2 * r], found[2 * r + 1], bit5);
    const __m256i bit6 = _mm256_slli_epi16(bytes, 1);
    for (int r = 0; r < 2; ++r) found[r] = _mm256_blendv_epi8(found[2 * r], found[2 * r + 1], bit6);
    return _mm256_blendv_epi8(found[0], found[1], bytes);
  }
  static constexpr bool kGathersBytes = false;

 protected:
  static __m128i Load128(const uint8_t* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }
  static __m128i Load64(const uint8_t* from) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)); }
  // sums + the sums of pairs of words. By hand: gcc 12 makes a tree of the sums, whose products then spill.
  static __m256i AddPairs(__m256i sums, __m256i words) {
    __asm__("vpaddd %1, %0, %0" : "+x"(sums) : "x"(_mm256_madd_epi16(words, _mm256_set1_epi16(1))));
    return sums;
  }
  // No expand here: each byte of the mask picks a shuffle that spreads up to eight bytes, load(place), to their places.
  template <typename LoadStored>
  static __m256i ExpandEach(uint64_t mask, int first, const LoadStored& load) {
    const auto eight = [&](int place) {
      const uint64_t before = (uint64_t{1} << place) - 1;
      const uint8_t* control = kExpandByteControls.control[(mask >> place) & 0xff];
      return _mm_shuffle_epi8(load(__builtin_popcountll(mask & before)), Load64(control));
    };
    return _mm256_set_m128i(_mm_unpacklo_epi64(eight(first + 16), eight(first + 24)),
                            _mm_unpacklo_epi64(eight(first), eight(first + 8)));
  }
};

}  // namespace
}  // namespace ortolan::simd
