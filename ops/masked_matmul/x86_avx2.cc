// AVX2: a block is two registers.
#include <immintrin.h>

#include "masked_matmul/kernel_functions.h"

namespace ortolan {
namespace {

struct Avx2Block {
  struct Vector {
    __m256 low, high;
  };
  using Scalar = __m256;
  static constexpr int kVectorsABlock = 2;
  static constexpr int kTileColumns = 4;  // sums of a tile that are in registers

  static __m256i First(int64_t count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static Vector Zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static __m256 Set(float value) { return _mm256_set1_ps(value); }
  static Vector Load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
  static Vector LoadFirst(const float* from, int64_t count) {
    return {_mm256_maskload_ps(from, First(count)), _mm256_maskload_ps(from + 8, First(count - 8))};
  }
  static void Store(float* to, Vector v) {
    _mm256_storeu_ps(to, v.low);
    _mm256_storeu_ps(to + 8, v.high);
  }
  static void StoreFirst(float* to, int64_t count, Vector v) {
    _mm256_maskstore_ps(to, First(count), v.low);
    _mm256_maskstore_ps(to + 8, First(count - 8), v.high);
  }
  static void Keep(Vector& v) { __asm__("" : "+x"(v.low), "+x"(v.high)); }
  static void Keep(__m256& v) { __asm__("" : "+x"(v)); }
  static __m256 Broadcast(const float* from) { return _mm256_broadcast_ss(from); }
  static Vector Add(Vector a, Vector b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
  static Vector Multiply(Vector a, Vector b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
  static Vector MultiplyAdd(__m256 a, Vector b, Vector c) {
    return {_mm256_fmadd_ps(a, b.low, c.low), _mm256_fmadd_ps(a, b.high, c.high)};
  }
  static uint32_t BitsOf(__m256 v) {
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(v, _mm256_setzero_ps(), _CMP_NEQ_UQ)));
  }
  static uint32_t Bits(Vector v) { return BitsOf(v.low) | BitsOf(v.high) << 8; }
  static bool HasNan(Vector v) { return _mm256_movemask_ps(_mm256_cmp_ps(v.low, v.high, _CMP_UNORD_Q)) != 0; }
  static Vector LoadBf16(const uint16_t* from) {
    const auto widen = [](const uint16_t* eight) {
      const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(eight));
      return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    };
    return {widen(from), widen(from + 8)};
  }
  static Vector LoadInt8(const int8_t* from) {
    const auto widen = [](const int8_t* eight) {
      return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(eight))));
    };
    return {widen(from), widen(from + 8)};
  }

  static void Transpose4x16(const float* from, int64_t row_bytes, float* to, int64_t to_row) {
    for (int l = 0; l < 16; l += 4) {
      __m128 a = _mm_loadu_ps(from + l), b = _mm_loadu_ps(AtByte(from, row_bytes) + l);
      __m128 c = _mm_loadu_ps(AtByte(from, 2 * row_bytes) + l), d = _mm_loadu_ps(AtByte(from, 3 * row_bytes) + l);
      _MM_TRANSPOSE4_PS(a, b, c, d);
      _mm_storeu_ps(to + l * to_row, a);
      _mm_storeu_ps(to + (l + 1) * to_row, b);
      _mm_storeu_ps(to + (l + 2) * to_row, c);
      _mm_storeu_ps(to + (l + 3) * to_row, d);
    }
  }

  static int64_t ListBits(const uint64_t* a, const uint64_t* b, int64_t words, uint16_t* list) {
    return ListBitsOneByOne(a, b, words, list);
  }
  static void PackNumbers(const float* row, uint64_t mask, float* values, uint8_t* inputs) {
    PackNumbersOneByOne(row, mask, values, inputs);
  }
};

}  // namespace

ORTOLAN_MASKED_KERNEL(Avx2, Avx2Block, 16, 4)

}  // namespace ortolan
