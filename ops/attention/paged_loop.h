// The loop over tiles of keys, for all targets. Tokens that see a whole tile share its passes: rows in registers times
// vectors of keys, then rows times vectors of values. The others go one by one, so that keys that a row does not see
// never touch its results. Included only by paged_kernels.cc; local to each target.
#pragma once

#include <cstdint>

#include "attention/paged.h"
#include "attention/softcap.h"
#include "simd/amx_tiles.h"
#include "simd/at_byte.h"

namespace ortolan {
namespace {

// kInt8: the pools are int8, otherwise bfloat16.
template <typename Simd, bool kInt8>
class PagedLoop {
  using Float = typename Simd::Float;
  using Int = typename Simd::Int;
  using Bytes = typename Simd::Bytes;
  static constexpr int64_t kLanes = Simd::kLanes;
  static constexpr int kVectors = static_cast<int>(kBlockTokens / kLanes);  // of 16 floats
  static constexpr int kSums = Simd::kRegisters - 4;  // registers for sums; the others hold operands
  // Rows that a pass holds in registers.
  static constexpr int kRows = kSums / kVectors > 12 ? 12 : kSums / kVectors < 1 ? 1 : kSums / kVectors;
  static constexpr int kBlocks = static_cast<int>(kPagedTile / kBlockTokens);  // in a tile
  // Rows from which on a tile is converted to floats first.
  static constexpr int64_t kManyRows = 2 * kRows;
  static constexpr float kLowest = -0x1.fffffep127f;
  static constexpr float kMinusInfinity = -__builtin_inff();
  static constexpr float kLog2E = 1.44269504f;
  static constexpr float kLargestByte = 127;
  static constexpr float kSmallestRow = 0x1p-100f;  // rows of smaller values are 0; 127 / m could be Inf
  static constexpr int64_t kElement = kInt8 ? sizeof(int8_t) : sizeof(uint16_t);
  static constexpr int64_t kQuad = 4;
  static constexpr bool kUsesTiles = kInt8 && requires { Simd::kHasTiles; };
  static constexpr int64_t kLine = 64;

  // 16-float columns of a pass over `rows` rows that fit the registers: 1, 2 or 4.
  static constexpr int Columns(int rows) {
    const int fit = kSums / (rows * kVectors);
    return fit >= 4 ? 4 : fit >= 2 ? 2 : 1;
  }

  // Keys or values of a tile, as the pool has them or as floats. Loops prefetch the same bytes of the next tile: blocks
  // of a sequence are anywhere in the pools, and with few rows, attention waits for memory.
  struct Stored {
    const uint8_t* at[kBlocks];
    const uint8_t* next[kBlocks];
    const float* scales[kBlocks];
    Float Load(int block, int64_t index) const {
      if constexpr (kInt8) return Simd::LoadInt8(at[block] + index);
      return Simd::LoadBf16(at[block] + index * kElement);
    }
    // A quad of each of kLanes keys. `index` counts bytes.
    Bytes LoadQuads(int block, int64_t index) const {
      const Bytes quads = Simd::LoadBytes(at[block] + index);
      return Simd::kInt8Bias == 0 ? quads : Simd::XorBytes(quads, Simd::SetBytes(Simd::kInt8Bias));
    }
    template <int kCount>
    [[gnu::always_inline]] void Prefetch(int block, int64_t index) const {
#pragma GCC unroll 8
      for (int64_t byte = 0; byte < kCount * kElement; byte += kLine) {
        __builtin_prefetch(next[block] + index * kElement + byte);
      }
    }
  };
  struct Floats {
    const float* at;
    int64_t block_floats;
    Float Load(int block, int64_t index) const { return Simd::Load(at + block * block_floats + index); }
    template <int kCount>
    void Prefetch(int, int64_t) const {}
  };

