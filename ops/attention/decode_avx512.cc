// AVX-512 kernel of decode.h.
#include "attention/decode_loop.h"

namespace ortolan {
namespace {

struct Blocks {
  static int64_t Ahead(const PrefetchDistances& ahead) { return ahead.key_codes; }
  static constexpr int kVectors = 4;
  static constexpr int kDotHeads = 4;

  // Computes the scores of kBlocks blocks of 32 keys for kHeads heads. A lane holds four codes of a key: vpermb looks
  // them up in a quad's tables (64 bytes), and vpdpbusd adds the four entries.
  template <int kHeads, int kBlocks>
  static void ScoreTile(const CodeBlocks& at, int64_t block, int64_t head) {
    const int64_t block_bytes = at.quads * 64;
    const uint8_t* codes = at.codes + block * block_bytes;
    const uint8_t* tables = at.tables + head * block_bytes;
    const __m512i low_nibbles = _mm512_set1_epi8(0x0f);
    const __m512i table_of_byte = _mm512_set1_epi32(0x30201000);
    const __m512i ones = _mm512_set1_epi8(1);
    __m512i sum[kHeads][kBlocks][2];
#pragma GCC unroll 16
    for (int i = 0; i < kHeads * kBlocks; ++i) {
      sum[i / kBlocks][i % kBlocks][0] = sum[i / kBlocks][i % kBlocks][1] = _mm512_setzero_si512();
    }
    for (int64_t quad = 0; quad < at.quads; ++quad, codes += 64, tables += 64) {
      __m512i index[kBlocks][2];
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b) {
        const uint8_t* from = codes + b * block_bytes;
        _mm_prefetch(from + at.ahead, _MM_HINT_T0);
        const __m512i both = _mm512_loadu_si512(from);
        index[b][0] = _mm512_ternarylogic_epi32(both, low_nibbles, table_of_byte, 0xEA);  // a & b | c
        index[b][1] = _mm512_ternarylogic_epi32(_mm512_srli_epi32(both, 4), low_nibbles, table_of_byte, 0xEA);
      }
#pragma GCC unroll 8
      for (int h = 0; h < kHeads; ++h) {
        const __m512i table = _mm512_loadu_si512(tables + h * block_bytes);
#pragma GCC unroll 4
        for (int b = 0; b < kBlocks; ++b) {
          sum[h][b][0] = Simd::DotQuad(sum[h][b][0], _mm512_permutexvar_epi8(index[b][0], table), ones);
          sum[h][b][1] = Simd::DotQuad(sum[h][b][1], _mm512_permutexvar_epi8(index[b][1], table), ones);
        }
      }
    }
#pragma GCC unroll 8
    for (int h = 0; h < kHeads; ++h) {
      const __m512 step = _mm512_set1_ps(at.steps[head + h]);
      const __m512 bias = _mm512_set1_ps(at.biases[head + h]);
      float* to = at.scores + (head + h) * at.stride + block * kKeyBlock;
#pragma GCC unroll 8
      for (int i = 0; i < 2 * kBlocks; ++i) {
        _mm512_storeu_ps(to + 16 * i, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[h][i / 2][i % 2]), step, bias));
      }
    }
  }

  template <int kHeads, int kBlocks>
  static void ScoreHeads(const CodeBlocks& at, int64_t head) {
    int64_t block = 0;
    for (; block + kBlocks <= at.blocks; block += kBlocks) ScoreTile<kHeads, kBlocks>(at, block, head);
    for (; block < at.blocks; ++block) ScoreTile<kHeads, 1>(at, block, head);
  }

  static void ScoreBlocks(const CodeBlocks& at, int64_t heads) {
    int64_t head = 0;
    for (; head + 4 <= heads; head += 4) ScoreHeads<4, 2>(at, head);
    if (heads - head == 3) return ScoreHeads<3, 2>(at, head);
    if (heads - head == 2) return ScoreHeads<2, 4>(at, head);
    if (heads - head == 1) return ScoreHeads<1, 4>(at, head);
  }

  // Loads the scales of a tile's tokens as multiples of a unit, the largest / 65535; 0 for tokens outside the range.
  // Returns the unit.
  static float UnitScales(const Int8Blocks& at, __m512* scales) {
    const int64_t block_bytes = kValueBlock * ValueRowBytes(at.head_dim);
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i most = _mm512_setzero_si512();  // compared as integers, so that NaN is the largest
    for (int64_t i = 0; i < 2 * at.blocks; ++i) {
      const uint8_t* from = at.values + i / 2 * block_bytes + i % 2 * 32;
      const __m512i token = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(16 * i)));
      const __mmask16 counts = _mm512_cmpge_epi32_mask(token, _mm512_set1_epi32(static_cast<int>(at.from))) &
                               _mm512_cmplt_epi32_mask(token, _mm512_set1_epi32(static_cast<int>(at.to)));
      const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
      const __m512i scale = _mm512_maskz_slli_epi32(counts, bits, 16);
      most = _mm512_max_epi32(most, scale);
      scales[i] = _mm512_castsi512_ps(scale);
    }
    const float largest = __builtin_bit_cast(float, _mm512_reduce_max_epi32(most));
    const __m512 inverse = _mm512_set1_ps(largest > kLeastScale ? 65535 / largest : 0.0f);
    for (int64_t i = 0; i < 2 * at.blocks; ++i) scales[i] = _mm512_mul_ps(scales[i], inverse);
    return largest * (1.0f / 65535);
  }

  // Computes a head's weights times the scales as 16-bit integers, stored per block as 32 upper bytes, then 32 lower
  // bytes. Returns their unit.
  static float SplitWeights(const TileHead& head, int64_t blocks, const __m512* scales, float unit, uint8_t* parts) {
    const __m512i bytes =
        _mm512_set_epi64(0x7c7874706c686460, 0x5c5854504c484440, 0x3c3834302c282420, 0x1c1814100c080400,
                         0x7d7975716d696561, 0x5d5955514d494541, 0x3d3935312d292521, 0x1d1915110d090501);
    const __m512 most = _mm512_set1_ps(head.most);
    __m512 sum = _mm512_setzero_ps();
    for (int64_t block = 0; block < blocks; ++block) {
      const __m512 first = Simd::Exp2(_mm512_sub_ps(_mm512_loadu_ps(head.scores + 32 * block), most));
      const __m512 second = Simd::Exp2(_mm512_sub_ps(_mm512_loadu_ps(head.scores + 32 * block + 16), most));
      sum = _mm512_add_ps(sum, _mm512_add_ps(first, second));
      const __m512i a = _mm512_cvtps_epu32(_mm512_mul_ps(first, scales[2 * block]));
      const __m512i b = _mm512_cvtps_epu32(_mm512_mul_ps(second, scales[2 * block + 1]));
      _mm512_storeu_si512(parts + 64 * block, _mm512_permutex2var_epi8(a, bytes, b));
    }
    const __m512 factor = Simd::Exp2(_mm512_set1_ps(head.most - head.maximum));
    _mm512_storeu_ps(head.sums, _mm512_fmadd_ps(sum, factor, _mm512_loadu_ps(head.sums)));
    return _mm512_cvtss_f32(factor) * unit;
  }

  // sums = 256 sums + weight bytes values, for kVectors vectors from dimension d on: first the upper bytes, which start
  // from sums = 0, then the lower ones.
  template <int kHeads, int kVectors>
  static void AddPart(const Int8Blocks& at, int64_t head, int64_t d, bool first, __m512i* sums) {
    const int64_t block_bytes = kValueBlock * ValueRowBytes(at.head_dim);
    const int64_t ahead = kDecodeTile / kValueBlock * block_bytes;  // bytes to the next tile
    const uint8_t* weights = at.parts + head * kPartBytes + (first ? 0 : 32);
    __m512i sum[kHeads][kVectors];
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) {
        sum[h][i] = first ? _mm512_setzero_si512() : _mm512_slli_epi32(sums[h * kVectors + i], 8);
      }
    }
    const uint8_t* from = at.values + kValueBlock * kValueScaleBytes + 4 * d;
    for (int64_t quad = 0; quad < kValueBlock / 4; ++quad, from += 4 * at.head_dim, weights += 4) {
      // All blocks at once: the hardware prefetcher follows several streams better than one.
      for (int64_t block = 0; block < at.blocks; ++block) {
        const uint8_t* values = from + block * block_bytes;
        __m512i value[kVectors];
#pragma GCC unroll 8
        for (int i = 0; i < kVectors; ++i) {
          if (first == (i % 2 == 0)) _mm_prefetch(values + 64 * i + ahead, _MM_HINT_T0);
          value[i] = _mm512_loadu_si512(values + 64 * i);
        }
#pragma GCC unroll 4
        for (int h = 0; h < kHeads; ++h) {
          int four;
          __builtin_memcpy(&four, weights + h * kPartBytes + block * 64, 4);
          const __m512i weight = _mm512_set1_epi32(four);
#pragma GCC unroll 8
          for (int i = 0; i < kVectors; ++i) sum[h][i] = Simd::DotQuad(sum[h][i], weight, value[i]);
        }
      }
    }
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) sums[h * kVectors + i] = sum[h][i];
    }
  }

  template <int kHeads, int kVectors>
  static void AddInt8Tile(const Int8Blocks& at, int64_t head, int64_t d, const float* steps) {
    __m512i sums[kHeads * kVectors];
    AddPart<kHeads, kVectors>(at, head, d, true, sums);
    AddPart<kHeads, kVectors>(at, head, d, false, sums);
    for (int h = 0; h < kHeads; ++h) {
      const __m512 step = _mm512_set1_ps(steps[h]);
      float* y = at.heads[head + h].y + d;
      for (int i = 0; i < kVectors; ++i) {
        const __m512 sum = _mm512_cvtepi32_ps(sums[h * kVectors + i]);
        _mm512_storeu_ps(y + 16 * i, _mm512_fmadd_ps(sum, step, _mm512_loadu_ps(y + 16 * i)));
      }
    }
  }

  template <int kHeads, int kVectors>
  static void AddInt8Heads(const Int8Blocks& at, int64_t head, const __m512* scales, float unit) {
    float steps[kHeads];
    for (int h = 0; h < kHeads; ++h) {
      steps[h] = SplitWeights(at.heads[head + h], at.blocks, scales, unit, at.parts + (head + h) * kPartBytes);
    }
    int64_t d = 0;
    for (; d + 16 * kVectors <= at.head_dim; d += 16 * kVectors) AddInt8Tile<kHeads, kVectors>(at, head, d, steps);
    for (; d + 32 <= at.head_dim; d += 32) AddInt8Tile<kHeads, 2>(at, head, d, steps);
    if (d < at.head_dim) AddInt8Tile<kHeads, 1>(at, head, d, steps);
  }

  static void AddInt8Blocks(const Int8Blocks& at, int64_t heads) {
    __m512 scales[2 * kDecodeTile / kValueBlock];
    const float unit = UnitScales(at, scales);
    int64_t head = 0;
    for (; head + 4 <= heads; head += 4) AddInt8Heads<4, 4>(at, head, scales, unit);
    if (heads - head == 3) return AddInt8Heads<3, 4>(at, head, scales, unit);
    if (heads - head == 2) return AddInt8Heads<2, 8>(at, head, scales, unit);
    if (heads - head == 1) return AddInt8Heads<1, 8>(at, head, scales, unit);
  }

 private:
  static constexpr int64_t kPartBytes = 2 * kDecodeTile;
  static constexpr float kLeastScale = 0x1p-100f;
};

}  // namespace
}  // namespace ortolan

namespace ortolan::avx512 {

extern const DecodeFunctions kDecode;
constexpr DecodeFunctions kDecode = kDecodeFunctions<Blocks>;

}  // namespace ortolan::avx512
