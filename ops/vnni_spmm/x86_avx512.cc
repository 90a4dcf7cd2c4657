// AVX-512 VNNI. Many tokens: a vector holds the same four inputs of 16 tokens, which vpdpbusd multiplies with the four
// weights of an output, broadcast. Few tokens: a vector holds the 16 weights of four quads.
#include "vnni_spmm/avx512_tokens.h"

namespace ortolan {
namespace {

// By hand: gcc 12 copies the sums around each of its own.
inline __m512i Dot(__m512i sums, __m512i tokens, __m512i weights) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(tokens), "v"(weights));
  return sums;
}

// Weights ahead of those in use that are asked for: they come from memory, which the hardware alone asks too late.
inline constexpr int64_t kPrefetchBytes = 2048;

inline __m512i DotBroadcast(__m512i sums, __m512i tokens, const int8_t* weights) {
  __asm__("vpdpbusd %2%{1to16%}, %1, %0"
          : "+v"(sums)
          : "v"(tokens), "m"(*reinterpret_cast<const int8_t (*)[4]>(weights)));
  return sums;
}

// One output of some vectors of tokens. In one piece: between pieces gcc 12 copies sums.
template <int kVectors>
inline void DotAll(__m512i (&sums)[kVectors], const __m512i (&tokens)[kVectors], const int8_t* weights) {
  if constexpr (kVectors == 4) {
    __m512i four;
    __asm__(
        "vpbroadcastd %9, %4\n\t"
        "vpdpbusd %4, %5, %0\n\t"
        "vpdpbusd %4, %6, %1\n\t"
        "vpdpbusd %4, %7, %2\n\t"
        "vpdpbusd %4, %8, %3"
        : "+&v"(sums[0]), "+&v"(sums[1]), "+&v"(sums[2]), "+&v"(sums[3]), "=&v"(four)
        : "v"(tokens[0]), "v"(tokens[1]), "v"(tokens[2]), "v"(tokens[3]),
          "m"(*reinterpret_cast<const int8_t (*)[4]>(weights)));
  } else {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) sums[v] = DotBroadcast(sums[v], tokens[v], weights);
  }
}

// The four rows of a quad's inputs.
template <int kWidth>
struct QuadRows {
  const uint8_t* row[4];
  QuadRows(const uint8_t* x, const uint8_t* indices) {
    uint64_t bits;
    __builtin_memcpy(&bits, indices, sizeof(bits));
    for (int i = 0; i < 4; ++i) row[i] = x + (bits >> (16 * i) & 0xffff) * kWidth;
  }
};

// Blocks of tokens. Interleave gives vectors of 16 tokens x 4 inputs: lane i of vector v is token 16 v + i.
struct Tokens64 {
  static constexpr int kWidth = 64;
  static void Interleave(const QuadRows<kWidth>& rows, __m512i (&tokens)[4]) {
    const __m512i r0 = _mm512_loadu_si512(rows.row[0]), r1 = _mm512_loadu_si512(rows.row[1]);
    const __m512i r2 = _mm512_loadu_si512(rows.row[2]), r3 = _mm512_loadu_si512(rows.row[3]);
    const __m512i a = _mm512_unpacklo_epi8(r0, r1), b = _mm512_unpackhi_epi8(r0, r1);
    const __m512i c = _mm512_unpacklo_epi8(r2, r3), d = _mm512_unpackhi_epi8(r2, r3);
    tokens[0] = _mm512_unpacklo_epi16(a, c);
    tokens[1] = _mm512_unpackhi_epi16(a, c);
    tokens[2] = _mm512_unpacklo_epi16(b, d);
    tokens[3] = _mm512_unpackhi_epi16(b, d);
  }
};

// Of four rows of kWidth bytes, byte 4 t + i: token t's of row i.
template <int kWidth>
struct TokensFirst {
  alignas(64) uint8_t at[kWidth / 16][64];
  constexpr TokensFirst() : at() {
    for (int i = 0; i < 4 * kWidth; ++i) at[i / 64][i % 64] = static_cast<uint8_t>(i % 4 * kWidth + i / 4);
  }
};
template <int kWidth>
constexpr TokensFirst<kWidth> kTokensFirst;