  const PagedAttentionArgs& args_;
  const DecodePartial& partial_;
  const int64_t dim_;
  float* q_;       // [rows][dim]; int8: one row
  float* scores_;  // [rows][kPagedTile], then the weights
  float* sums_;    // [rows][16]
  float* keys_;    // [kPagedTile][dim]
  float* values_;  // [kPagedTile][dim]
  // int8 queries
  int8_t* q_bytes_;       // [rows][dim]
  float* q_scales_;       // [rows]
  int32_t* q_bias_sums_;  // [rows]: -kInt8Bias times the sum of the bytes

  PagedLoop(const PagedAttentionArgs& args, const DecodePartial& partial, void* scratch)
      : args_(args), partial_(partial), dim_(args.head_dim) {
    const int64_t rows = PaddedRows(args.tokens * args.heads);
    float* next = static_cast<float*>(scratch);
    const auto take = [&](int64_t count) {
      float* taken = next;
      next += count;
      return taken;
    };
    scores_ = take(rows * kPagedTile);
    sums_ = take(rows * kBlockTokens);
    keys_ = take(kPagedTile * dim_);
    values_ = take(kPagedTile * dim_);
    q_ = take(kInt8 ? dim_ : rows * dim_);
    if constexpr (!kInt8) return;
    q_scales_ = take(rows);
    q_bias_sums_ = reinterpret_cast<int32_t*>(take(rows));
    q_bytes_ = reinterpret_cast<int8_t*>(next);
  }

  // Tiles may load and store this number of rows.
  static constexpr int64_t PaddedRows(int64_t rows) { return kUsesTiles ? rows + kMaxTileRows - 1 : rows; }

  // The first key that token t sees, and the one after the last.
  int64_t FirstOf(int64_t t) const {
    const int64_t first = args_.position + t + 1 - args_.window;
    return args_.window > 0 && first > 0 ? first : 0;
  }
  int64_t EndOf(int64_t t) const { return args_.position + t + 1; }

  // Begins the partial results for keys [begin, end).
  void Begin(int64_t begin, int64_t end) const {
    const Float factor = Simd::Set(args_.scale * kLog2E), zero = Simd::Set(0.0f);
    for (int64_t t = 0; t < args_.tokens; ++t) {
      const bool with_sinks = args_.sinks != nullptr && FirstOf(t) >= begin && FirstOf(t) < end;
      for (int64_t h = 0; h < args_.heads; ++h) {
        const int64_t row = t * args_.heads + h;
        const float* from = AtByte(args_.q, t * args_.q_token_bytes + h * args_.q_head_bytes);
        float* q = kInt8 ? q_ : q_ + row * dim_;
        for (int64_t d = 0; d < dim_; d += kLanes) {
          Simd::Store(q + d, Simd::Multiply(Simd::Load(from + d), factor));
          Simd::Store(partial_.y + row * dim_ + d, zero);
        }
        if constexpr (kInt8) QuantizeQuery(row);
        for (int64_t i = 0; i < kBlockTokens; i += kLanes) Simd::Store(sums_ + row * kBlockTokens + i, zero);
        partial_.max[row] = kLowest;
        if (!with_sinks) continue;
        partial_.max[row] = args_.sinks[h] * kLog2E;
        sums_[row * kBlockTokens] = 1;
      }
    }
  }

  void QuantizeQuery(int64_t row) const {
    int8_t* bytes = q_bytes_ + row * dim_;
    q_scales_[row] = Quantize(q_, dim_, bytes);
    int32_t sum = 0;
    for (int64_t d = 0; d < dim_; ++d) sum += bytes[d];
    q_bias_sums_[row] = -static_cast<int32_t>(Simd::kInt8Bias) * sum;
  }

