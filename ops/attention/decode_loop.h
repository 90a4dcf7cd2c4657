// The decode kernel (decode.h), for all targets. Included only by decode_<target>.cc; everything is local to each
// target. It computes the scores of a chunk of tokens, then weights and values tile by tile. A quad is four
// sub-quantizers (formats/key_code_cache.h).
//
//     tables   [heads][quads][64]   16 entries for each sub-quantizer of a quad
//     scores   [heads][kChunk]      in powers of two, from a multiple of 32 tokens on; -Inf outside the range
//     weights  [heads][kTile]       only for the heads whose tile is not negligible
//
// A target defines a struct Blocks with
//
//     int64_t Ahead(const PrefetchDistances&)                prefetch distance of key codes, in bytes
//     kVectors                                               vectors of a tile of y, for float values
//     kDotHeads                                              heads of a tile of dot products
//     void ScoreBlocks(const CodeBlocks&, int64_t heads)     scores of full blocks of codes
//     void AddInt8Blocks(const Int8Blocks&, int64_t heads)   optional: computes weights, adds them to the sums and the
//                                                            weighted values to y. Without it, values become floats
#pragma once

#include <cstdint>

#include "attention/decode.h"
#include "attention/kv_cache/key_block.h"
#include "attention/softmax_rows.h"
#include "isa/tuning.h"
#include "simd/at_byte.h"
#include "simd/target.h"

namespace ortolan {
namespace {

struct CodeBlocks {
  int64_t quads;
  int64_t blocks;
  const uint8_t* codes;
  const uint8_t* tables;  // [heads][quads][64]
  const float* steps;     // [heads]
  const float* biases;
  float* scores;  // [heads][stride], 32 a block
  int64_t stride;
  int64_t ahead;  // prefetch distance in bytes
};

// A query head and a tile of tokens.
struct TileHead {
  const float* scores;  // [kDecodeTile]
  float most;           // largest of the scores; the lowest float if all are -Inf or NaN
  float maximum;        // largest of the head so far; y and sums are relative to it
  float* sums;          // [kLanes], partial sums of 2^(score - maximum)
  float* y;             // [head_dim]
};

// The full blocks of int8 values in a tile.
struct Int8Blocks {
  int64_t head_dim;
  int64_t blocks;  // 1 … 4
  int64_t from;    // tokens outside [from, to) of the tile have scores of -Inf
  int64_t to;
  const uint8_t* values;  // the first block
  const TileHead* heads;
  uint8_t* parts;  // scratch, 4 kDecodeTile bytes a head, aligned to cache lines
};

constexpr int64_t kDecodeTile = 128;

// Value layouts for AddRows, which reads kTokens consecutive tokens at a time. At returns the address of dimension d of
// token j; only head 0 prefetches. Load returns vector i of a token at that address as floats.
struct FloatRows {
  static constexpr int kTokens = 1;
  const float* first;
  int64_t row_bytes;

  const float* At(int64_t, int64_t j, int64_t d) const { return AtByte(first, j * row_bytes) + d; }
  template <int>
  static Float Load(const float* from, int i) {
    return Simd::Load(from + i * kLanes);
  }
};
struct Int8Rows {
  static constexpr int kTokens = 1;
  const uint8_t* first;
  int64_t row_bytes;

  const uint8_t* At(int64_t, int64_t j, int64_t d) const { return first + j * row_bytes + kValueScaleBytes + d; }
  template <int>
  static Float Load(const uint8_t* from, int i) {
    return Simd::LoadInt8(from + i * kLanes);
  }
};
struct Int8Quads {  // the layout of full blocks
  static constexpr int kTokens = 4;
  const uint8_t* first;
  int64_t row_bytes;

  // Always inline: see simd/prefetch.h.
  __attribute__((always_inline)) const uint8_t* At(int64_t head, int64_t j, int64_t d) const {
    const int64_t scales = (j / kValueBlock + 1) * kValueBlock * kValueScaleBytes;
    const uint8_t* from = first + scales + j * (row_bytes - kValueScaleBytes) + 4 * d;
    if (head == 0) __builtin_prefetch(from + kDecodeTile * row_bytes);
    return from;
  }
  template <int kToken>
  static Float Load(const uint8_t* from, int i) {
    return Simd::SignedByte<kToken>(Simd::LoadInt(from + 4 * i * kLanes));
  }
};

template <typename Blocks>
class DecodeLoop {
  static constexpr int64_t kTile = kDecodeTile;
  static constexpr int64_t kChunkTiles = 16;
  static constexpr int64_t kChunk = kChunkTiles * kTile;
  static constexpr float kLog2E = 1.44269504f;
  static constexpr float kLeastRange = 0x1p-100f;
  static constexpr int kHeads = 4;                   // heads in a tile of y
  static constexpr int kDotKeys = 4;                 // keys in a tile of dot products
  static constexpr int kParts = kLanes > 1 ? 4 : 1;  // sub-quantizers whose minimum and maximum are found together