struct Tokens32 {
  static constexpr int kWidth = 32;
  static __m512i TwoRows(const uint8_t* a, const uint8_t* b) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(a))),
                              _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b)), 1);
  }
  static void Interleave(const QuadRows<kWidth>& rows, __m512i (&tokens)[2]) {
    const __m512i a = TwoRows(rows.row[0], rows.row[1]), b = TwoRows(rows.row[2], rows.row[3]);
    tokens[0] = _mm512_permutex2var_epi8(a, _mm512_load_si512(kTokensFirst<kWidth>.at[0]), b);
    tokens[1] = _mm512_permutex2var_epi8(a, _mm512_load_si512(kTokensFirst<kWidth>.at[1]), b);
  }
};

struct Tokens16 {
  static constexpr int kWidth = 16;
  static void Interleave(const QuadRows<kWidth>& rows, __m512i (&tokens)[1]) {
    const auto load = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows.row[i])); };
    const __m128i r0 = load(0), r1 = load(1), r2 = load(2), r3 = load(3);
    const __m256i a = _mm256_inserti128_si256(_mm256_castsi128_si256(r0), r1, 1);
    const __m256i b = _mm256_inserti128_si256(_mm256_castsi128_si256(r2), r3, 1);
    tokens[0] = _mm512_permutexvar_epi8(_mm512_load_si512(kTokensFirst<kWidth>.at[0]),
                                        _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1));
  }
};

template <typename Tokens>
inline constexpr int kVectorsOf = Tokens::kWidth / 16;

// Adds the products of four outputs.
template <typename Tokens>
[[gnu::always_inline]] inline void SumGroup(const BlockSparseView& w, int64_t group, const uint8_t* x,
                                            __m512i (&total)[kGroupOutputs][kVectorsOf<Tokens>]) {
  const int8_t* values = w.Values(w.starts[group]);
  const int8_t* end = w.Values(w.starts[group + 1]);
  const uint8_t* indices = w.Indices(w.starts[group]);
  for (; values != end; values += kQuadBytes, indices += 2 * kQuadInputs) {
    __builtin_prefetch(values + kPrefetchBytes);
    __builtin_prefetch(indices + kPrefetchBytes / 2);
    __m512i tokens[kVectorsOf<Tokens>];
    Tokens::Interleave(QuadRows<Tokens::kWidth>(x, indices), tokens);
#pragma GCC unroll 4
    for (int o = 0; o < kGroupOutputs; ++o) DotAll(total[o], tokens, values + o * kQuadInputs);
  }
}

inline int64_t GroupEnd(const BlockSparseView& w, int64_t panel_end) {
  return panel_end * kPanelGroups < w.Groups() ? panel_end * kPanelGroups : w.Groups();
}

// What is added to the sums of a group where all tokens have one zero point.
struct ZeroTerms {
  __m512i of[kGroupOutputs];
  ZeroTerms(const int32_t* weight_sums, int64_t group, int32_t zero_point) {
#pragma GCC unroll 4
    for (int o = 0; o < kGroupOutputs; ++o) {
      of[o] = _mm512_set1_epi32(-zero_point * weight_sums[group * kGroupOutputs + o]);
    }
  }
};

// What a panel's outputs are scaled with, and moved by.
struct PanelScales {
  __mmask16 outputs;
  __m512 scales;
  __m512 bias;

  PanelScales(const MatMulArgs& args, int64_t panel) {
    const BlockSparseWeight& w = WeightOf<BlockSparseWeight>(args);
    const int64_t first = panel * kPanelOutputs;
    outputs = First16(w.n - first);
    scales = _mm512_maskz_loadu_ps(outputs, w.scales + first);
    bias = args.bias == nullptr ? _mm512_set1_ps(-0.0f) : _mm512_maskz_loadu_ps(outputs, args.bias + first);
  }
  __m512 ToFloat(__m512i sums, float scale) const {
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums), _mm512_mul_ps(_mm512_set1_ps(scale), scales), bias);
  }
  void Store(float* to, __m512i sums, float scale) const { _mm512_mask_storeu_ps(to, outputs, ToFloat(sums, scale)); }
};