  // A tile may end after the sequence's last block. Those keys are not read. next_pool: of the blocks in
  // args.next_blocks.
  Stored Tile(const PagedPool& pool, const PagedPool& next_pool, int64_t first, int64_t end) const {
    const auto block = [](const PagedPool& of, int64_t index) {
      return static_cast<const uint8_t*>(of.blocks) + index * of.block_bytes;
    };
    const auto scales = [](const PagedPool& of, int64_t index) { return AtByte(of.scales, index * of.scales_bytes); };
    Stored tile;
    for (int b = 0; b < kBlocks; ++b) {
      const int64_t key = first + b * kBlockTokens, next = key + kPagedTile;
      const int64_t here = args_.blocks[(key < end ? key : first) / kBlockTokens];
      tile.at[b] = tile.next[b] = block(pool, here);
      if constexpr (kInt8) tile.scales[b] = scales(pool, here);
      const bool is_own = next < end;
      if (!is_own && b >= args_.next_count) continue;
      const PagedPool& of = is_own ? pool : next_pool;
      const int64_t ahead = is_own ? args_.blocks[next / kBlockTokens] : args_.next_blocks[b];
      tile.next[b] = block(of, ahead);
      if constexpr (kInt8) __builtin_prefetch(scales(of, ahead));
    }
    return tile;
  }
  Floats Converted(const Stored& tile, float* to) const {
    const int64_t count = kBlockTokens * dim_;
    for (int b = 0; b < kBlocks; ++b) {
      for (int64_t i = 0; i < count; i += kBlockTokens) {
        tile.template Prefetch<kBlockTokens>(b, i);
        for (int64_t lane = 0; lane < kBlockTokens; lane += kLanes) {
          Simd::Store(to + b * count + i + lane, tile.Load(b, i + lane));
        }
      }
    }
    return {to, count};
  }

