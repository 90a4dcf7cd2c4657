// AVX2. vpmaddubsw saturates on sums of u8 x int8, so both become 16-bit words, which vpmaddwd multiplies exactly: a
// vector holds the same two inputs of 8 tokens, and is multiplied with two weights of an output, broadcast.
#include <immintrin.h>

#include "vnni_spmm/quantized_tokens.h"
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

// Four outputs of 16 tokens. x: u8 [k][width], from the first of these tokens on.
void SumGroup(const BlockSparseView& w, int64_t group, const int32_t* sums, const uint8_t* x, int64_t width,
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
      const __m256i a = Widen(x + w.Index(quad, 2 * pair) * width);
      const __m256i b = Widen(x + w.Index(quad, 2 * pair + 1) * width);
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

// A table of 256 bytes, 16 at a time: 16 vpshufb in rows of 16 entries by the low four bits, of which the high four
// bits choose.
class ByteTable {
 public:
  explicit ByteTable(const uint8_t* table) {
    for (int r = 0; r < kRows; ++r) rows_[r] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table) + r);
  }
  __m128i operator()(__m128i bytes) const {
    const __m128i low = _mm_and_si128(bytes, _mm_set1_epi8(0xf));
    // vpblendvb looks at bit 7 of each byte: bits 4, 5 and 6 are shifted there.
    __m128i found[kRows];
    for (int r = 0; r < kRows; ++r) found[r] = _mm_shuffle_epi8(rows_[r], low);
    for (int rows = kRows / 2, bit = 3; rows > 0; rows /= 2, --bit) {
      const __m128i chosen = _mm_sll_epi16(bytes, _mm_cvtsi32_si128(bit));
      for (int r = 0; r < rows; ++r) found[r] = _mm_blendv_epi8(found[2 * r], found[2 * r + 1], chosen);
    }
    return found[0];
  }

 private:
  static constexpr int kRows = 16;
  __m128i rows_[kRows];
};

// 16 places of a block of tokens.
struct Places {
  int64_t first_token;  // of the block
  int64_t width;        // of the block
  int64_t first;        // place in it
  int64_t Token(int64_t i) const { return first_token + TokenAt(width, first + i); }
};

// Calls body(places) for all blocks of m tokens.
template <typename Body>
void ForEachPlaces(int64_t m, const Body& body) {
  for (Places places{0, 0, 0}; places.first_token < m; places.first_token += places.width) {
    places.width = TokenBlockWidth(m - places.first_token);
    for (places.first = 0; places.first < places.width; places.first += kWidth) body(places);
  }
}

}  // namespace