// The sums of a panel, by output and token.
template <typename Tokens>
struct PanelSums {
  __m512i of[kPanelOutputs][kVectorsOf<Tokens>];
};

// Where rows of y lie a multiple of 4096 bytes apart and y is not aligned, panels share lines that leave the cache
// before the second half is written. So rows of some panels are gathered there.
inline constexpr int64_t kPanelsAtOnce = 4;

inline void StoreFloats(float* to, const float* from, int64_t count) {
  int64_t j = 0;
  for (; j + kFloats <= count; j += kFloats) _mm512_storeu_ps(to + j, _mm512_load_ps(from + j));
  if (j < count) _mm512_mask_storeu_ps(to + j, First16(count - j), _mm512_load_ps(from + j));
}

// Of a block of tokens to floats. Sums of a panel are turned into rows of y, 16 tokens at a time, between the groups of
// the next panel: so the shuffles and the stores overlap with its products.
template <typename Tokens>
void MultiplyBlock(const MatMulArgs& args, const uint8_t* x, const BlockRanges<Tokens::kWidth>& ranges, int64_t first,
                   int64_t count, int64_t panel_begin, int64_t panel_end) {
  constexpr int kVectors = kVectorsOf<Tokens>;
  const BlockSparseView w = WeightOf<BlockSparseWeight>(args).view;
  const int32_t* const all_weight_sums = WeightOf<BlockSparseWeight>(args).sums;
  PanelSums<Tokens> sums[2];
  alignas(64) float gathered[Tokens::kWidth][kPanelsAtOnce * kPanelOutputs];
  const bool gathers = args.y_row_bytes % 4096 == 0 && reinterpret_cast<uintptr_t>(args.y) % 64 != 0;
  const auto finish = [&](int64_t panel, int v) {
    const PanelScales scales(args, panel);
    const __m512i weight_sums = _mm512_loadu_si512(all_weight_sums + panel * kPanelOutputs);
    const auto& of = sums[panel % 2].of;
    __m512i of_tokens[16];
#pragma GCC unroll 16
    for (int o = 0; o < 16; ++o) of_tokens[o] = of[o][v];
    Transpose16(of_tokens);
    const int64_t part = gathers ? (panel - panel_begin) % kPanelsAtOnce : 0;
    float* y = gathers ? gathered[16 * v] + part * kPanelOutputs : args.Y(first + 16 * v, panel);
    const int64_t row_bytes = gathers ? static_cast<int64_t>(sizeof(gathered[0])) : args.y_row_bytes;
    const int64_t tokens = count - 16 * v;
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      if (i >= tokens) break;
      const __m512i zero = _mm512_mullo_epi32(_mm512_set1_epi32(ranges.minus_zeros[16 * v + i]), weight_sums);
      scales.Store(y, _mm512_add_epi32(of_tokens[i], zero), ranges.scales[16 * v + i]);
      y = reinterpret_cast<float*>(reinterpret_cast<char*>(y) + row_bytes);
    }
    if (!gathers || (part + 1 < kPanelsAtOnce && panel + 1 < panel_end)) return;
    const int64_t column = (panel - part) * kPanelOutputs;
    const int64_t left = w.n - column, whole = (part + 1) * kPanelOutputs;
    for (int64_t i = 16 * v; i < 16 * v + 16 && i < count; ++i) {
      StoreFloats(args.Y(first + i, panel - part), gathered[i], left < whole ? left : whole);
    }
  };
  for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
    for (int g = 0; g < kPanelGroups; ++g) {
      const int64_t group = panel * kPanelGroups + g;
      if (group < w.Groups()) {
        __m512i total[kGroupOutputs][kVectors] = {};
        SumGroup<Tokens>(w, group, x, total);
        __m512i(*to)[kVectors] = sums[panel % 2].of + g * kGroupOutputs;
#pragma GCC unroll 4
        for (int o = 0; o < kGroupOutputs; ++o) {
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) _mm512_store_si512(&to[o][v], total[o][v]);
        }
      }
      if (panel > panel_begin && g < kVectors) finish(panel - 1, g);
    }
  }
  if (panel_begin == panel_end) return;
  for (int v = 0; v < kVectors; ++v) finish(panel_end - 1, v);
}

