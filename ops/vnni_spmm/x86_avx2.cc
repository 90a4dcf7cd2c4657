// AVX2. vpmaddubsw saturates on sums of u8 x int8, so both become 16-bit words, which vpmaddwd multiplies exactly: a
// vector holds the same two inputs of 8 tokens, and is multiplied with two weights of an output, broadcast.
#include <immintrin.h>

#include "vnni_spmm/token_range.h"

namespace ortolan {
namespace {

constexpr int64_t kWidth = 16;  // tokens of a block
constexpr int64_t kFloats = 8;  // of a vector
constexpr int64_t kChunk = 32;  // inputs that a vector of bytes holds

inline const float* RowAt(const float* x, int64_t row_bytes, int64_t i) {
  return reinterpret_cast<const float*>(reinterpret_cast<const char*>(x) + i * row_bytes);
}

inline __m256 LoadFloats(const float* x, int64_t left) {
  if (left >= kFloats) return _mm256_loadu_ps(x);
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_maskload_ps(x, _mm256_cmpgt_epi32(_mm256_set1_epi32(left < 0 ? 0 : static_cast<int>(left)), lanes));
}

TokenRange RangeOfToken(const float* x, int64_t k) {
  const __m256 zero = _mm256_setzero_ps();
  __m256 least = zero, most = zero, nan = zero;
  for (int64_t l = 0; l < k; l += kFloats) {
    const __m256 v = LoadFloats(x + l, k - l);
    least = _mm256_min_ps(v, least);
    most = _mm256_max_ps(v, most);
    nan = _mm256_fmadd_ps(v, zero, nan);  // NaN from Inf or NaN on
  }
  float lows[kFloats], highs[kFloats];
  _mm256_storeu_ps(lows, least);
  _mm256_storeu_ps(highs, most);
  for (int i = 1; i < kFloats; ++i) {
    lows[0] = lows[i] < lows[0] ? lows[i] : lows[0];
    highs[0] = highs[i] > highs[0] ? highs[i] : highs[0];
  }
  return RangeOfToken(lows[0], highs[0], _mm256_movemask_ps(_mm256_cmp_ps(nan, nan, _CMP_UNORD_Q)) == 0);
}

inline __m256i Rounded(__m256 v) {
  const __m256 most = _mm256_set1_ps(kMostBeforeRounding);  // also NaNs become that
  return _mm256_cvtps_epi32(_mm256_round_ps(_mm256_min_ps(v, most), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// clamp(round(x factor) + zero_point, 0, 255); NaN gives 255.
void Quantize32(const float* x, int64_t left, const TokenRange& range, uint8_t* q) {
  __m256i v[4];
  for (int i = 0; i < 4; ++i) {
    const __m256 scaled = _mm256_mul_ps(LoadFloats(x + i * kFloats, left - i * kFloats), _mm256_set1_ps(range.factor));
    v[i] = _mm256_add_epi32(Rounded(scaled), _mm256_set1_epi32(range.zero_point));
  }
  const __m256i packed = _mm256_packus_epi16(_mm256_packus_epi32(v[0], v[1]), _mm256_packus_epi32(v[2], v[3]));
  const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), _mm256_permutevar8x32_epi32(packed, in_order));
}

// What stands behind the numbers of a block.
struct BlockRanges {
  float scales[kWidth];
  int32_t minus_zeros[kWidth];
};

inline int64_t RangesAt(int64_t k) { return (k + 127) / 128 * 128 * kWidth; }

// Of a block, in memory that may not be aligned.
BlockRanges LoadRanges(const uint8_t* block, int64_t k) {
  BlockRanges ranges;
  std::memcpy(&ranges, block + RangesAt(k), sizeof(ranges));
  return ranges;
}

inline __m256i Widen(const uint8_t* tokens) {
  return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(tokens)));
}

// Tokens 4h … 4h+3 and 4h+8 … 4h+11: the order in which unpacking leaves them.
inline __m256i LoadHalf(const int32_t* of_tokens, int h) {
  const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(of_tokens + 4 * h));
  return _mm256_inserti128_si256(_mm256_castsi128_si256(low),
                                 _mm_loadu_si128(reinterpret_cast<const __m128i*>(of_tokens + 4 * h + 8)), 1);
}

