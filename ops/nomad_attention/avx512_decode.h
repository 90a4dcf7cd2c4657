// AVX-512 of one token's attention. Included by x86_avx512.cc only.
#pragma once

#include "nomad_attention/avx512_attention.h"
#include "nomad_attention/decode_loop.h"

namespace ortolan {
namespace {

// sums += the four products of u8 `a` and s8 `b` in each lane. By hand: gcc 12's intrinsic copies and spills the sums.
inline void AddProducts(__m512i& sums, __m512i a, __m512i b) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
}

struct Avx512Decode {
  using Floats = Avx512Attention;
  static constexpr int kHeads = 4;
  static constexpr int kVectors = 4;
  static constexpr int kDotHeads = 4;
  static constexpr int kDotKeys = 4;

  static float ReduceAdd(__m512 a) { return _mm512_reduce_add_ps(a); }
  static float ReduceMin(__m512 a) { return _mm512_reduce_min_ps(a); }
  static float ReduceMax(__m512 a) { return _mm512_reduce_max_ps(a); }
  static bool AnyNotBelow(const float* from, int64_t n, float least) {
    __mmask16 any = 0;
    for (int64_t i = 0; i < n; i += 16) {
      any = _kor_mask16(any, _mm512_cmp_ps_mask(_mm512_loadu_ps(from + i), _mm512_set1_ps(least), _CMP_NLT_UQ));
    }
    return any != 0;
  }
  static __m512 LoadStrided(const float* from, int64_t stride) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_i32gather_ps(_mm512_mullo_epi32(lanes, _mm512_set1_epi32(static_cast<int>(stride))), from, 4);
  }
  static __m512 LoadInt8(const uint8_t* from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
  }
  static void StoreBytes(uint8_t* to, __m512 a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a)));
  }

  // Scores of kBlocks blocks of 32 keys for kHeads heads. A lane holds four codes of a key: one vpermb looks them up in
  // the tables of a quad, 64 bytes, and vpdpbusd adds the four up.
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
        _mm_prefetch(from + kPrefetchBytes, _MM_HINT_T0);
        const __m512i both = _mm512_loadu_si512(from);
        index[b][0] = _mm512_ternarylogic_epi32(both, low_nibbles, table_of_byte, 0xEA);  // a & b | c
        index[b][1] = _mm512_ternarylogic_epi32(_mm512_srli_epi32(both, 4), low_nibbles, table_of_byte, 0xEA);
      }