  static int64_t RoundUp(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

  // The scratch memory, divided into cache-line-aligned arrays.
  struct Scratch {
    int64_t bytes = 0;
    float* query;      // [heads][head_dim], multiplied by log2(e) scale
    float* centroids;  // [S][d_sub][16], only if d_sub > 1
    float* products;   // [S][16]
    float* least;      // [S]: minimums of the products; later [heads]: tiles with only lower scores are negligible
    float* tile_most;  // [heads][kChunkTiles]
    float* sums;       // [heads][kLanes], partial sums of the weights
    float* steps;      // [heads]
    float* biases;     // [heads]
    float* scores;
    float* weights;
    TileHead* heads;  // heads whose tile is not negligible
    uint8_t* tables;
    uint8_t* block;  // the codes of the incomplete last block, converted to a full block
    uint8_t* parts;

    Scratch(int64_t heads, int64_t head_dim, void* memory) {
      const auto take = [&]<typename T>(T*& piece, int64_t count) {
        piece = reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(memory) + static_cast<uintptr_t>(bytes));
        bytes += RoundUp(count * static_cast<int64_t>(sizeof(T)), 64);
      };
      take(query, heads * head_dim);
      take(centroids, head_dim * kCentroids);
      take(products, head_dim * kCentroids);
      take(least, (heads > head_dim ? heads : head_dim) + kLanes);
      take(tile_most, heads * kChunkTiles);
      take(sums, heads * kLanes);
      take(steps, heads);
      take(biases, heads);
      take(scores, heads * kChunk);
      take(weights, heads * kTile);
      take(this->heads, heads);
      take(tables, heads * head_dim * kCentroids);
      take(block, kKeyBlock * head_dim / 2);
      take(parts, heads * kDecodeTile * 4);
    }
  };

  const DecodeAttentionArgs& args_;
  int64_t quads_;
  int64_t full_;  // tokens in full blocks
  Scratch s_;

  DecodeLoop(const DecodeAttentionArgs& args, void* scratch)
      : args_(args),
        quads_(args.Layout().Quads()),
        full_(args.tokens / kKeyBlock * kKeyBlock),
        s_(args.heads, args.head_dim, scratch) {
    const Float factor = Simd::Set(args.scale * kLog2E);
    for (int64_t h = 0; h < args.heads; ++h) {
      const float* q = AtByte(args.q, h * args.q_head_bytes);
      for (int64_t d = 0; d < args.head_dim; d += kLanes) {
        Simd::Store(s_.query + h * args.head_dim + d, Simd::Multiply(Simd::Load(q + d), factor));
      }
    }
    if (args.keys == nullptr) BuildTables();
  }

  void BuildTables() const {
    const int64_t d_sub = args_.d_sub;
    const float* centroids = args_.codebook;
    if (d_sub > 1) {  // as [S][d_sub][16]
      float* to = s_.centroids;
      for (int64_t s = 0; s < 4 * quads_; ++s, centroids += d_sub * kCentroids) {
        for (int64_t d = 0; d < d_sub; ++d) {
          for (int64_t lane = 0; lane < kCentroids; lane += kLanes, to += kLanes) {
            Simd::Store(to, Simd::LoadStrided(centroids + lane * d_sub + d, d_sub));
          }
        }
      }
      centroids = s_.centroids;
    }
    for (int64_t h = 0; h < args_.heads; ++h) {
      WithDSub(d_sub, [&]<int kDSub>() { BuildTable<kDSub>(h, centroids); });
    }
  }

  template <typename Target = Simd, typename Op>
  static Float Reduce(const Float (&a)[kParts], const Op& op) {
    if constexpr (kParts == 1) {
      return a[0];
    } else {
      return Target::ReduceFour(a, op);
    }
  }

