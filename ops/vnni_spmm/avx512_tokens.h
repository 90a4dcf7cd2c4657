// Quantization of tokens by AVX-512. Included by x86_*.cc only; local to each.
#pragma once

#include <immintrin.h>

#include "vnni_spmm/token_blocks.h"
#include "vnni_spmm/token_range.h"

namespace ortolan {
namespace {

inline constexpr int64_t kFloats = 16;  // of a vector
inline constexpr int64_t kInputs = 64;  // that a vector of bytes holds

// A mask of the first `count` lanes; of all if there are more.
inline __mmask16 First16(int64_t count) {
  return static_cast<__mmask16>(_bzhi_u32(0xffff, count < 0 ? 0 : count > 16 ? 16 : static_cast<uint32_t>(count)));
}

inline TokenRange RangeOfToken(const float* x, int64_t k) {
  constexpr int kChains = 4;  // that do not wait for each other
  const __m512 zero = _mm512_setzero_ps();
  __m512 least[kChains] = {zero, zero, zero, zero}, most[kChains] = {zero, zero, zero, zero};
  __m512 nan[kChains] = {zero, zero, zero, zero};
  const auto add = [&](int i, __m512 v) {
    least[i] = _mm512_min_ps(v, least[i]);
    most[i] = _mm512_max_ps(v, most[i]);
    nan[i] = _mm512_fmadd_ps(v, zero, nan[i]);  // NaN from Inf or NaN on
  };
  int64_t l = 0;
  for (; l + kChains * kFloats <= k; l += kChains * kFloats) {
#pragma GCC unroll 4
    for (int i = 0; i < kChains; ++i) add(i, _mm512_loadu_ps(x + l + i * kFloats));
  }
  for (; l < k; l += kFloats) add(0, _mm512_maskz_loadu_ps(First16(k - l), x + l));
  for (int i = 1; i < kChains; ++i) {
    least[0] = _mm512_min_ps(least[0], least[i]);
    most[0] = _mm512_max_ps(most[0], most[i]);
    nan[0] = _mm512_add_ps(nan[0], nan[i]);
  }
  const bool finite = _mm512_cmp_ps_mask(nan[0], nan[0], _CMP_UNORD_Q) == 0;
  return RangeOfToken(_mm512_reduce_min_ps(least[0]), _mm512_reduce_max_ps(most[0]), finite);
}

// clamp(round(x factor) + zero_point, 0, 255) of 64 inputs, of which `left` exist; behind them the zero point. NaN
// gives 255.
[[gnu::always_inline]] inline __m512i Quantize64(const float* x, int64_t left, __m512 factor, __m512i zero_point) {
  const __m512 most = _mm512_set1_ps(kMostBeforeRounding);
  __m512i q[4];
  for (int i = 0; i < 4; ++i) {
    const __m512 v = left >= kInputs ? _mm512_loadu_ps(x + i * kFloats)
                                     : _mm512_maskz_loadu_ps(First16(left - i * kFloats), x + i * kFloats);
    q[i] = _mm512_cvt_roundps_epi32(_mm512_min_ps(_mm512_mul_ps(v, factor), most),
                                    _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  // Lanes of 4: the packing leaves them as 0, 4, 8, 12, 1, …
  const __m512i low = _mm512_adds_epi16(_mm512_packs_epi32(q[0], q[1]), zero_point);
  const __m512i high = _mm512_adds_epi16(_mm512_packs_epi32(q[2], q[3]), zero_point);
  const __m512i in_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_epi32(in_order, _mm512_packus_epi16(low, high));
}

// 16 vectors of 16 dwords: v[i] lane j becomes v[j] lane i.
inline void Transpose16(__m512i (&v)[16]) {
  __m512i t[16];
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    const __m512i a = _mm512_unpacklo_epi32(v[i], v[i + 1]), b = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    const __m512i c = _mm512_unpacklo_epi32(v[i + 2], v[i + 3]), d = _mm512_unpackhi_epi32(v[i + 2], v[i + 3]);
    t[i] = _mm512_unpacklo_epi64(a, c);
    t[i + 1] = _mm512_unpackhi_epi64(a, c);
    t[i + 2] = _mm512_unpacklo_epi64(b, d);
    t[i + 3] = _mm512_unpackhi_epi64(b, d);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i a = _mm512_shuffle_i32x4(t[i], t[4 + i], 0x88), b = _mm512_shuffle_i32x4(t[i], t[4 + i], 0xdd);
    const __m512i c = _mm512_shuffle_i32x4(t[8 + i], t[12 + i], 0x88);
    const __m512i d = _mm512_shuffle_i32x4(t[8 + i], t[12 + i], 0xdd);
    v[i] = _mm512_shuffle_i32x4(a, c, 0x88);
    v[4 + i] = _mm512_shuffle_i32x4(b, d, 0x88);
    v[8 + i] = _mm512_shuffle_i32x4(a, c, 0xdd);
    v[12 + i] = _mm512_shuffle_i32x4(b, d, 0xdd);
  }
}

inline const float* RowAt(const float* x, int64_t row_bytes, int64_t i) {
  return reinterpret_cast<const float*>(reinterpret_cast<const char*>(x) + i * row_bytes);
}

// kParts vectors of 4 inputs x 16 tokens each to 4 inputs x 16 kParts tokens.
template <int kParts>
inline void JoinTokens(const __m512i* parts, __m512i* joined) {
  if constexpr (kParts == 1) {
    joined[0] = parts[0];
  } else if constexpr (kParts == 2) {
    joined[0] = _mm512_permutex2var_epi64(parts[0], _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), parts[1]);
    joined[1] = _mm512_permutex2var_epi64(parts[0], _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15), parts[1]);
  } else {
    const __m512i a = _mm512_shuffle_i32x4(parts[0], parts[1], 0x44),
                  b = _mm512_shuffle_i32x4(parts[0], parts[1], 0xee);
    const __m512i c = _mm512_shuffle_i32x4(parts[2], parts[3], 0x44),
                  d = _mm512_shuffle_i32x4(parts[2], parts[3], 0xee);
    joined[0] = _mm512_shuffle_i32x4(a, c, 0x88);
    joined[1] = _mm512_shuffle_i32x4(a, c, 0xdd);
    joined[2] = _mm512_shuffle_i32x4(b, d, 0x88);
    joined[3] = _mm512_shuffle_i32x4(b, d, 0xdd);
  }
}

// A block of kWidth tokens, of which `count` exist: u8 [k][kWidth]. ranges: kWidth of them.
template <int kWidth>
void QuantizeBlock(const float* x, int64_t x_row_bytes, int64_t count, int64_t k, const TokenRange* ranges,
                   uint8_t* block) {
  constexpr int kParts = kWidth / 16;
  // Of 4 tokens x 4 dwords of 4 inputs to 4 inputs x 16 tokens.
  alignas(64) uint8_t order[64];
  for (int i = 0; i < 64; ++i) order[i] = static_cast<uint8_t>(i % 16 * 4 + i / 16);
  const __m512i to_inputs = _mm512_load_si512(order);
  for (int64_t l = 0; l < k; l += kInputs) {
    __m512i parts[16][kParts];  // of four inputs each
    for (int p = 0; p < kParts; ++p) {
      __m512i q[16];
      for (int i = 0; i < 16; ++i) {
        const int64_t token = TokenAt(kWidth, 16 * p + i);
        const TokenRange& range = ranges[token];
        q[i] = token < count ? Quantize64(RowAt(x, x_row_bytes, token) + l, k - l, _mm512_set1_ps(range.factor),
                                          _mm512_set1_epi16(static_cast<int16_t>(range.zero_point)))
                             : _mm512_setzero_si512();
      }
      Transpose16(q);
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) parts[i][p] = _mm512_permutexvar_epi8(to_inputs, q[i]);
    }
    uint8_t* to = block + l * kWidth;
    for (int64_t i = 0; i < 16; ++i) {
      __m512i joined[kParts];
      JoinTokens<kParts>(parts[i], joined);
      for (int p = 0; p < kParts; ++p, to += 64) {
        const int64_t bytes = block + k * kWidth - to;
        if (bytes >= 64) {
          _mm512_storeu_si512(to, joined[p]);
        } else if (bytes > 0) {
          _mm512_mask_storeu_epi8(to, _bzhi_u64(~uint64_t{0}, static_cast<uint32_t>(bytes)), joined[p]);
        }
      }
    }
  }
}