  // Scores of kOfRows rows and kOfBlocks blocks from `block` on.
  template <int kOfRows, int kOfBlocks, typename Keys>
  void ScoreRows(int64_t row, int block, const Keys& keys) const {
    Float sum[kOfRows][kOfBlocks * kVectors];
#pragma GCC unroll 16
    for (int r = 0; r < kOfRows; ++r) {
#pragma GCC unroll 16
      for (int i = 0; i < kOfBlocks * kVectors; ++i) sum[r][i] = Simd::Set(0.0f);
    }
    const float* q = q_ + row * dim_;
    for (int64_t d = 0; d < dim_; ++d) {
#pragma GCC unroll 4
      for (int b = 0; b < kOfBlocks; ++b) keys.template Prefetch<kBlockTokens>(block + b, d * kBlockTokens);
      Float key[kOfBlocks * kVectors];
#pragma GCC unroll 16
      for (int i = 0; i < kOfBlocks * kVectors; ++i) {
        key[i] = keys.Load(block + i / kVectors, d * kBlockTokens + i % kVectors * kLanes);
      }
#pragma GCC unroll 16
      for (int r = 0; r < kOfRows; ++r) {
        const Float value = Simd::Set(q[r * dim_ + d]);
#pragma GCC unroll 16
        for (int i = 0; i < kOfBlocks * kVectors; ++i) sum[r][i] = Simd::MultiplyAdd(value, key[i], sum[r][i]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kOfRows; ++r) {
      float* to = scores_ + (row + r) * kPagedTile + block * kBlockTokens;
#pragma GCC unroll 16
      for (int i = 0; i < kOfBlocks * kVectors; ++i) Simd::Store(to + i * kLanes, sum[r][i]);
    }
  }
  // The same for int8 keys: exact dot products of quads, then the scales.
  template <int kOfRows, int kOfBlocks>
  void ScoreInt8Rows(int64_t row, int block, const Stored& keys) const {
    Int sum[kOfRows][kOfBlocks * kVectors];
#pragma GCC unroll 16
    for (int r = 0; r < kOfRows; ++r) {
#pragma GCC unroll 16
      for (int i = 0; i < kOfBlocks * kVectors; ++i) sum[r][i] = Simd::SetInt(q_bias_sums_[row + r]);
    }
    const int8_t* q = q_bytes_ + row * dim_;
    for (int64_t d = 0; d < dim_; d += kQuad) {
      Bytes key[kOfBlocks * kVectors];
#pragma GCC unroll 16
      for (int i = 0; i < kOfBlocks * kVectors; ++i) {
        key[i] = keys.LoadQuads(block + i / kVectors, d * kBlockTokens + i % kVectors * kLanes * kQuad);
      }
#pragma GCC unroll 16
      for (int r = 0; r < kOfRows; ++r) {
        const Bytes quads = Simd::RepeatQuad(q + r * dim_ + d);
#pragma GCC unroll 16
        for (int i = 0; i < kOfBlocks * kVectors; ++i) sum[r][i] = Simd::DotInt8(sum[r][i], key[i], quads);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kOfRows; ++r) {
#pragma GCC unroll 16
      for (int i = 0; i < kOfBlocks * kVectors; ++i) {
        StoreInt8Score(row + r, block + i / kVectors, i % kVectors * kLanes, sum[r][i], keys);
      }
    }
  }
  // Stores the scores of a row and keys lane … lane + kLanes - 1 of a block.
  void StoreInt8Score(int64_t row, int block, int64_t lane, Int dot, const Stored& keys) const {
    const Float scale = Simd::Multiply(Simd::Set(q_scales_[row]), Simd::Load(keys.scales[block] + lane));
    Simd::Store(scores_ + row * kPagedTile + block * kBlockTokens + lane, Simd::Multiply(Simd::ToFloat(dot), scale));
  }

  // The same dot products in AMX tiles, of 16 rows at a time: a block of keys has the order of an int8 B tile. Tiles
  // 0 … 3 are the sums of the blocks; 4 and 5 hold queries and keys, 6 and 7 those of the last head_dim % 64
  // dimensions.
  static TileConfig Tiles(int64_t head_dim) {
    const int rest = static_cast<int>(head_dim % kMaxTileColsb), last = rest == 0 ? kMaxTileColsb : rest;
    TileConfig config;
    for (int block = 0; block < kBlocks; ++block) config.Set(block, kMaxTileRows, kMaxTileColsb);
    config.Set(4, kMaxTileRows, kMaxTileColsb).Set(5, kMaxTileRows, kMaxTileColsb);
    return config.Set(6, kMaxTileRows, last).Set(7, last / static_cast<int>(kQuad), kMaxTileColsb);
  }
  template <int kQueries, int kKeys>
  void AddTiles(const int8_t* q, const Stored& keys, int64_t d) const {
    TileLoad<kQueries>(q + d, dim_);
    const auto add = [&]<int kBlock>() {
      TileLoad<kKeys>(keys.at[kBlock] + d * kBlockTokens, kMaxTileColsb);
      TileDpBssd<kBlock, kQueries, kKeys>();
    };
    add.template operator()<0>();
    add.template operator()<1>();
    add.template operator()<2>();
    add.template operator()<3>();
  }
  void ScoreInTiles(int64_t row, int64_t rows, const Stored& keys) const {
    for (const int64_t end = row + rows; row < end; row += kMaxTileRows) {
      TileZero<0>();
      TileZero<1>();
      TileZero<2>();
      TileZero<3>();
      const int8_t* q = q_bytes_ + row * dim_;
      int64_t d = 0;
      for (; d + kMaxTileColsb <= dim_; d += kMaxTileColsb) AddTiles<4, 5>(q, keys, d);
      if (d < dim_) AddTiles<6, 7>(q, keys, d);
      float* dots = scores_ + row * kPagedTile;  // int32 until the next loop
      constexpr int64_t kRowBytes = kPagedTile * sizeof(float);
      TileStore<0>(dots, kRowBytes);
      TileStore<1>(dots + kBlockTokens, kRowBytes);
      TileStore<2>(dots + 2 * kBlockTokens, kRowBytes);
      TileStore<3>(dots + 3 * kBlockTokens, kRowBytes);
      for (int64_t r = row; r < end && r < row + kMaxTileRows; ++r) {
        for (int64_t j = 0; j < kPagedTile; j += kLanes) {
          const Int dot = Simd::LoadInt(scores_ + r * kPagedTile + j);
          StoreInt8Score(r, static_cast<int>(j / kBlockTokens), j % kBlockTokens, dot, keys);
        }
      }
    }
  }
  template <int kOfRows, typename Keys>
  void Score(int64_t row, const Keys& keys) const {
    constexpr int kTogether = Columns(kOfRows);
    for (int block = 0; block < kBlocks; block += kTogether) {
      if constexpr (kInt8) {
        ScoreInt8Rows<kOfRows, kTogether>(row, block, keys);
      } else {
        ScoreRows<kOfRows, kTogether>(row, block, keys);
      }
    }
  }

  // Replaces the scores of a row by weights, times the scales of the values if they are int8. Keys [first, end) of the
  // tile are visible, and other weights are not used.
  void Weigh(int64_t row, const Stored& values, int64_t first, int64_t end) const {
    float* scores = scores_ + row * kPagedTile;
    if (args_.softcap != 0) {
      const Softcap<Simd> cap(args_.softcap);
      for (int64_t i = 0; i < kPagedTile; i += kLanes) Simd::Store(scores + i, cap.Of(Simd::Load(scores + i)));
    }
    for (int64_t i = 0; i < first; ++i) scores[i] = kMinusInfinity;
    for (int64_t i = end; i < kPagedTile; ++i) scores[i] = kMinusInfinity;
    Float most = Simd::Set(partial_.max[row]);
    for (int64_t i = 0; i < kPagedTile; i += kLanes) most = Simd::Max(Simd::Load(scores + i), most);
    const float before = partial_.max[row], now = Simd::MaxOfLanes(most);
    float* sums = sums_ + row * kBlockTokens;
    if (now != before) {
      partial_.max[row] = now;
      const Float correction = Simd::Exp2(Simd::Set(before - now));
      float* y = partial_.y + row * dim_;
      for (int64_t i = 0; i < kBlockTokens; i += kLanes) {
        Simd::Store(sums + i, Simd::Multiply(Simd::Load(sums + i), correction));
      }
      for (int64_t d = 0; d < dim_; d += kLanes) Simd::Store(y + d, Simd::Multiply(Simd::Load(y + d), correction));
    }
    const Float maximum = Simd::Set(now);
    for (int64_t i = 0; i < kPagedTile; i += kLanes) {
      const Float weight = Simd::Exp2(Simd::Subtract(Simd::Load(scores + i), maximum));
      float* sum = sums + i % kBlockTokens;
      Simd::Store(sum, Simd::Add(Simd::Load(sum), weight));
      if constexpr (kInt8) {
        const Float scales = Simd::Load(values.scales[i / kBlockTokens] + i % kBlockTokens);
        Simd::Store(scores + i, Simd::Multiply(weight, scales));
      } else {
        Simd::Store(scores + i, weight);
      }
    }
  }

  // Adds the weighted values of keys [first, end) of the tile to dimensions d … of kOfRows rows.
  // int8 keys of the next tile are prefetched here, since scores take too little time for it.
  template <int kOfRows, int kColumns, typename Keys, typename Values>
  void AddValues(int64_t row, int64_t d, const Values& values, const Keys& keys, int64_t first, int64_t end) const {
    Float sum[kOfRows][kColumns * kVectors];
    float* y = partial_.y + row * dim_ + d;
#pragma GCC unroll 16
    for (int r = 0; r < kOfRows; ++r) {
#pragma GCC unroll 16
      for (int i = 0; i < kColumns * kVectors; ++i) sum[r][i] = Simd::Load(y + r * dim_ + i * kLanes);
    }
    const float* weights = scores_ + row * kPagedTile;
    for (int64_t j = first; j < end; ++j) {
      const int block = static_cast<int>(j / kBlockTokens);
      const int64_t index = j % kBlockTokens * dim_ + d;
      values.template Prefetch<kColumns * kBlockTokens>(block, index);
      if constexpr (kInt8) keys.template Prefetch<kColumns * kBlockTokens>(block, index);
      Float value[kColumns * kVectors];
#pragma GCC unroll 16
      for (int i = 0; i < kColumns * kVectors; ++i) value[i] = values.Load(block, index + i * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < kOfRows; ++r) {
        const Float weight = Simd::Set(weights[r * kPagedTile + j]);
#pragma GCC unroll 16
        for (int i = 0; i < kColumns * kVectors; ++i) sum[r][i] = Simd::MultiplyAdd(weight, value[i], sum[r][i]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kOfRows; ++r) {
#pragma GCC unroll 16
      for (int i = 0; i < kColumns * kVectors; ++i) Simd::Store(y + r * dim_ + i * kLanes, sum[r][i]);
    }
  }

  // A tile of keys and values for Attend.
  template <typename Keys, typename Values>
  struct Operands {
    const Keys& keys;
    const Values& values;
    const Stored& stored;     // the values as the pool has them
    int64_t first, end;       // keys that the rows see
    bool has_scores = false;  // they are in scores_
  };

  template <int kOfRows, typename Keys, typename Values>
  void Pass(int64_t row, const Operands<Keys, Values>& of) const {
    constexpr int kColumns = Columns(kOfRows);
    if (!of.has_scores) Score<kOfRows>(row, of.keys);
    for (int r = 0; r < kOfRows; ++r) Weigh(row + r, of.stored, of.first, of.end);
    int64_t d = 0;
    for (; d + kColumns * kBlockTokens <= dim_; d += kColumns * kBlockTokens) {
      AddValues<kOfRows, kColumns>(row, d, of.values, of.keys, of.first, of.end);
    }
    for (; d < dim_; d += kBlockTokens) AddValues<kOfRows, 1>(row, d, of.values, of.keys, of.first, of.end);
  }
  template <int kOfRows, typename Keys, typename Values>
  void LastPass(int64_t row, int64_t rows, const Operands<Keys, Values>& of) const {
    if constexpr (kOfRows > 0) {
      if (rows == kOfRows) return Pass<kOfRows>(row, of);
      LastPass<kOfRows - 1>(row, rows, of);
    }
  }
  // Attends from rows `row` … row + rows - 1 to keys [first, end) of the tile.
  template <typename Keys, typename Values>
  void Attend(int64_t row, int64_t rows, Operands<Keys, Values> of) const {
    if constexpr (kUsesTiles) {
      of.has_scores = rows >= kMaxTileRows;
      if (of.has_scores) ScoreInTiles(row, rows, of.keys);
    }
    for (; rows >= kRows; row += kRows, rows -= kRows) Pass<kRows>(row, of);
    LastPass<kRows - 1>(row, rows, of);
  }

  void AttendTile(int64_t tile) const {
    const int64_t tile_end = tile + kPagedTile, last = args_.tokens - 1;
    // The tokens from `begin` on see the tile's keys; those in [whole, whole_end) see all of them.
    const int64_t begin = tile > args_.position ? tile - args_.position : 0;
    int64_t whole = tile_end - 1 > args_.position ? tile_end - 1 - args_.position : 0;
    if (whole > args_.tokens) whole = args_.tokens;
    int64_t end = args_.tokens, whole_end = args_.tokens;
    if (args_.window > 0) {
      while (end > begin && FirstOf(end - 1) >= tile_end) --end;
      whole_end = end;
      while (whole_end > whole && FirstOf(whole_end - 1) > tile) --whole_end;
      if (whole > whole_end) whole = whole_end;
    }
    if (begin >= end) return;
    const Stored keys = Tile(args_.keys, args_.next_keys, tile, EndOf(last)),
                 values = Tile(args_.values, args_.next_values, tile, EndOf(last));
    const int64_t rows = (whole_end - whole) * args_.heads;
    const auto one_by_one = [&](int64_t from, int64_t to) {
      for (int64_t t = from; t < to; ++t) {
        const int64_t first = FirstOf(t) > tile ? FirstOf(t) - tile : 0;
        const int64_t seen = EndOf(t) < tile_end ? EndOf(t) - tile : kPagedTile;
        Attend(t * args_.heads, args_.heads, Operands<Stored, Stored>{keys, values, values, first, seen});
      }
    };
    one_by_one(begin, whole);
    const int64_t row = whole * args_.heads;
    if (rows < kManyRows) {
      Attend(row, rows, Operands<Stored, Stored>{keys, values, values, 0, kPagedTile});
    } else {
      const Floats floats = Converted(values, values_);
      if constexpr (kInt8) {
        Attend(row, rows, Operands<Stored, Floats>{keys, floats, values, 0, kPagedTile});
      } else {
        Attend(row, rows, Operands<Floats, Floats>{Converted(keys, keys_), floats, values, 0, kPagedTile});
      }
    }
    one_by_one(whole_end, end);
  }

  void End() const {
    for (int64_t row = 0; row < args_.tokens * args_.heads; ++row) {
      float* sums = sums_ + row * kBlockTokens;
      for (int64_t half = kBlockTokens / 2; half > 0; half /= 2) {
        for (int64_t i = 0; i < half; ++i) sums[i] += sums[i + half];
      }
      partial_.sum[row] = sums[0];
    }
  }

 public:
  static int64_t ScratchBytes(int64_t rows, int64_t head_dim) {
    rows = PaddedRows(rows);
    const int64_t floats = rows * (kPagedTile + kBlockTokens + head_dim) + 2 * kPagedTile * head_dim;
    const int64_t of_int8 = kInt8 ? 2 * rows + head_dim : 0;  // scales, sums and a query; the bytes are less than q
    return (floats + of_int8) * static_cast<int64_t>(sizeof(float));
  }

  // Rounds a row to int8, and returns its scale.
  static float Quantize(const float* from, int64_t count, int8_t* to) {
    Float most = Simd::Set(0.0f), check = Simd::Set(0.0f);
    for (int64_t i = 0; i < count; i += kLanes) {
      const Float x = Simd::Load(from + i);
      most = Simd::Max(Simd::Abs(x), most);
      check = Simd::MultiplyAdd(x, Simd::Set(0.0f), check);  // NaN for Inf and NaN
    }
    const float largest = Simd::MaxOfLanes(most), scale = largest / kLargestByte;
    const bool is_finite = !Simd::HasNan(check);
    const Float factor = Simd::Set(is_finite && largest >= kSmallestRow ? kLargestByte / largest : 0.0f);
    for (int64_t i = 0; i < count; i += kLanes) {
      const Float x = is_finite ? Simd::Load(from + i) : Simd::Set(0.0f);
      Simd::StoreInt8(to + i, Simd::RoundToInt(Simd::Multiply(x, factor)));
    }
    return is_finite ? scale : __builtin_nanf("");
  }

  static void Run(const PagedAttentionArgs& args, int64_t begin, int64_t end, const DecodePartial& partial,
                  void* scratch) {
    const PagedLoop loop(args, partial, scratch);
    const bool uses_tiles = kUsesTiles && args.tokens * args.heads >= kMaxTileRows;
    if constexpr (kUsesTiles) {
      if (uses_tiles) LoadTileConfig(Tiles(args.head_dim));
    }
    loop.Begin(begin, end);
    const int64_t seen = args.position + args.tokens;
    for (int64_t tile = begin; tile < (end < seen ? end : seen); tile += kPagedTile) loop.AttendTile(tile);
    loop.End();
    if constexpr (kUsesTiles) {
      if (uses_tiles) TileRelease();
    }
  }
};

}  // namespace
}  // namespace ortolan
