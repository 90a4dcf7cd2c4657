// AVX2 of one token's attention.
#include "attention/decode_loop.h"

namespace ortolan {
namespace {

struct Blocks {
  static int64_t Ahead(const PrefetchDistances& ahead) { return ahead.key_codes_avx2; }
  static constexpr int kVectors = 2;
  static constexpr int kDotHeads = 2;

  // So many quads that sums of 16 bits hold their entries; a block's indices to that many tables are 8 KB.
  static constexpr int64_t kQuads = 64;

  // The indices of a quad's 64 bytes: keys 0 … 15, two sub-quantizers a vector, then keys 16 … 31. The order of 16 keys
  // is 0 … 3, 8 … 11, 4 … 7, 12 … 15.
  static void Unpack(const uint8_t* codes, __m256i* indices) {
    const __m256i by_sub_quantizer =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    const __m256i a = _mm256_shuffle_epi8(Simd::LoadBytes(codes), by_sub_quantizer);
    const __m256i b = _mm256_shuffle_epi8(Simd::LoadBytes(codes + 32), by_sub_quantizer);
    const __m256i first = _mm256_permute4x64_epi64(_mm256_unpacklo_epi32(a, b), 0xD8);
    const __m256i second = _mm256_permute4x64_epi64(_mm256_unpackhi_epi32(a, b), 0xD8);
    indices[0] = Simd::LowNibbles(first);
    indices[1] = Simd::LowNibbles(second);
    indices[2] = Simd::HighNibbles(first);
    indices[3] = Simd::HighNibbles(second);
  }

  // Sums of 16 bits of 16 keys, in the order of the indices: of all bytes as they lie, and of every other one.
  struct Sums {
    __m256i both = _mm256_setzero_si256();
    __m256i odd = _mm256_setzero_si256();
    void Add(__m256i entries) {
      both = _mm256_add_epi16(both, entries);
      odd = _mm256_add_epi16(odd, _mm256_srli_epi16(entries, 8));
    }
    // Scores += step sums, of keys in their own order.
    void AddTo(float* scores, __m256 step) const {
      const __m256i even = _mm256_sub_epi16(both, _mm256_slli_epi16(odd, 8));
      const __m128i evens = _mm_add_epi16(_mm256_castsi256_si128(even), _mm256_extracti128_si256(even, 1));
      const __m128i odds = _mm_add_epi16(_mm256_castsi256_si128(odd), _mm256_extracti128_si256(odd, 1));
      const __m256i a = _mm256_cvtepu16_epi32(_mm_unpacklo_epi16(evens, odds));
      const __m256i b = _mm256_cvtepu16_epi32(_mm_unpackhi_epi16(evens, odds));
      const __m256 first = _mm256_cvtepi32_ps(_mm256_permute2x128_si256(a, b, 0x20));
      const __m256 second = _mm256_cvtepi32_ps(_mm256_permute2x128_si256(a, b, 0x31));
      _mm256_storeu_ps(scores, _mm256_fmadd_ps(first, step, _mm256_loadu_ps(scores)));
      _mm256_storeu_ps(scores + 8, _mm256_fmadd_ps(second, step, _mm256_loadu_ps(scores + 8)));
    }
  };

  static void ScoreBlocks(const CodeBlocks& at, int64_t heads) {
    alignas(32) __m256i indices[4 * kQuads];
    for (int64_t block = 0; block < at.blocks; ++block) {
      for (int64_t first = 0; first < at.quads; first += kQuads) {
        const int64_t quads = at.quads - first < kQuads ? at.quads - first : kQuads;
        const uint8_t* codes = at.codes + (block * at.quads + first) * 64;
        for (int64_t quad = 0; quad < quads; ++quad) {
          _mm_prefetch(reinterpret_cast<const char*>(codes + 64 * quad + at.ahead), _MM_HINT_T0);
          Unpack(codes + 64 * quad, indices + 4 * quad);
        }
        for (int64_t h = 0; h < heads; ++h) {
          Sums low;
          Sums high;
          const uint8_t* table = at.tables + (h * at.quads + first) * 64;
          for (int64_t quad = 0; quad < quads; ++quad, table += 64) {
            const __m256i a = Simd::LoadBytes(table);
            const __m256i b = Simd::LoadBytes(table + 32);
            low.Add(_mm256_shuffle_epi8(a, indices[4 * quad]));
            low.Add(_mm256_shuffle_epi8(b, indices[4 * quad + 1]));
            high.Add(_mm256_shuffle_epi8(a, indices[4 * quad + 2]));
            high.Add(_mm256_shuffle_epi8(b, indices[4 * quad + 3]));
          }
          float* scores = at.scores + h * at.stride + block * kKeyBlock;
          if (first == 0) {
            for (int64_t i = 0; i < kKeyBlock; i += 8) _mm256_storeu_ps(scores + i, _mm256_set1_ps(at.biases[h]));
          }
          const __m256 step = _mm256_set1_ps(at.steps[h]);
          low.AddTo(scores, step);
          high.AddTo(scores + 16, step);
        }
      }
    }
  }
};

}  // namespace
}  // namespace ortolan

namespace ortolan::avx2 {

extern const DecodeFunctions kDecode;
constexpr DecodeFunctions kDecode = kDecodeFunctions<Blocks>;

}  // namespace ortolan::avx2