inline void StoreHalf(int32_t* of_tokens, int h, __m256i sums) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(of_tokens + 4 * h), _mm256_castsi256_si128(sums));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(of_tokens + 4 * h + 8), _mm256_extracti128_si256(sums, 1));
}

// Four outputs of 16 tokens. x: u8 [k][kWidth].
void SumGroup(const BlockSparseView& w, int64_t group, const int32_t* sums, const uint8_t* x,
              const int32_t* minus_zeros, int32_t (*to)[kWidth]) {
  __m256i total[kGroupOutputs][2];
#pragma GCC unroll 4
  for (int o = 0; o < kGroupOutputs; ++o) {
    const __m256i sum = _mm256_set1_epi32(sums[o]);
    total[o][0] = _mm256_mullo_epi32(LoadHalf(minus_zeros, 0), sum);
    total[o][1] = _mm256_mullo_epi32(LoadHalf(minus_zeros, 1), sum);
  }
  for (int64_t quad = w.starts[group]; quad < w.starts[group + 1]; ++quad) {
    alignas(32) int32_t weights[2 * kGroupOutputs];  // pairs of words
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(w.Values(quad)));
    _mm256_store_si256(reinterpret_cast<__m256i*>(weights), _mm256_cvtepi8_epi16(bytes));
#pragma GCC unroll 2
    for (int pair = 0; pair < 2; ++pair) {
      const __m256i a = Widen(x + w.Index(quad, 2 * pair) * kWidth);
      const __m256i b = Widen(x + w.Index(quad, 2 * pair + 1) * kWidth);
      const __m256i low = _mm256_unpacklo_epi16(a, b), high = _mm256_unpackhi_epi16(a, b);
#pragma GCC unroll 4
      for (int o = 0; o < kGroupOutputs; ++o) {
        const __m256i weight = _mm256_set1_epi32(weights[2 * o + pair]);
        total[o][0] = _mm256_add_epi32(total[o][0], _mm256_madd_epi16(low, weight));
        total[o][1] = _mm256_add_epi32(total[o][1], _mm256_madd_epi16(high, weight));
      }
    }
  }
  for (int o = 0; o < kGroupOutputs; ++o) {
    StoreHalf(to[o], 0, total[o][0]);
    StoreHalf(to[o], 1, total[o][1]);
  }
}

// 16 tokens of an output to bytes in their order.
__m128i ToBytes(const int32_t* sums, float scale, float bias, int32_t zero_point) {
  __m256i q[2];
  for (int h = 0; h < 2; ++h) {
    const __m256 sum = _mm256_cvtepi32_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(sums + h * kFloats)));
    const __m256 number = _mm256_fmadd_ps(sum, _mm256_set1_ps(scale), _mm256_set1_ps(bias));
    q[h] = _mm256_add_epi32(Rounded(number), _mm256_set1_epi32(zero_point));
  }
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(q[0], q[1]), 0xd8);
  return _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}

}  // namespace