// Blocks of 16 tokens: q u8 [k][16], then, from 16 PaddedK on, s and -z.
void PackTokensAvx2(const float* x, int64_t x_row_bytes, int64_t m, int64_t k, const FixedRange* fixed, void* packed) {
  for (int64_t first = 0; first < m; first += kWidth) {
    uint8_t* block = static_cast<uint8_t*>(packed) + first * VnniSpmmKernel::PackedRowBytes(k);
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

void MultiplyBlockSparseAvx2(const VnniSpmmArgs& args, int64_t panel_begin, int64_t panel_end) {
  const BlockSparseView& w = args.w;
  for (int64_t first = 0; first < args.m; first += kWidth) {
    const uint8_t* x = static_cast<const uint8_t*>(args.x) + first * VnniSpmmKernel::PackedRowBytes(w.k);
    const BlockRanges ranges = LoadRanges(x, w.k);
    const int64_t count = args.m - first < kWidth ? args.m - first : kWidth;
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
      int32_t sums[kPanelOutputs][kWidth];
      const int64_t column = panel * kPanelOutputs;
      const int64_t columns = w.n - column < kPanelOutputs ? w.n - column : kPanelOutputs;
      for (int64_t o = 0; o < columns; o += kGroupOutputs) {
        SumGroup(w, (column + o) / kGroupOutputs, args.sums + column + o, x, kWidth, ranges.minus_zeros, sums + o);
      }
      for (int64_t i = 0; i < count; ++i) {
        float* y = args.YRow(first + i) + column;
        for (int64_t j = 0; j < columns; ++j) {
          const float product = static_cast<float>(sums[j][i]) * (ranges.scales[i] * args.scales[column + j]);
          y[j] = args.bias != nullptr ? product + args.bias[column + j] : product;
        }
      }
    }
  }
}

void MultiplyHiddenAvx2(const HiddenLayerArgs& args, int64_t panel_begin, int64_t panel_end) {
  const BlockSparseView& w = args.w;
  const float factor = 1.0f / args.table_x.scale;
  const float x_factor = args.x_range.scale * factor;
  const int64_t group_end = panel_end * kPanelGroups < w.Groups() ? panel_end * kPanelGroups : w.Groups();
  for (int64_t first = 0; first < args.m; first += kWidth) {
    const uint8_t* x = static_cast<const uint8_t*>(args.x) + first * VnniSpmmKernel::PackedRowBytes(w.k);
    uint8_t* next = static_cast<uint8_t*>(args.next) + first * VnniSpmmKernel::PackedRowBytes(w.n);
    const BlockRanges ranges = LoadRanges(x, w.k);
    for (int64_t group = panel_begin * kPanelGroups; group < group_end; ++group) {
      int32_t sums[kGroupOutputs][kWidth];
      const int64_t output = group * kGroupOutputs;
      SumGroup(w, group, args.sums + output, x, kWidth, ranges.minus_zeros, sums);
      for (int64_t o = 0; o < kGroupOutputs && output + o < w.n; ++o) {
        const float bias = args.bias == nullptr ? 0.0f : args.bias[output + o] * factor;
        alignas(16) uint8_t q[kWidth];
        _mm_store_si128(reinterpret_cast<__m128i*>(q),
                        ToBytes(sums[o], args.scales[output + o] * x_factor, bias, args.table_x.zero_point));
        uint8_t* to = next + (output + o) * kWidth;
        for (int64_t i = 0; i < kWidth; ++i) to[i] = args.table[q[i]];
      }
    }
    if (panel_begin > 0) continue;
    BlockRanges next_ranges;
    for (int64_t i = 0; i < kWidth; ++i) {
      next_ranges.scales[i] = args.table_y.scale;
      next_ranges.minus_zeros[i] = -args.table_y.zero_point;
    }
    std::memcpy(next + RangesAt(w.n), &next_ranges, sizeof(next_ranges));
  }
}

void QuantizeTokensAvx2(const float* x, int64_t x_row_bytes, int64_t m, int64_t k, float factor, int32_t zero_point,
                        uint8_t* blocks) {
  const TokenRange range = {factor, 0.0f, zero_point};
  ForEachPlaces(m, [&](const Places& places) {
    uint8_t* block = blocks + places.first_token * k + places.first;
    for (int64_t l = 0; l < k; l += kChunk) {
      const int64_t inputs = k - l < kChunk ? k - l : kChunk;
      uint8_t q[kWidth][kChunk] = {};
      for (int64_t i = 0; i < kWidth; ++i) {
        if (places.Token(i) < m) Quantize32(RowAt(x, x_row_bytes, places.Token(i)) + l, k - l, range, q[i]);
      }
      for (int64_t j = 0; j < inputs; ++j) {
        for (int64_t i = 0; i < kWidth; ++i) block[(l + j) * places.width + i] = q[i][j];
      }
    }
  });
}

void MultiplyQuantizedAvx2(const QuantizedSpmmArgs& args, int64_t panel_begin, int64_t panel_end) {
  const BlockSparseView w = args.w;
  const int64_t group_end = panel_end * kPanelGroups < w.Groups() ? panel_end * kPanelGroups : w.Groups();
  const float factor = 1.0f / args.y_scale;
  int32_t minus_zeros[kWidth];
  for (int32_t& minus_zero : minus_zeros) minus_zero = -args.x_zero_point;
  static constexpr uint8_t kNoTable[256] = {};
  const ByteTable table(args.table != nullptr ? args.table : kNoTable);
  ForEachPlaces(args.m, [&](const Places& places) {
    const uint8_t* x = args.x + places.first_token * w.k + places.first;
    for (int64_t group = panel_begin * kPanelGroups; group < group_end; ++group) {
      int32_t sums[kGroupOutputs][kWidth];
      SumGroup(w, group, args.sums + group * kGroupOutputs, x, places.width, minus_zeros, sums);
      for (int64_t o = 0; o < kGroupOutputs && group * kGroupOutputs + o < w.n; ++o) {
        const int64_t output = group * kGroupOutputs + o;
        const int64_t row = places.first_token * w.n + output * places.width;  // of y's block
        const float scale = args.x_scale * args.scales[output];
        const float bias = args.bias == nullptr ? 0.0f : args.bias[output];
        if (args.y_blocks != nullptr) {
          __m128i q = ToBytes(sums[o], scale * factor, bias * factor, args.y_zero_point);
          if (args.table != nullptr) q = table(q);
          _mm_storeu_si128(reinterpret_cast<__m128i*>(args.y_blocks + row + places.first), q);
          continue;
        }
        for (int64_t i = 0; i < kWidth; ++i) {
          const int64_t token = places.Token(i);
          if (args.y_sums != nullptr) {
            args.y_sums[row + token - places.first_token] = sums[o][i];
          } else if (token < args.m) {
            float* y = reinterpret_cast<float*>(reinterpret_cast<char*>(args.y) + token * args.y_row_bytes);
            y[output] = static_cast<float>(sums[o][i]) * scale + bias;
          }
        }
      }
    }
  });
}

}  // namespace ortolan
