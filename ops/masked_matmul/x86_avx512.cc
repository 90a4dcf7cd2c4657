// AVX-512: a block is one register.
#include <immintrin.h>

#include "masked_matmul/kernel_functions.h"

namespace ortolan {
namespace {

alignas(64) constexpr uint8_t kBitNumbers[64] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                                 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31,
                                                 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47,
                                                 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};

struct Avx512Block {
  using Vector = __m512;
  using Scalar = __m512;
  static constexpr int kVectorsABlock = 1;
  static constexpr int kTileColumns = 8;  // sums of a tile that are in registers

  static __mmask16 First(int64_t count) { return static_cast<__mmask16>((1u << count) - 1); }
  static __m512 Zero() { return _mm512_setzero_ps(); }
  static __m512 Set(float value) { return _mm512_set1_ps(value); }
  static __m512 Load(const float* from) { return _mm512_loadu_ps(from); }
  static __m512 LoadFirst(const float* from, int64_t count) { return _mm512_maskz_loadu_ps(First(count), from); }
  static void Store(float* to, __m512 v) { _mm512_storeu_ps(to, v); }
  static void StoreFirst(float* to, int64_t count, __m512 v) { _mm512_mask_storeu_ps(to, First(count), v); }
  // In a register: gcc would load it again for each product.
  static void Keep(__m512& v) { __asm__("" : "+v"(v)); }
  static __m512 Broadcast(const float* from) { return _mm512_set1_ps(*from); }
  static __m512 Add(__m512 a, __m512 b) { return _mm512_add_ps(a, b); }
  static __m512 Multiply(__m512 a, __m512 b) { return _mm512_mul_ps(a, b); }
  static __m512 MultiplyAdd(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
  static uint32_t Bits(__m512 v) { return _mm512_cmp_ps_mask(v, _mm512_setzero_ps(), _CMP_NEQ_UQ); }
  static bool HasNan(__m512 v) { return _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q) != 0; }
  static __m512 LoadBf16(const uint16_t* from) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  static __m512 LoadInt8(const int8_t* from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
  }

  // Four rows of 16 numbers to 16 rows of four.
  static void Transpose4x16(const float* from, int64_t row_bytes, float* to, int64_t to_row) {
    const auto pairs = [](__m512 a) { return _mm512_castps_pd(a); };
    const auto floats = [](__m512d a) { return _mm512_castpd_ps(a); };
    const __m512 a = Load(from), b = Load(AtByte(from, row_bytes));
    const __m512 c = Load(AtByte(from, 2 * row_bytes)), d = Load(AtByte(from, 3 * row_bytes));
    const __m512d ab_low = pairs(_mm512_unpacklo_ps(a, b)), ab_high = pairs(_mm512_unpackhi_ps(a, b));
    const __m512d cd_low = pairs(_mm512_unpacklo_ps(c, d)), cd_high = pairs(_mm512_unpackhi_ps(c, d));
    // Lane l of columns[i] is column 4 l + i.
    const __m512 columns[] = {floats(_mm512_unpacklo_pd(ab_low, cd_low)), floats(_mm512_unpackhi_pd(ab_low, cd_low)),
                              floats(_mm512_unpacklo_pd(ab_high, cd_high)),
                              floats(_mm512_unpackhi_pd(ab_high, cd_high))};
    ORTOLAN_UNROLL
    for (int i = 0; i < 4; ++i) {
      _mm_storeu_ps(to + i * to_row, _mm512_castps512_ps128(columns[i]));
      _mm_storeu_ps(to + (4 + i) * to_row, _mm512_extractf32x4_ps(columns[i], 1));
      _mm_storeu_ps(to + (8 + i) * to_row, _mm512_extractf32x4_ps(columns[i], 2));
      _mm_storeu_ps(to + (12 + i) * to_row, _mm512_extractf32x4_ps(columns[i], 3));
    }
  }

  // The numbers of a row whose bits are set, and which they are. May write up to 64 of each.
  static void PackNumbers(const float* row, uint64_t mask, float* values, uint8_t* inputs) {
    _mm512_storeu_si512(inputs, _mm512_maskz_compress_epi8(mask, _mm512_load_si512(kBitNumbers)));
    ORTOLAN_UNROLL
    for (int part = 0; part < 4; ++part) {
      const __mmask16 bits = static_cast<__mmask16>(mask >> (16 * part));
      _mm512_storeu_ps(values, _mm512_maskz_compress_ps(bits, _mm512_maskz_loadu_ps(bits, row + 16 * part)));
      values += __builtin_popcount(bits);
    }
  }

  // The numbers of the bits set in both masks. May write up to 64 numbers more.
  static int64_t ListBits(const uint64_t* a, const uint64_t* b, int64_t words, uint16_t* list) {
    const __m512i numbers = _mm512_load_si512(kBitNumbers);
    const __m512i step = _mm512_set1_epi16(kMaskBits);
    __m512i base = _mm512_setzero_si512();
    int64_t count = 0;
    for (int64_t word = 0; word < words; ++word, base = _mm512_add_epi16(base, step)) {
      const uint64_t bits = a[word] & b[word];
      const int64_t found = __builtin_popcountll(bits);
      const __m512i packed = _mm512_maskz_compress_epi8(bits, numbers);
      const __m512i low = _mm512_cvtepu8_epi16(_mm512_castsi512_si256(packed));
      _mm512_storeu_si512(list + count, _mm512_add_epi16(base, low));
      if (found > 32) {
        const __m512i high = _mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(packed, 1));
        _mm512_storeu_si512(list + count + 32, _mm512_add_epi16(base, high));
      }
      count += found;
    }
    return count;
  }
};

}  // namespace

ORTOLAN_MASKED_KERNEL(Avx512, Avx512Block, 48, 8)

}  // namespace ortolan