  template <int kDSub>
  void BuildTable(int64_t h, const float* centroids) const {
    const int64_t count = 4 * quads_;
    const float* query = s_.query + h * args_.head_dim;
    float* products = s_.products;
    for (int64_t s = 0; s < count; ++s, query += kDSub, centroids += kDSub * kCentroids) {
#pragma GCC unroll 2
      for (int64_t lane = 0; lane < kCentroids; lane += kLanes) {
        Float product = Simd::Multiply(Simd::Load(centroids + lane), Simd::Set(query[0]));
#pragma GCC unroll 4
        for (int d = 1; d < kDSub; ++d) {
          product = Simd::MultiplyAdd(Simd::Load(centroids + d * kCentroids + lane), Simd::Set(query[d]), product);
        }
        Simd::Store(products + s * kCentroids + lane, product);
      }
    }
    float* least = s_.least;
    Float check = Simd::Set(0.0f);  // NaN if a product is not finite
    Float width = Simd::Set(0.0f);
    Float sum = Simd::Set(0.0f);
    for (int64_t s = 0; s < count; s += kParts) {
      Float low[kParts];
      Float high[kParts];
#pragma GCC unroll 4
      for (int i = 0; i < kParts; ++i) {
        const float* from = products + (s + i) * kCentroids;
        low[i] = high[i] = Simd::Load(from);
        check = Simd::MultiplyAdd(low[i], Simd::Set(0.0f), check);
        for (int64_t lane = kLanes; lane < kCentroids; lane += kLanes) {
          const Float more = Simd::Load(from + lane);
          low[i] = Simd::Min(low[i], more);
          high[i] = Simd::Max(high[i], more);
          check = Simd::MultiplyAdd(more, Simd::Set(0.0f), check);
        }
      }
      const Float lows = Reduce(low, [](Float a, Float b) { return Simd::Min(a, b); });
      const Float highs = Reduce(high, [](Float a, Float b) { return Simd::Max(a, b); });
      Simd::Store(least + s, lows);  // the next iteration overwrites what exceeds kParts
      width = Simd::Max(width, Simd::Subtract(highs, lows));
      sum = Simd::Add(sum, lows);
    }
    const float range = Simd::MaxOfLanes(width);
    const float bias = Simd::SumOfLanes(sum) * (float{kParts} / kLanes);
    const bool finite = Simd::SumOfLanes(check) == 0 && range < __builtin_inff();
    const bool flat = !finite || range < kLeastRange;
    s_.biases[h] = finite ? bias : __builtin_nanf("");
    s_.steps[h] = flat ? 0.0f : range / 255;
    const Float inverse = Simd::Set(flat ? 0.0f : 255 / range);
    uint8_t* table = s_.tables + h * count * kCentroids;
    for (int64_t s = 0; s < count; ++s) {
      for (int64_t lane = 0; lane < kCentroids; lane += kLanes) {
        const Float above = Simd::Subtract(Simd::Load(products + s * kCentroids + lane), Simd::Set(least[s]));
        Simd::StoreBytes(table + s * kCentroids + lane, Simd::Multiply(above, inverse));
      }
    }
  }

  // Fills s_.scores for tokens first … first + count-1, with -Inf outside [begin, end). first is a multiple of 32.
  void Score(int64_t first, int64_t count, int64_t begin, int64_t end) const {
    if (args_.keys != nullptr) {
      ScoreFloats(first, begin > first ? begin : first, end < first + count ? end : first + count);
    } else {
      const int64_t block_bytes = args_.Layout().BlockBytes();
      const int64_t full = full_ - first < count ? full_ - first : RoundUp(count, kKeyBlock);
      CodeBlocks blocks{quads_,    full / kKeyBlock, args_.key_codes + first / kKeyBlock * block_bytes,
                        s_.tables, s_.steps,         s_.biases,
                        s_.scores, kChunk,           Blocks::Ahead(ActiveTuning().ahead)};
      if (full > 0) Blocks::ScoreBlocks(blocks, args_.heads);
      if (full < count) {
        WriteKeyBlock(args_.Layout(), args_.key_codes + full_ * args_.Layout().RowBytes(), args_.tokens - full_,
                      s_.block);
        blocks.blocks = 1;
        blocks.codes = s_.block;
        blocks.scores += full;
        Blocks::ScoreBlocks(blocks, args_.heads);
      }
    }
    for (int64_t h = 0; h < args_.heads; ++h) {
      float* scores = s_.scores + h * kChunk;
      if (args_.softcap != 0) CapScores(scores, RoundUp(count, kTile), args_.softcap);
      for (int64_t i = 0; i < begin - first; ++i) scores[i] = kMinusInfinity;
      for (int64_t i = end - first; i < RoundUp(count, kTile); ++i) scores[i] = kMinusInfinity;
    }
  }

