#include "nomad_attention/avx512_attention.h"

namespace ortolan {
namespace {

// Pairs of bfloat16 in each lane.
struct Avx512Bf16Attention : Avx512Attention {
  static constexpr int64_t kUnit = 2;

  static __m512 Pack(__m512 a, __m512 b) {
    // a in the lower half, b in the upper one; then side by side.
    const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(b, a);
    alignas(64) static constexpr uint16_t kOrder[] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_castsi512_ps(_mm512_permutexvar_epi16(_mm512_load_si512(kOrder), halves));
  }
  static void PackRow(const float* from, int64_t n, float* to) {
    for (int64_t i = 0; i < n; i += 16) {
      const __m512 numbers = n - i < 16 ? LoadFirst(from + i, n - i) : Load(from + i);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i / 2), (__m256i)_mm512_cvtneps_pbh(numbers));
    }
  }
  static __m512 MultiplyAddUnits(__m512 a, __m512 b, __m512 c) {
    return _mm512_dpbf16_ps(c, (__m512bh)_mm512_castps_si512(a), (__m512bh)_mm512_castps_si512(b));
  }
};

}  // namespace

int64_t AttentionScratchAvx512Bf16(int64_t, int64_t head_dim) {
  return AttentionLoop<Avx512Bf16Attention>::ScratchBytes(head_dim);
}

void AttentionAvx512Bf16(const AttentionArgs& args, int64_t row_begin, int64_t row_end, void* scratch) {
  AttentionLoop<Avx512Bf16Attention>::Run(args, row_begin, row_end, scratch);
}

}  // namespace ortolan
