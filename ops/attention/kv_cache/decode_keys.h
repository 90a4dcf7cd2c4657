// Decodes keys from their codes (decode_keys of kv_cache.h), for all targets. Included only by kernels.cc; local to
// each target.
//
// Lanes are keys, as in a block of codes: kLanes keys are looked up in a table of 16 centroids at once, and squares of
// kLanes x kLanes results are transposed to rows.
#pragma once

#include "attention/kv_cache/key_block.h"
#include "simd/at_byte.h"
#include "simd/target.h"

namespace ortolan {
namespace {

class KeyDecoder {
 public:
  const KeyCodeLayout& layout;
  const float* codebook;
  int64_t begin, end;
  float* keys;
  int64_t key_row_bytes;

 private:
  using Float = Simd::Float;
  using Int = Simd::Int;
  static constexpr int64_t kLanes = Simd::kLanes;
  // Tokens whose rows stay in the CPU cache while their columns are written.
  static constexpr int64_t kChunk = 4 * kKeyBlock;

  template <int kByte, int kDSub>
  static void Lookup(const float* tables, Int word, Float* columns) {
#pragma GCC unroll 4
    for (int d = 0; d < kDSub; ++d) {
      const int column = kByte * kDSub + d;
      columns[column] = Simd::Lookup16(tables + column * kCentroids, Simd::ShiftRightInt<8 * kByte>(word));
    }
  }

  // Writes the columns of kQuads quads for keys first … first + kLanes-1; `words` holds their codes in the low nibbles.
  template <int kDSub, int kQuads>
  void WriteKeys(const Int (&words)[kQuads], const float* tables, int64_t token, int64_t column) const {
    constexpr int kColumns = 4 * kQuads * kDSub;
    Float columns[kColumns];
#pragma GCC unroll 4
    for (int q = 0; q < kQuads; ++q) {
      const float* of_quad = tables + q * 4 * kDSub * kCentroids;
      Float* to = columns + q * 4 * kDSub;
      Lookup<0, kDSub>(of_quad, words[q], to);
      Lookup<1, kDSub>(of_quad, words[q], to);
      Lookup<2, kDSub>(of_quad, words[q], to);
      Lookup<3, kDSub>(of_quad, words[q], to);
    }
    for (int c = 0; c < kColumns; c += kLanes) {
      Float rows[kLanes];
#pragma GCC unroll 16
      for (int64_t i = 0; i < kLanes; ++i) rows[i] = columns[c + i];
      Simd::Transpose(rows);
#pragma GCC unroll 16
      for (int64_t i = 0; i < kLanes; ++i) {
        const int64_t row = token + i - begin;
        if (row < 0 || row >= end - begin) continue;
        Simd::Store(AtByte(keys, row * key_row_bytes) + column + c, rows[i]);
      }
    }
  }

  // Decodes the blocks of tokens first … first + count - 1; count is a multiple of 32.
  template <int kDSub>
  void WriteBlocks(const uint8_t* blocks, int64_t first, int64_t count) const {
    constexpr int kQuads = kLanes > 4 * kDSub ? static_cast<int>(kLanes) / (4 * kDSub) : 1;
    constexpr int kColumns = 4 * kQuads * kDSub;
    for (int64_t column = 0; column < layout.head_dim; column += kColumns) {
      const float* tables = codebook + column * kCentroids;
      float copies[kColumns * kCentroids];  // [sub-quantizer][d_sub][16]
      if constexpr (kDSub > 1) {
        for (int c = 0; c < kColumns; ++c) {
          const float* from = tables + c / kDSub * kDSub * kCentroids + c % kDSub;
          for (int64_t lane = 0; lane < kCentroids; lane += kLanes) {
            Simd::Store(copies + c * kCentroids + lane, Simd::LoadStrided(from + lane * kDSub, kDSub));
          }
        }
        tables = copies;
      }
      const uint8_t* quads = blocks + column / kDSub / 4 * 64;
      for (int64_t token = 0; token < count; token += kKeyBlock, quads += layout.BlockBytes()) {
        for (int64_t k = 0; k < 16; k += kLanes) {
          Int words[kQuads];
#pragma GCC unroll 4
          for (int q = 0; q < kQuads; ++q) words[q] = Simd::LoadInt(quads + 64 * q + 4 * k);
          WriteKeys<kDSub>(words, tables, first + token + k, column);
#pragma GCC unroll 4
          for (int q = 0; q < kQuads; ++q) words[q] = Simd::ShiftRightInt<4>(words[q]);
          WriteKeys<kDSub>(words, tables, first + token + 16 + k, column);
        }
      }
    }
  }

  void WriteBlocks(const uint8_t* blocks, int64_t first, int64_t count) const {
    WithDSub(layout.d_sub, [&]<int kDSub>() { WriteBlocks<kDSub>(blocks, first, count); });
  }

 public:
  void Run(const uint8_t* cache, int64_t tokens) const {
    if (begin >= end) return;
    const int64_t full = tokens / kKeyBlock * kKeyBlock;
    int64_t first = begin / kKeyBlock * kKeyBlock;
    while (first < full && first < end) {
      const int64_t most = full - first < kChunk ? full - first : kChunk;
      WriteBlocks(cache + first * layout.RowBytes(), first, most);
      first += most;
    }
    if (first >= end) return;
    uint8_t block[kKeyBlock * kMaxHeadDim / 2];
    WriteKeyBlock(layout, cache + full * layout.RowBytes(), tokens - full, block);
    WriteBlocks(block, full, kKeyBlock);
  }
};

void DecodeKeys(const KeyCodeLayout& layout, const float* codebook, const uint8_t* cache, int64_t tokens, int64_t begin,
                int64_t end, float* keys, int64_t key_row_bytes) {
  KeyDecoder{layout, codebook, begin, end, keys, key_row_bytes}.Run(cache, tokens);
}

}  // namespace
}  // namespace ortolan