  void ScoreFloats(int64_t first, int64_t begin, int64_t end) const {
    int64_t j = begin;
    for (; j + kDotKeys <= end; j += kDotKeys) ScoreKeys<kDotKeys>(first, j);
    for (; j < end; ++j) ScoreKeys<1>(first, j);
  }

  template <int kKeys>
  void ScoreKeys(int64_t first, int64_t j) const {
    int64_t h = 0;
    for (; h + Blocks::kDotHeads <= args_.heads; h += Blocks::kDotHeads) DotTile<kKeys, Blocks::kDotHeads>(first, j, h);
    for (; h < args_.heads; ++h) DotTile<kKeys, 1>(first, j, h);
  }

  template <int kKeys, int kHeads>
  void DotTile(int64_t first, int64_t j, int64_t h) const {
    Float sum[kHeads][kKeys];
#pragma GCC unroll 16
    for (int i = 0; i < kHeads * kKeys; ++i) sum[i / kKeys][i % kKeys] = Simd::Set(0.0f);
    const float* key = AtByte(args_.keys, (j - args_.first_key) * args_.key_row_bytes);
    const float* query = s_.query + h * args_.head_dim;
    for (int64_t d = 0; d < args_.head_dim; d += kLanes) {
      Float keys[kKeys];
#pragma GCC unroll 4
      for (int i = 0; i < kKeys; ++i) keys[i] = Simd::Load(AtByte(key, i * args_.key_row_bytes) + d);
#pragma GCC unroll 4
      for (int r = 0; r < kHeads; ++r) {
        const Float q = Simd::Load(query + r * args_.head_dim + d);
#pragma GCC unroll 4
        for (int i = 0; i < kKeys; ++i) sum[r][i] = Simd::MultiplyAdd(q, keys[i], sum[r][i]);
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < kHeads * kKeys; ++i) {
      s_.scores[(h + i / kKeys) * kChunk + j - first + i % kKeys] = Simd::SumOfLanes(sum[i / kKeys][i % kKeys]);
    }
  }

  // y += weights values for tokens begin … end-1, kHeads heads from `head` on, kVectors vectors from dimension `d` on.
  template <int kHeads, int kVectors, typename Rows>
  void AddRowsTile(int64_t head, int64_t begin, int64_t end, int64_t d, const Rows& rows) const {
    const TileHead* heads = s_.heads + head;
    const float* weights = s_.weights + head * kTile;
    Float sum[kHeads][kVectors];
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) sum[h][i] = Simd::Load(heads[h].y + d + i * kLanes);
    }
    for (int64_t j = begin; j < end; j += Rows::kTokens) {
      const auto from = rows.At(head, j, d);
      const auto add = [&]<int kToken>() __attribute__((always_inline)) {
        Float value[kVectors];
#pragma GCC unroll 4
        for (int i = 0; i < kVectors; ++i) value[i] = Rows::template Load<kToken>(from, i);
#pragma GCC unroll 4
        for (int h = 0; h < kHeads; ++h) {
          const Float weight = Simd::Set(weights[h * kTile + j + kToken]);
#pragma GCC unroll 4
          for (int i = 0; i < kVectors; ++i) sum[h][i] = Simd::MultiplyAdd(weight, value[i], sum[h][i]);
        }
      };
      add.template operator()<0>();
      if constexpr (Rows::kTokens == 4) {
        add.template operator()<1>();
        add.template operator()<2>();
        add.template operator()<3>();
      }
    }
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) Simd::Store(heads[h].y + d + i * kLanes, sum[h][i]);
    }
  }

  template <int kHeads, typename Rows>
  void AddRowsHeads(int64_t head, int64_t begin, int64_t end, const Rows& rows) const {
    constexpr int kVectors = Blocks::kVectors;
    int64_t d = 0;
    for (; d + kVectors * kLanes <= args_.head_dim; d += kVectors * kLanes) {
      AddRowsTile<kHeads, kVectors>(head, begin, end, d, rows);
    }
    for (; d < args_.head_dim; d += kLanes) AddRowsTile<kHeads, 1>(head, begin, end, d, rows);
  }

  template <typename Rows>
  void AddRows(int64_t heads, int64_t begin, int64_t end, const Rows& rows) const {
    int64_t h = 0;
    for (; h + kHeads <= heads; h += kHeads) AddRowsHeads<kHeads>(h, begin, end, rows);
    for (; h < heads; ++h) AddRowsHeads<1>(h, begin, end, rows);
  }

  // Computes the weights of tokens from … to-1 (multiples of kLanes) of a tile, adds them to the sums, and stores
  // scaled(i, weight).
  template <typename Scaled>
  void Weigh(int64_t heads, int64_t from, int64_t to, const Scaled& scaled) const {
    for (int64_t h = 0; h < heads; ++h) {
      const TileHead& head = s_.heads[h];
      const Float maximum = Simd::Set(head.maximum);
      Float sum = Simd::Load(head.sums);
      for (int64_t i = from; i < to; i += kLanes) {
        const Float weight = Simd::Exp2(Simd::Subtract(Simd::Load(head.scores + i), maximum));
        sum = Simd::Add(sum, weight);
        Simd::Store(s_.weights + h * kTile + i, scaled(i, weight));
      }
      Simd::Store(head.sums, sum);
    }
  }

  // Adds the weighted values of the tile that starts at token `first` to y, for the first `heads` entries of s_.heads.
  // Only tokens in [begin, end) count.
  void AddTile(int64_t heads, int64_t first, int64_t begin, int64_t end) const {
    const int64_t from = begin > first ? begin - first : 0;
    const int64_t to = end - first < kTile ? end - first : kTile;
    const auto as_it_is = [](int64_t, Float weight) { return weight; };
    if (args_.values != nullptr) {
      Weigh(heads, 0, kTile, as_it_is);
      const FloatRows rows{AtByte(args_.values, first * args_.value_row_bytes), args_.value_row_bytes};
      return AddRows(heads, from, to, rows);
    }
    const int64_t row_bytes = ValueRowBytes(args_.head_dim);
    const uint8_t* values = args_.int8_values + first * row_bytes;
    const int64_t full = full_ - first < RoundUp(to, kValueBlock) ? full_ - first : RoundUp(to, kValueBlock);
    if (full > 0) AddBlocks(heads, full, from, to, values);
    if (to <= full) return;
    Weigh(heads, full, kTile, as_it_is);
    const int64_t rest = from > full ? from : full;
    for (int64_t j = rest; j < to; ++j) {
      const uint8_t* row = values + j * row_bytes;
      const float scale = __builtin_bit_cast(float, static_cast<uint32_t>(row[0] | row[1] << 8) << 16);
      for (int64_t h = 0; h < heads; ++h) s_.weights[h * kTile + j] *= scale;
    }
    AddRows(heads, rest, to, Int8Rows{values, row_bytes});
  }

  // AddTile for the first `full` tokens of a tile, which are in full blocks.
  void AddBlocks(int64_t heads, int64_t full, int64_t from, int64_t to, const uint8_t* values) const {
    if constexpr (requires { &Blocks::AddInt8Blocks; }) {
      Blocks::AddInt8Blocks({args_.head_dim, full / kValueBlock, from, to, values, s_.heads, s_.parts}, heads);
    } else {
      const int64_t row_bytes = ValueRowBytes(args_.head_dim);
      Weigh(heads, 0, full, [&](int64_t i, Float weight) {
        const uint8_t* scales = values + i / kValueBlock * kValueBlock * row_bytes + i % kValueBlock * kValueScaleBytes;
        const Float product = Simd::Multiply(weight, Simd::LoadBf16(scales));
        // Tokens outside the range have weight 0 and may have arbitrary scales.
        return Simd::SelectLess(Simd::Set(0.0f), weight, product, weight);
      });
      AddRows(heads, 0, full, Int8Quads{values, row_bytes});
    }
  }

  // Finds the largest score of each tile of a chunk, raises the head's maximum to it, and rescales the sums and y.
  // Returns whether a score is NaN.
  bool RaiseMaximum(int64_t h, int64_t tiles, const DecodePartial& partial) const {
    const float* scores = s_.scores + h * kChunk;
    float* tile_most = s_.tile_most + h * kChunkTiles;
    Float check = Simd::Set(0.0f);  // NaN if a score is
    float maximum = partial.max[h];
    for (int64_t tile = 0; tile < tiles; ++tile, scores += kTile) {
      Float most = Simd::Set(kLowest);
#pragma GCC unroll 8
      for (int64_t i = 0; i < kTile; i += kLanes) {
        const Float score = Simd::Load(scores + i);
        most = Simd::Max(score, most);
        check = Simd::Add(check, score);
      }
      tile_most[tile] = Simd::MaxOfLanes(most);
      maximum = tile_most[tile] > maximum ? tile_most[tile] : maximum;
    }
    if (maximum > partial.max[h]) {
      const Float correction = Simd::Exp2(Simd::Set(partial.max[h] - maximum));
      partial.max[h] = maximum;
      float* y = partial.y + h * args_.head_dim;
      for (int64_t d = 0; d < args_.head_dim; d += kLanes) {
        Simd::Store(y + d, Simd::Multiply(Simd::Load(y + d), correction));
      }
      float* sums = s_.sums + h * kLanes;
      Simd::Store(sums, Simd::Multiply(Simd::Load(sums), correction));
    }
    const float total = Simd::SumOfLanes(check);
    return total != total;
  }

  void Attend(int64_t begin, int64_t end, const DecodePartial& partial) const {
    const bool exact = args_.keys != nullptr && args_.values != nullptr;
    const float negligible = (exact ? kNegligiblePowersOfTwoExact : kNegligiblePowersOfTwo) +
                             static_cast<float>(64 - __builtin_clzll(static_cast<uint64_t>(end - begin)));
    for (int64_t i = 0; i < args_.heads * kLanes; ++i) s_.sums[i] = 0;
    for (int64_t first = begin / kKeyBlock * kKeyBlock; first < end; first += kChunk) {
      const int64_t count = end - first < kChunk ? end - first : kChunk;
      const int64_t tiles = (count + kTile - 1) / kTile;
      Score(first, count, begin, end);
      for (int64_t h = 0; h < args_.heads; ++h) {
        const bool nan = RaiseMaximum(h, tiles, partial);
        s_.least[h] = nan ? kMinusInfinity : partial.max[h] - negligible;
      }
      for (int64_t tile = 0; tile < tiles; ++tile) {
        int64_t heads = 0;
        for (int64_t h = 0; h < args_.heads; ++h) {
          const float most = s_.tile_most[h * kChunkTiles + tile];
          if (most < s_.least[h]) continue;
          s_.heads[heads++] = {s_.scores + h * kChunk + tile * kTile, most, partial.max[h], s_.sums + h * kLanes,
                               partial.y + h * args_.head_dim};
        }
        if (heads > 0) AddTile(heads, first + tile * kTile, begin, end);
      }
    }
    for (int64_t h = 0; h < args_.heads; ++h) partial.sum[h] = Simd::SumOfLanes(Simd::Load(s_.sums + h * kLanes));
  }

 public:
  static int64_t ScratchBytes(int64_t heads, int64_t head_dim) { return Scratch(heads, head_dim, nullptr).bytes; }

  static void Run(const DecodeAttentionArgs& args, int64_t begin, int64_t end, const DecodePartial& partial,
                  void* scratch) {
    for (int64_t h = 0; h < args.heads; ++h) {
      partial.max[h] = kLowest;
      partial.sum[h] = 0;
    }
    for (int64_t i = 0; i < args.heads * args.head_dim; ++i) partial.y[i] = 0;
    if (begin < end) DecodeLoop(args, scratch).Attend(begin, end, partial);
  }

  static void Scores(const DecodeAttentionArgs& args, int64_t begin, int64_t end, float* scores, void* scratch) {
    if (begin >= end) return;
    const DecodeLoop loop(args, scratch);
    for (int64_t first = begin / kKeyBlock * kKeyBlock; first < end; first += kChunk) {
      const int64_t count = end - first < kChunk ? end - first : kChunk;
      loop.Score(first, count, begin, end);
      const int64_t from = begin > first ? begin : first;
      for (int64_t h = 0; h < args.heads; ++h) {
        const float* row = loop.s_.scores + h * kChunk + from - first;
        __builtin_memcpy(scores + h * (end - begin) + from - begin, row,
                         static_cast<size_t>(first + count - from) * sizeof(float));
      }
    }
  }
};

template <typename Blocks>
constexpr DecodeFunctions kDecodeFunctions{{&VisibleOf, &WeighScores, &MergePartial, &FinishPartial},
                                           &DecodeLoop<Blocks>::ScratchBytes,
                                           &DecodeLoop<Blocks>::Run,
                                           &DecodeLoop<Blocks>::Scores};

}  // namespace
}  // namespace ortolan