#pragma GCC unroll 8
      for (int h = 0; h < kHeads; ++h) {
        const __m512i table = _mm512_loadu_si512(tables + h * block_bytes);
#pragma GCC unroll 4
        for (int b = 0; b < kBlocks; ++b) {
          AddProducts(sum[h][b][0], _mm512_permutexvar_epi8(index[b][0], table), ones);
          AddProducts(sum[h][b][1], _mm512_permutexvar_epi8(index[b][1], table), ones);
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
    for (; head + 4 <= heads; head += 4) ScoreHeads<4, 1>(at, head);
    if (heads - head == 3) return ScoreHeads<3, 1>(at, head);
    if (heads - head == 2) return ScoreHeads<2, 2>(at, head);
    if (heads - head == 1) return ScoreHeads<1, 4>(at, head);
  }

  // The weights of a head, times the tokens' scales, as numbers of 16 bits, their upper and lower bytes apart. Returns
  // the step that they are in.
  static float SplitWeights(const Int8Blocks& at, const float* weights, uint8_t* parts) {
    const int64_t vectors = 2 * at.blocks;
    const int64_t block_bytes = kValueBlock * ValueRowBytes(at.head_dim);
    __m512 scaled[2 * kDecodeTile / kValueBlock];
    __m512i most = _mm512_setzero_si512();  // as integers: a NaN is more than any number
    for (int64_t i = 0; i < vectors; ++i) {
      const uint8_t* scales = at.values + i / 2 * block_bytes + i % 2 * 32;
      const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales)));
      const __m512 scale = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
      const __m512 weight = _mm512_loadu_ps(weights + 16 * i);
      // Tokens outside of the range weigh 0, and may hold anything.
      scaled[i] = _mm512_maskz_mul_ps(_mm512_cmp_ps_mask(weight, _mm512_setzero_ps(), _CMP_NEQ_UQ), weight, scale);
      most = _mm512_max_epi32(most, _mm512_castps_si512(scaled[i]));
    }
    const float largest = __builtin_bit_cast(float, _mm512_reduce_max_epi32(most));
    const __m512 inverse = _mm512_set1_ps(largest > 0 ? 65535 / largest : 0.0f);
    for (int64_t i = 0; i < vectors; ++i) {
      const __m512i units = _mm512_cvtps_epu32(_mm512_mul_ps(scaled[i], inverse));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(parts + 16 * i), _mm512_cvtepi32_epi8(_mm512_srli_epi32(units, 8)));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(parts + kDecodeTile + 16 * i), _mm512_cvtepi32_epi8(units));
    }
    return largest * (1.0f / 65535);
  }

  // sums = 256 sums + (the upper or the lower bytes of the weights) values, of numbers d …; the first time sums = 0.
  template <int kHeads, int kVectors>
  static void AddPart(const Int8Blocks& at, int64_t head, int64_t d, bool first, __m512i* sums) {
    const int64_t block_bytes = kValueBlock * ValueRowBytes(at.head_dim);
    const int64_t ahead = kDecodeTile / kValueBlock * block_bytes;  // of the next tile
    const uint8_t* weights = at.parts + head * 2 * kDecodeTile + (first ? 0 : kDecodeTile);
    __m512i sum[kHeads][kVectors];
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) {
        sum[h][i] = first ? _mm512_setzero_si512() : _mm512_slli_epi32(sums[h * kVectors + i], 8);
      }
    }
    for (int64_t block = 0; block < at.blocks; ++block) {
      const uint8_t* values = at.values + block * block_bytes + kValueBlock * kValueScaleBytes + 4 * d;
      for (int quad = 0; quad < kValueBlock / 4; ++quad, values += 4 * at.head_dim, weights += 4) {
        __m512i value[kVectors];
#pragma GCC unroll 8
        for (int i = 0; i < kVectors; ++i) {
          if (first) _mm_prefetch(values + 64 * i + ahead, _MM_HINT_T0);
          value[i] = _mm512_loadu_si512(values + 64 * i);
        }
#pragma GCC unroll 4
        for (int h = 0; h < kHeads; ++h) {
          int four;
          __builtin_memcpy(&four, weights + h * 2 * kDecodeTile, 4);
          const __m512i weight = _mm512_set1_epi32(four);
#pragma GCC unroll 8
          for (int i = 0; i < kVectors; ++i) AddProducts(sum[h][i], weight, value[i]);
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
      float* y = at.y[head + h] + d;
      for (int i = 0; i < kVectors; ++i) {
        const __m512 sum = _mm512_cvtepi32_ps(sums[h * kVectors + i]);
        _mm512_storeu_ps(y + 16 * i, _mm512_fmadd_ps(sum, step, _mm512_loadu_ps(y + 16 * i)));
      }
    }
  }

  template <int kHeads, int kVectors>
  static void AddInt8Heads(const Int8Blocks& at, int64_t head) {
    float steps[kHeads];
    for (int h = 0; h < kHeads; ++h) {
      steps[h] = SplitWeights(at, at.weights + (head + h) * kDecodeTile, at.parts + (head + h) * 2 * kDecodeTile);
    }
    int64_t d = 0;
    for (; d + 16 * kVectors <= at.head_dim; d += 16 * kVectors) AddInt8Tile<kHeads, kVectors>(at, head, d, steps);
    for (; d + 32 <= at.head_dim; d += 32) AddInt8Tile<kHeads, 2>(at, head, d, steps);
    if (d < at.head_dim) AddInt8Tile<kHeads, 1>(at, head, d, steps);
  }

  static void AddInt8Blocks(const Int8Blocks& at, int64_t heads) {
    int64_t head = 0;
    for (; head + 4 <= heads; head += 4) AddInt8Heads<4, 4>(at, head);
    if (heads - head == 3) return AddInt8Heads<3, 4>(at, head);
    if (heads - head == 2) return AddInt8Heads<2, 8>(at, head);
    if (heads - head == 1) return AddInt8Heads<1, 8>(at, head);
  }

 private:
  static constexpr int64_t kPrefetchBytes = 4096;
};

}  // namespace
}  // namespace ortolan