// A table of 256 bytes, looked up 64 at a time.
struct ByteTable {
  __m512i parts[4];
  explicit ByteTable(const uint8_t* table) {
    for (int i = 0; i < 4; ++i) parts[i] = _mm512_loadu_si512(table + 64 * i);
  }
  __m512i operator()(__m512i bytes) const {
    return _mm512_mask_blend_epi8(_mm512_movepi8_mask(bytes), _mm512_permutex2var_epi8(parts[0], bytes, parts[1]),
                                  _mm512_permutex2var_epi8(parts[2], bytes, parts[3]));
  }
};

// 16 tokens a vector to bytes in their order.
template <int kVectors>
__m512i ToBytes(const __m512i (&total)[kVectors], float scale, float bias, __m512i zero_point) {
  const __m512 scales = _mm512_set1_ps(scale), biases = _mm512_set1_ps(bias);
  __m512i q[4] = {};
  // Beyond what an int32 holds, numbers must be cut off before they are converted. (NaN, too, takes this way.)
  const bool fits = __builtin_fabsf(scale) <= 0.5f && __builtin_fabsf(bias) <= 0x1p29f;
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    __m512 number = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total[v]), scales, biases);
    if (!fits) number = _mm512_min_ps(number, _mm512_set1_ps(kMostBeforeRounding));
    q[v] = _mm512_cvt_roundps_epi32(number, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  const __m512i low = _mm512_adds_epi16(_mm512_packs_epi32(q[0], q[1]), zero_point);
  const __m512i high = _mm512_adds_epi16(_mm512_packs_epi32(q[2], q[3]), zero_point);
  // Lane i: 4 tokens each of vectors 0, 1, 2, 3. For blocks of 64 that is their order.
  const __m512i bytes = _mm512_packus_epi16(low, high);
  if constexpr (kVectors == 4) return bytes;
  return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), bytes);
}

template <int kWidth>
void StoreTokens(uint8_t* to, __m512i bytes) {
  if constexpr (kWidth == 64) _mm512_storeu_si512(to, bytes);
  if constexpr (kWidth == 32) _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_castsi512_si256(bytes));
  if constexpr (kWidth == 16) _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_castsi512_si128(bytes));
}

// A block of tokens to a block of u8 [w.n][Tokens::kWidth].
template <typename Tokens>
void MultiplyBlockToBytes(const HiddenLayerArgs& args, const uint8_t* x, uint8_t* y, const ByteTable& table,
                          int64_t panel_begin, int64_t panel_end) {
  constexpr int kVectors = kVectorsOf<Tokens>;
  // Copies: what is written to y might be part of args.
  const HiddenLayerWeight layer = WeightOf<HiddenLayerWeight>(args);
  const BlockSparseView& w = layer.view;
  const float* const biases = args.bias;
  const __m512i zero_point = _mm512_set1_epi16(static_cast<int16_t>(layer.table_x.zero_point));
  const float factor = 1.0f / layer.table_x.scale;
  const float x_factor = layer.x_range.scale * factor;
  const int64_t group_end = GroupEnd(w, panel_end);
  for (int64_t group = panel_begin * kPanelGroups; group < group_end; ++group) {
    const ZeroTerms terms(layer.sums, group, layer.x_range.zero_point);
    __m512i total[kGroupOutputs][kVectors];
#pragma GCC unroll 4
    for (int o = 0; o < kGroupOutputs; ++o) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) total[o][v] = terms.of[o];
    }
    SumGroup<Tokens>(w, group, x, total);
#pragma GCC unroll 4
    for (int o = 0; o < kGroupOutputs; ++o) {
      const int64_t output = group * kGroupOutputs + o;
      if (output >= w.n) break;
      const float bias = biases == nullptr ? 0.0f : biases[output] * factor;
      const __m512i bytes = ToBytes(total[o], layer.scales[output] * x_factor, bias, zero_point);
      StoreTokens<Tokens::kWidth>(y + output * Tokens::kWidth, table(bytes));
    }
  }
}