namespace avx2 {

// Blocks of 16 tokens: q u8 [k][16], then, from 16 PaddedK on, s and -z.
void PackBlockSparse(const MatMulWeight& w, const float* x, int64_t x_row_bytes, int64_t m, void* packed) {
  const int64_t k = w.k;
  const FixedRange* fixed = static_cast<const BlockSparseWeight&>(w).Fixed();
  for (int64_t first = 0; first < m; first += kWidth) {
    uint8_t* block = static_cast<uint8_t*>(packed) + first * PackedTokenBytes(k);
    BlockRanges ranges = {};
    const int64_t count = m - first < kWidth ? m - first : kWidth;
    if (count < kWidth) std::memset(block, 0, static_cast<size_t>(k * kWidth));
    for (int64_t i = 0; i < count; ++i) {
      const float* row = RowAt(x, x_row_bytes, first + i);
      const TokenRange range = fixed != nullptr ? RangeOfToken(*fixed) : RangeOfToken(row, k);
      ranges.scales[i] = range.scale;
      ranges.minus_zeros[i] = -range.zero_point;
      for (int64_t l = 0; l < k; l += kChunk) {
        uint8_t q[kChunk];
        Quantize32(row + l, k - l, range, q);
        for (int64_t j = 0; j < kChunk && l + j < k; ++j) block[(l + j) * kWidth + i] = q[j];
      }
    }
    std::memcpy(block + RangesAt(k), &ranges, sizeof(ranges));
  }
}

void MultiplyBlockSparse(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
  const BlockSparseWeight& weight = WeightOf<BlockSparseWeight>(args);
  const BlockSparseView& w = weight.view;
  for (int64_t first = 0; first < args.m; first += kWidth) {
    const uint8_t* x = static_cast<const uint8_t*>(args.x) + first * PackedTokenBytes(w.k);
    const BlockRanges ranges = LoadRanges(x, w.k);
    const int64_t count = args.m - first < kWidth ? args.m - first : kWidth;
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
      int32_t sums[kPanelOutputs][kWidth];
      const int64_t column = panel * kPanelOutputs;
      const int64_t columns = w.n - column < kPanelOutputs ? w.n - column : kPanelOutputs;
      for (int64_t o = 0; o < columns; o += kGroupOutputs) {
        SumGroup(w, (column + o) / kGroupOutputs, weight.sums + column + o, x, ranges.minus_zeros, sums + o);
      }
      for (int64_t i = 0; i < count; ++i) {
        float* y = args.Y(first + i, panel);
        for (int64_t j = 0; j < columns; ++j) {
          const float product = static_cast<float>(sums[j][i]) * (ranges.scales[i] * weight.scales[column + j]);
          y[j] = args.bias != nullptr ? product + args.bias[column + j] : product;
        }
      }
    }
  }
}

void MultiplyHidden(const HiddenLayerArgs& args, int64_t panel_begin, int64_t panel_end) {
  const HiddenLayerWeight& weight = WeightOf<HiddenLayerWeight>(args);
  const BlockSparseView& w = weight.view;
  const float factor = 1.0f / weight.table_x.scale;
  const float x_factor = weight.x_range.scale * factor;
  const int64_t group_end = panel_end * kPanelGroups < w.Groups() ? panel_end * kPanelGroups : w.Groups();
  for (int64_t first = 0; first < args.m; first += kWidth) {
    const uint8_t* x = static_cast<const uint8_t*>(args.x) + first * PackedTokenBytes(w.k);
    uint8_t* next = static_cast<uint8_t*>(args.next) + first * PackedTokenBytes(w.n);
    const BlockRanges ranges = LoadRanges(x, w.k);
    for (int64_t group = panel_begin * kPanelGroups; group < group_end; ++group) {
      int32_t sums[kGroupOutputs][kWidth];
      const int64_t output = group * kGroupOutputs;
      SumGroup(w, group, weight.sums + output, x, ranges.minus_zeros, sums);
      for (int64_t o = 0; o < kGroupOutputs && output + o < w.n; ++o) {
        const float bias = args.bias == nullptr ? 0.0f : args.bias[output + o] * factor;
        alignas(16) uint8_t q[kWidth];
        _mm_store_si128(reinterpret_cast<__m128i*>(q),
                        ToBytes(sums[o], weight.scales[output + o] * x_factor, bias, weight.table_x.zero_point));
        uint8_t* to = next + (output + o) * kWidth;
        for (int64_t i = 0; i < kWidth; ++i) to[i] = weight.table[q[i]];
      }
    }
    if (panel_begin > 0) continue;
    BlockRanges next_ranges;
    for (int64_t i = 0; i < kWidth; ++i) {
      next_ranges.scales[i] = weight.table_y.scale;
      next_ranges.minus_zeros[i] = -weight.table_y.zero_point;
    }
    std::memcpy(next + RangesAt(w.n), &next_ranges, sizeof(next_ranges));
  }
}

}  // namespace avx2
}  // namespace ortolan