// What stands behind the numbers of a packed block.
template <int kWidth>
struct BlockRanges {
  float scales[kWidth];
  int32_t minus_zeros[kWidth];

  // In the block, whose memory may not be aligned to more than 4 bytes.
  static BlockRanges* Of(uint8_t* block, int64_t k) {
    return reinterpret_cast<BlockRanges*>(block + (k + 127) / 128 * 128 * kWidth);
  }
  static const BlockRanges* Of(const uint8_t* block, int64_t k) {
    return reinterpret_cast<const BlockRanges*>(block + (k + 127) / 128 * 128 * kWidth);
  }
};

template <int kWidth>
void StoreBlockRange(uint8_t* block, int64_t k, const FixedRange& fixed) {
  BlockRanges<kWidth>& stored = *BlockRanges<kWidth>::Of(block, k);
  for (int64_t i = 0; i < kWidth; ++i) {
    stored.scales[i] = fixed.scale;
    stored.minus_zeros[i] = -fixed.zero_point;
  }
}

// A block of kWidth tokens, of which `count` exist. fixed: null if each has a range of its own.
template <int kWidth>
void PackBlock(const float* x, int64_t x_row_bytes, int64_t count, int64_t k, const FixedRange* fixed, uint8_t* block) {
  TokenRange ranges[kWidth];
  if (fixed != nullptr) {
    for (TokenRange& range : ranges) range = RangeOfToken(*fixed);
    StoreBlockRange<kWidth>(block, k, *fixed);
  } else {
    BlockRanges<kWidth>& stored = *BlockRanges<kWidth>::Of(block, k);
    for (int64_t i = 0; i < kWidth; ++i) {
      ranges[i] = i < count ? RangeOfToken(RowAt(x, x_row_bytes, i), k) : TokenRange{0.0f, 0.0f, 0};
      stored.scales[i] = ranges[i].scale;
      stored.minus_zeros[i] = -ranges[i].zero_point;
    }
  }
  QuantizeBlock<kWidth>(x, x_row_bytes, count, k, ranges, block);
}

// One token after the other: q [k], padded, then its range.
inline void PackRows(const float* x, int64_t x_row_bytes, int64_t m, int64_t k, const FixedRange* fixed,
                     uint8_t* packed) {
  for (int64_t i = 0; i < m; ++i, packed += PackedTokenBytes(k)) {
    const float* row = RowAt(x, x_row_bytes, i);
    const TokenRange range = fixed != nullptr ? RangeOfToken(*fixed) : RangeOfToken(row, k);
    const __m512 factor = _mm512_set1_ps(range.factor);
    const __m512i zero_point = _mm512_set1_epi16(static_cast<int16_t>(range.zero_point));
    for (int64_t l = 0; l < k; l += kInputs) {
      _mm512_storeu_si512(packed + l, Quantize64(row + l, k - l, factor, zero_point));
    }
    StoreRowRange(packed, k, range);
  }
}

}  // namespace
}  // namespace ortolan