// Calls body(width, first token, tokens) for blocks of 64 and, for the rest, 32 and 16.
template <typename Body>
void ForEachBlock(int64_t m, const Body& body) {
  int64_t first = 0;
  while (first < m) {
    const int64_t left = m - first;
    if (TokenBlockWidth(left) == 64) {
      body(Tokens64{}, first, left < 64 ? left : 64);
      first += 64;
    } else if (TokenBlockWidth(left) == 32) {
      body(Tokens32{}, first, left < 32 ? left : 32);
      first += 32;
    } else {
      body(Tokens16{}, first, left);
      first += 16;
    }
  }
}

// Up to kTokens rows, packed one after the other. Weights are multiplied where they lie: four quads, 16 weights of four
// outputs each; their activations are looked up, 64 at a time, in registers of 128 inputs.
// store(panel, sums of 16 outputs by token, ranges of the tokens).
template <int kTokens, typename Store>
[[gnu::always_inline]] inline void MultiplyFew(const MatMulArgs& args, int64_t first, int64_t panel_begin,
                                               int64_t panel_end, const Store& store) {
  const BlockSparseView& w = WeightOf<BlockSparseWeight>(args).view;
  const int64_t row_bytes = PackedTokenBytes(w.k);
  const uint8_t* x = static_cast<const uint8_t*>(args.x) + first * row_bytes;
  TokenRange ranges[kTokens];
  for (int t = 0; t < kTokens; ++t) ranges[t] = LoadRowRange(x + t * row_bytes, w.k);
  alignas(64) uint8_t even[64];  // of 64 words in two registers, the low bytes
  for (int i = 0; i < 64; ++i) even[i] = static_cast<uint8_t>(2 * i);
  const __m512i low_bytes = _mm512_load_si512(even);
  const __m512i one = _mm512_set1_epi8(1);
  const __m512i quad_0 = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);

  for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
    __m512i totals[kPanelGroups][kTokens];
#pragma GCC unroll 4
    for (int64_t g = 0; g < kPanelGroups; ++g) {
      const int64_t group = panel * kPanelGroups + g;
      __m512i total[kTokens];
      for (int t = 0; t < kTokens; ++t) total[t] = _mm512_setzero_si512();
      const int64_t end = group < w.Groups() ? w.starts[group + 1] : 0;
      for (int64_t quad = group < w.Groups() ? w.starts[group] : 0; quad < end; quad += 16) {
        const int64_t quads = end - quad < 16 ? end - quad : 16;
        const uint8_t* at = w.Indices(quad);
        __m512i words[2];
        if (quads == 16) {
          words[0] = _mm512_loadu_si512(at);
          words[1] = _mm512_loadu_si512(at + 64);
        } else {
          const uint64_t some = (uint64_t{1} << (4 * quads)) - 1;
          words[0] = _mm512_maskz_loadu_epi16(static_cast<__mmask32>(some), at);
          words[1] = _mm512_maskz_loadu_epi16(static_cast<__mmask32>(some >> 32), at + 64);
        }
        const __m512i index = _mm512_permutex2var_epi8(words[0], low_bytes, words[1]);  // its lowest 7 bits count
        const __m512i pair =
            _mm512_permutex2var_epi8(_mm512_srli_epi16(words[0], 7), low_bytes, _mm512_srli_epi16(words[1], 7));
        __m512i tokens[kTokens];
        for (int t = 0; t < kTokens; ++t) tokens[t] = index;
        // Indices ascend.
        const int64_t last = w.Index(quad + quads - 1, kQuadInputs - 1) / 128;
        int64_t p = w.Index(quad, 0) / 128;
        __m512i this_pair = _mm512_set1_epi8(static_cast<char>(p));
        for (; p <= last; ++p, this_pair = _mm512_add_epi8(this_pair, one)) {
          const __mmask64 here = _mm512_cmpeq_epi8_mask(pair, this_pair);
#pragma GCC unroll 4
          for (int t = 0; t < kTokens; ++t) {
            const uint8_t* inputs = x + t * row_bytes + p * 128;
            tokens[t] = _mm512_mask2_permutex2var_epi8(_mm512_loadu_si512(inputs), tokens[t], here,
                                                       _mm512_loadu_si512(inputs + 64));
          }
        }
        __m512i order = quad_0;
        for (int64_t four = 0; four < quads; four += 4, order = _mm512_add_epi32(order, _mm512_set1_epi32(4))) {
          const int8_t* from = w.Values(quad + four);
          const __m512i weights = quads - four >= 4 ? _mm512_loadu_si512(from)
                                                    : _mm512_maskz_loadu_epi32(First16(4 * (quads - four)), from);
#pragma GCC unroll 4
          for (int t = 0; t < kTokens; ++t) {
            total[t] = Dot(total[t], _mm512_permutexvar_epi32(order, tokens[t]), weights);
          }
        }
      }
      for (int t = 0; t < kTokens; ++t) totals[g][t] = total[t];
    }
    const __m512i weight_sums = _mm512_loadu_si512(WeightOf<BlockSparseWeight>(args).sums + panel * kPanelOutputs);
    __m512i sums[kTokens];
#pragma GCC unroll 4
    for (int t = 0; t < kTokens; ++t) {
      // The four lanes of each group's totals are quads, all of the same outputs.
      const auto halves = [](__m512i a, __m512i b) {
        return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x44), _mm512_shuffle_i32x4(a, b, 0xee));
      };
      const __m512i a = halves(totals[0][t], totals[1][t]), b = halves(totals[2][t], totals[3][t]);
      const __m512i products = _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
      const __m512i zero = _mm512_mullo_epi32(_mm512_set1_epi32(ranges[t].zero_point), weight_sums);
      sums[t] = _mm512_sub_epi32(products, zero);
    }
    store(panel, sums, ranges);
  }
}

template <int kTokens>
void MultiplyFewToFloats(const MatMulArgs& args, int64_t first, int64_t panel_begin, int64_t panel_end) {
  const auto store = [&](int64_t panel, const __m512i(&sums)[kTokens], const TokenRange(&ranges)[kTokens]) {
    const PanelScales scales(args, panel);
#pragma GCC unroll 4
    for (int t = 0; t < kTokens; ++t) {
      scales.Store(args.Y(first + t, panel), sums[t], ranges[t].scale);
    }
  };
  MultiplyFew<kTokens>(args, first, panel_begin, panel_end, store);
}

template <int kTokens>
void MultiplyFewToBytes(const HiddenLayerArgs& args, int64_t first, int64_t panel_begin, int64_t panel_end) {
  const HiddenLayerWeight& w = WeightOf<HiddenLayerWeight>(args);
  const int64_t row_bytes = PackedTokenBytes(w.n);
  uint8_t* next = static_cast<uint8_t*>(args.next) + first * row_bytes;
  const ByteTable table(w.table);
  const __m512 factor = _mm512_set1_ps(1.0f / w.table_x.scale);
  const __m512 x_factor = _mm512_mul_ps(_mm512_set1_ps(w.x_range.scale), factor);
  const __m512i zero_point = _mm512_set1_epi32(w.table_x.zero_point);
  const __m512i least = _mm512_setzero_si512(), most = _mm512_set1_epi32(255);
  const auto store = [&](int64_t panel, const __m512i(&sums)[kTokens], const TokenRange(&)[kTokens]) {
    const int64_t output = panel * kPanelOutputs;
    const __mmask16 outputs = First16(w.n - output);
    const __m512 scales = _mm512_mul_ps(_mm512_maskz_loadu_ps(outputs, w.scales + output), x_factor);
    const __m512 bias = args.bias == nullptr
                            ? _mm512_setzero_ps()
                            : _mm512_mul_ps(_mm512_maskz_loadu_ps(outputs, args.bias + output), factor);
#pragma GCC unroll 4
    for (int t = 0; t < kTokens; ++t) {
      const __m512 number = _mm512_min_ps(_mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[t]), scales, bias),
                                          _mm512_set1_ps(kMostBeforeRounding));
      __m512i q = _mm512_cvt_roundps_epi32(number, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
      q = _mm512_min_epi32(_mm512_max_epi32(_mm512_add_epi32(q, zero_point), least), most);
      const __m512i bytes = table(_mm512_castsi128_si512(_mm512_cvtepi32_epi8(q)));
      _mm_mask_storeu_epi8(next + t * row_bytes + output, outputs, _mm512_castsi512_si128(bytes));
    }
  };
  MultiplyFew<kTokens>(args, first, panel_begin, panel_end, store);
  if (panel_begin > 0) return;
  for (int t = 0; t < kTokens; ++t) StoreRowRange(next + t * row_bytes, w.n, RangeOfToken(w.table_y));
}

template <int kTokens>
struct Tokens {
  static constexpr int kCount = kTokens;
};

// Calls body(number of tokens, first token) for four tokens at a time, then for what is left.
template <typename Body>
void ForEachFour(int64_t m, const Body& body) {
  int64_t first = 0;
  for (; m - first >= 4; first += 4) body(Tokens<4>{}, first);
  switch (m - first) {
    case 3:
      return body(Tokens<3>{}, first);
    case 2:
      return body(Tokens<2>{}, first);
    case 1:
      return body(Tokens<1>{}, first);
  }
}

}  // namespace

namespace avx512 {

void PackBlockSparse(const MatMulWeight& w, const float* x, int64_t x_row_bytes, int64_t m, void* packed) {
  const int64_t k = w.k;
  const FixedRange* fixed = static_cast<const BlockSparseWeight&>(w).Fixed();
  ForEachBlock(m, [&](auto tokens, int64_t first, int64_t count) {
    PackBlock<decltype(tokens)::kWidth>(RowAt(x, x_row_bytes, first), x_row_bytes, count, k, fixed,
                                        static_cast<uint8_t*>(packed) + first * PackedTokenBytes(k));
  });
}

void MultiplyBlockSparse(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
  const int64_t k = args.w->k;
  ForEachBlock(args.m, [&](auto tokens, int64_t first, int64_t count) {
    const uint8_t* x = static_cast<const uint8_t*>(args.x) + first * PackedTokenBytes(k);
    MultiplyBlock<decltype(tokens)>(args, x, *BlockRanges<decltype(tokens)::kWidth>::Of(x, k), first, count,
                                    panel_begin, panel_end);
  });
}

void MultiplyHidden(const HiddenLayerArgs& args, int64_t panel_begin, int64_t panel_end) {
  const HiddenLayerWeight& w = WeightOf<HiddenLayerWeight>(args);
  const ByteTable table(w.table);
  ForEachBlock(args.m, [&](auto tokens, int64_t first, int64_t) {
    using Tokens = decltype(tokens);
    const uint8_t* x = static_cast<const uint8_t*>(args.x) + first * PackedTokenBytes(w.k);
    uint8_t* next = static_cast<uint8_t*>(args.next) + first * PackedTokenBytes(w.n);
    MultiplyBlockToBytes<Tokens>(args, x, next, table, panel_begin, panel_end);
    if (panel_begin == 0) StoreBlockRange<Tokens::kWidth>(next, w.n, w.table_y);
  });
}

void PackBlockSparseFewTokens(const MatMulWeight& w, const float* x, int64_t x_row_bytes, int64_t m, void* packed) {
  PackRows(x, x_row_bytes, m, w.k, static_cast<const BlockSparseWeight&>(w).Fixed(), static_cast<uint8_t*>(packed));
}

void MultiplyBlockSparseFewTokens(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
  ForEachFour(args.m, [&](auto tokens, int64_t first) {
    MultiplyFewToFloats<decltype(tokens)::kCount>(args, first, panel_begin, panel_end);
  });
}

void MultiplyHiddenFewTokens(const HiddenLayerArgs& args, int64_t panel_begin, int64_t panel_end) {
  ForEachFour(args.m, [&](auto tokens, int64_t first) {
    MultiplyFewToBytes<decltype(tokens)::kCount>(args, first, panel_begin, panel_end);
  });
}

}  // namespace avx512
}  // namespace ortolan
