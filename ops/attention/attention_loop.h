// The loop over blocks of keys and query rows, for all targets. As in FlashAttention, scores never leave the cache, and
// each block of keys rescales the results of the blocks before it. Included only by *attention_kernels.cc; everything
// is local to each target.
//
// Lanes are query rows, so no maximum or sum crosses lanes. Products are computed in units of 32 bits
// (attention_units.h): one float, or a pair of bf16 (two dimensions or two keys of the same lane).
//
//     queries        [units of head_dim][kRows]      times scale log2(e), transposed
//     keys           [key][units of head_dim]        in their original order
//     scores         [key][kRows]                    in powers of two
//     probabilities  [unit of keys][kRows]           overwrite the scores
//     values         [unit of keys][padded_dim]      zero beyond head_dim
//     out            [row][padded_dim]               not yet divided by the sum of probabilities
//
// With AMX tiles (kInTiles), values and out are transposed: [padded_dim][units of keys] and [padded_dim][kRows]. Tiles
// also cover padding. Dimensions beyond head_dim are zero in both factors, as are values and probabilities beyond the
// last key. Keys beyond the last are left from the previous block; their scores are never read.
#pragma once

#include <cstdint>

#include "attention/attention.h"
#include "attention/attention_units.h"
#include "attention/softcap.h"
#include "simd/at_byte.h"
#include "simd/flush_denormals.h"

namespace ortolan {
namespace {

// Register blocking by the number of vector registers.
template <int kRegisters, int64_t kLanes>
struct RegisterBlocks {
  static constexpr int kVectors = 2;           // vectors of query rows in a block
  static constexpr int kValueRows[] = {8, 6};  // rows of y, indexed by vectors of values - 1
  static constexpr int kScoreKeys[] = {8, 6};  // keys of scores, indexed by vectors of rows - 1
};
template <int64_t kLanes>
struct RegisterBlocks<32, kLanes> {
  static constexpr int kVectors = 4;
  static constexpr int kValueRows[] = {16, 8, 8, 4};
  static constexpr int kScoreKeys[] = {8, 8, 4, 4};
};
template <>
struct RegisterBlocks<16, 1> {
  static constexpr int kVectors = 4;
  static constexpr int kValueRows[] = {1, 1, 1, 1};
  static constexpr int kScoreKeys[] = {2, 2, 2, 2};
};

// Simd: a target's vectors, extended by the units of attention_units.h.
template <typename Simd>
class AttentionLoop {
  using Registers = RegisterBlocks<Simd::kRegisters, Simd::kLanes>;
  using Float = typename Simd::Float;
  static constexpr int64_t kLanes = Simd::kLanes;
  static constexpr int kVectors = Registers::kVectors;
  static constexpr int64_t kPair = Simd::kPair;
  static constexpr int64_t kUnit = Simd::kUnit;
  static constexpr int64_t kRows = kVectors * kLanes;
  static constexpr int64_t kBlocks = (kAttentionRows + kRows - 1) / kRows;
  static constexpr bool kInTiles = Simd::kInTiles;
  static constexpr int64_t kKeys = 64 * kPair;  // keys in a block
  static constexpr int64_t kKeyUnits = kKeys / kUnit;
  static_assert(!kInTiles || (kLanes == kTileUnits && kKeyUnits % kTileUnits == 0), "tiles are whole");
  static constexpr int64_t kAligned = 64 / sizeof(float);  // floats in the alignment of arrays
  static constexpr float kLowest = -0x1.fffffep127f;
  static constexpr float kMinusInfinity = -__builtin_inff();
  static constexpr float kLog2E = 1.44269504f;

  struct Block {
    int64_t first;        // first row
    int64_t rows;         // 1 … kRows
    int64_t least_begin;  // first key that one of its rows sees
    int64_t most_begin;   // first key that all its rows see, unless the causal mask hides it
    int64_t least_seen;   // the keys from here on are hidden from one of its rows
    int64_t most_seen;    // the keys from here on are hidden from all its rows
    float* queries;
    float* out;
    float most[kRows];  // largest score so far
    float sum[kRows];
    float correction[kRows];
    float begin[kRows];  // the first key that the row sees
    float seen[kRows];   // the last one + 1
  };

  const AttentionArgs& args_;
  int64_t dim_units_;
  int64_t padded_dim_;
  float* keys_;
  float* values_;
  float* scores_;
  float* bias_;  // [kKeys]
  Block* blocks_;

  static int64_t RoundUp(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
  static int64_t DimUnits(int64_t head_dim) { return RoundUp(head_dim, kPair) / kUnit; }
  static int64_t PaddedKeyUnits(int64_t head_dim) { return RoundUp(DimUnits(head_dim), kTileUnits); }
  static int64_t QueryUnits(int64_t head_dim) { return kInTiles ? PaddedKeyUnits(head_dim) : DimUnits(head_dim); }

  AttentionLoop(const AttentionArgs& args, void* scratch)
      : args_(args), dim_units_(DimUnits(args.head_dim)), padded_dim_(RoundUp(args.head_dim, kLanes)) {
    float* next = static_cast<float*>(scratch);
    const auto take = [&](int64_t count) {
      float* taken = next;
      next += RoundUp(count, kAligned);
      return taken;
    };
    scores_ = take(kKeys * kRows);
    keys_ = take(kKeys * PaddedKeyUnits(args.head_dim));
    values_ = take(kKeyUnits * padded_dim_);
    bias_ = take(kKeys);
    const int64_t query_units = QueryUnits(args.head_dim);
    float* queries = take(kBlocks * query_units * kRows);
    float* out = take(kBlocks * kRows * padded_dim_);
    blocks_ = reinterpret_cast<Block*>(next);
    for (int64_t b = 0; b < kBlocks; ++b) {
      blocks_[b].queries = queries + b * query_units * kRows;
      blocks_[b].out = out + b * kRows * padded_dim_;
    }
    if constexpr (kInTiles) {
      if (query_units == dim_units_) return;
      Clear(keys_, kKeys * query_units);
      for (int64_t b = 0; b < kBlocks; ++b) {
        Clear(blocks_[b].queries + dim_units_ * kRows, (query_units - dim_units_) * kRows);
      }
    }
  }

  static void Clear(float* values, int64_t count) {
    for (int64_t i = 0; i < count; ++i) values[i] = 0;
  }

  int64_t HeadOf(int64_t row) const { return row / args_.queries; }
  int64_t QueryOf(int64_t row) const { return row % args_.queries; }
  const float* QueryRow(int64_t row) const {
    return AtByte(args_.q, HeadOf(row) * args_.q_head_bytes + QueryOf(row) * args_.q_row_bytes);
  }
  const float* MaskRow(int64_t row) const {
    return args_.mask + HeadOf(row) * args_.mask_head_stride + QueryOf(row) * args_.mask_query_stride;
  }

  // Loads up to kLanes values of each row at from(row) and transposes them: lanes[d] holds value d of all rows.
  template <typename From>
  static void LoadTransposed(int64_t rows, int64_t count, const From& from, Float (&lanes)[kLanes]) {
    if (rows >= kLanes && count >= kLanes) {
#pragma GCC unroll 16
      for (int64_t i = 0; i < kLanes; ++i) lanes[i] = Simd::Load(from(i));
    } else {
      for (int64_t i = 0; i < kLanes; ++i) lanes[i] = i < rows ? Simd::LoadSome(from(i), count) : Simd::Set(0.0f);
    }
    Simd::Transpose(lanes);
  }

  // Finds the keys that rows see.
  void FindSeen(Block& block) const {
    block.least_begin = block.most_begin = 0;
    block.least_seen = block.most_seen = args_.keys;
    for (int64_t i = 0; i < kRows; ++i) block.begin[i] = 0;
    for (int64_t i = 0; i < kRows; ++i) block.seen[i] = static_cast<float>(args_.keys);
    if (!args_.causal) return;
    block.least_begin = args_.keys;
    block.most_seen = 0;
    for (int64_t i = 0; i < block.rows; ++i) {
      const int64_t seen = QueryOf(block.first + i) + args_.keys - args_.queries + 1;
      const int64_t begin = args_.window > 0 && seen > args_.window ? seen - args_.window : 0;
      block.begin[i] = static_cast<float>(begin);
      block.seen[i] = static_cast<float>(seen);
      block.least_begin = begin < block.least_begin ? begin : block.least_begin;
      block.most_begin = begin > block.most_begin ? begin : block.most_begin;
      block.least_seen = seen < block.least_seen ? seen : block.least_seen;
      block.most_seen = seen > block.most_seen ? seen : block.most_seen;
    }
  }

  // A sink is a key before the others, whose value is 0. A sink of -Inf has weight 0.
  void AddSinks(Block& block) const {
    for (int64_t i = 0; i < block.rows; ++i) block.most[i] = args_.sinks[HeadOf(block.first + i)] * kLog2E;
    for (int64_t i = 0; i < block.rows; i += kLanes) {
      const Float sink = Simd::Load(block.most + i), most = Simd::Max(sink, Simd::Set(kLowest));
      Simd::Store(block.sum + i, Simd::Exp2(Simd::Subtract(sink, most)));
      Simd::Store(block.most + i, most);
    }
  }

  // Returns the first key of the first block of keys that a row sees.
  static int64_t FirstKeys(const Block& block) { return block.least_begin / kKeys * kKeys; }

  void Begin(Block& block, int64_t first, int64_t rows) const {
    block.first = first;
    block.rows = rows;
    FindSeen(block);
    for (int64_t i = 0; i < kRows; ++i) block.most[i] = kLowest;
    for (int64_t i = 0; i < kRows; ++i) block.sum[i] = 0;
    if (args_.sinks != nullptr) AddSinks(block);
    const Float factor = Simd::Set(args_.scale * kLog2E);
    for (int64_t lane = 0; lane < rows; lane += kLanes) {
      const float* from[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) from[i] = lane + i < rows ? QueryRow(first + lane + i) : nullptr;
      constexpr int64_t kParts = kLanes < kPair ? kPair : 1;
      for (int64_t d = 0; d < args_.head_dim; d += kParts * kLanes) {
        Float columns[kParts][kLanes];
        for (int64_t part = 0; part < kParts; ++part) {
          const int64_t begin = d + part * kLanes;
          LoadTransposed(
              rows - lane, args_.head_dim - begin, [&](int64_t i) { return from[i] + begin; }, columns[part]);
        }
        const auto scaled = [&](int64_t i) { return Simd::Multiply(columns[i / kLanes][i % kLanes], factor); };
#pragma GCC unroll 16
        for (int64_t i = 0; i < kParts * kLanes; i += kPair) {
          if (d + i >= args_.head_dim) break;
          Simd::StorePair(block.queries + (d + i) / kUnit * kRows + lane, kRows, scaled(i), scaled(i + kPair - 1));
        }
      }
    }
  }

  void CopyKeysAndValues(int64_t first, int64_t keys) const {
    const int64_t stride = PaddedKeyUnits(args_.head_dim);
    for (int64_t j = 0; j < keys; ++j) {
      const float* from = AtByte(args_.k, (first + j) * args_.k_row_bytes);
      for (int64_t d = 0; d < RoundUp(args_.head_dim, kPair); d += kLanes) {
        Simd::StoreRow(keys_ + j * stride, d, Simd::LoadSome(from + d, args_.head_dim - d));
      }
    }
    if constexpr (kInTiles) return CopyValuesTransposed(first, keys);
    for (int64_t j = 0; j < keys; j += kPair) {
      const float* a = AtByte(args_.v, (first + j) * args_.v_row_bytes);
      const float* b = AtByte(args_.v, (first + j + kPair - 1) * args_.v_row_bytes);
      const bool pair = j + kPair - 1 < keys;
      for (int64_t d = 0; d < args_.head_dim; d += kLanes) {
        const Float first_key = Simd::LoadSome(a + d, args_.head_dim - d);
        const Float second_key = pair ? Simd::LoadSome(b + d, args_.head_dim - d) : Simd::Set(0.0f);
        Simd::StorePair(values_ + j / kUnit * padded_dim_ + d, padded_dim_, first_key, second_key);
      }
    }
  }

  void CopyValuesTransposed(int64_t first, int64_t keys) const {
    const auto row = [&](int64_t j, int64_t d) {
      if (j >= keys) return Simd::Set(0.0f);
      return Simd::LoadSome(AtByte(args_.v, (first + j) * args_.v_row_bytes) + d, args_.head_dim - d);
    };
    for (int64_t j = 0; j < keys; j += kUnit * kLanes) {
      for (int64_t d = 0; d < padded_dim_; d += kLanes) {
        Float units[kLanes];
        for (int64_t i = 0; i < kLanes; ++i) {
          units[i] = Simd::PackUnits(row(j + kUnit * i, d), row(j + kUnit * i + 1, d));
        }
        Simd::Transpose(units);
        for (int64_t i = 0; i < kLanes; ++i) Simd::Store(values_ + (d + i) * kKeyUnits + j / kUnit, units[i]);
      }
    }
  }

  // Converts a mask to powers of two. The lowest and the largest float are kept: times log2(e) they would become Inf.
  static Float InPowersOfTwo(Float mask) {
    const Float powers = Simd::SelectLess(Simd::Set(0x1p126f), mask, mask, Simd::Multiply(mask, Simd::Set(kLog2E)));
    return Simd::SelectLess(mask, Simd::Set(-0x1p126f), mask, powers);
  }

  // Fills bias_ for a mask that is the same for all rows: one value per key.
  void FillBias(int64_t first, int64_t keys) const {
    for (int64_t j = 0; j < keys; ++j) bias_[j] = 0;
    if (args_.mask == nullptr || !MaskIsByKey()) return;
    for (int64_t j = 0; j < keys; ++j) bias_[j] = args_.mask[(first + j) * args_.mask_key_stride];
    for (int64_t j = 0; j < keys; j += kLanes) {
      Simd::Store(bias_ + j, InPowersOfTwo(Simd::Load(bias_ + j)));
    }
  }

  // If scores are capped, the mask is added afterwards, so bias_ is 0.
  bool MaskIsByKey() const { return args_.mask_head_stride == 0 && args_.mask_query_stride == 0 && args_.softcap == 0; }

  // Calls use(score, mask) for all vectors of scores, with the mask in powers of two.
  template <typename Use>
  void WithMask(const Block& block, int64_t first, int64_t keys, const Use& use) const {
    const bool by_row = args_.mask != nullptr && !MaskIsByKey();
    for (int64_t lane = 0; lane < block.rows; lane += kLanes) {
      for (int64_t j = 0; j < keys; j += kLanes) {
        const int64_t count = keys - j < kLanes ? keys - j : kLanes;
        Float columns[kLanes];
        if (by_row && args_.mask_key_stride == 1) {
          LoadTransposed(
              block.rows - lane, count, [&](int64_t i) { return MaskRow(block.first + lane + i) + first + j; },
              columns);
        } else if (by_row) {
          float rows[kLanes] = {};
          for (int64_t i = 0; i < kLanes && lane + i < block.rows; ++i) rows[i] = *MaskRow(block.first + lane + i);
          for (int64_t i = 0; i < kLanes; ++i) columns[i] = Simd::Load(rows);
        }
        for (int64_t i = 0; i < count; ++i) {
          use(scores_ + (j + i) * kRows + lane, by_row ? InPowersOfTwo(columns[i]) : Simd::Set(bias_[j + i]));
        }
      }
    }
  }

  // Initializes the scores with the mask, to which q . k is then added.
  void FillScores(const Block& block, int64_t first, int64_t keys) const {
    WithMask(block, first, keys, [](float* score, Float mask) { Simd::Store(score, mask); });
  }

  // Caps the scores q . k and adds the mask.
  [[gnu::noinline]] void CapScores(const Block& block, int64_t first, int64_t keys) const {
    const Softcap<Simd> cap(args_.softcap);
    WithMask(block, first, keys,
             [cap](float* score, Float mask) { Simd::Store(score, Simd::Add(cap.Of(Simd::Load(score)), mask)); });
  }

  // Returns the scores of a key, with -Inf in rows from which the causal mask or the window hides it. Applied after the
  // mask is added: +Inf plus -Inf would be NaN.
  static Float OfSeen(const Block& block, int64_t key, int64_t row, Float score) {
    const Float at = Simd::Set(static_cast<float>(key)), hidden = Simd::Set(kMinusInfinity);
    const Float shown = Simd::SelectLess(at, Simd::Load(block.begin + row), hidden, score);
    return Simd::SelectLess(at, Simd::Load(block.seen + row), shown, hidden);
  }

  // Computes the scores of kTileKeys keys from `key` on for kTileVectors vectors of rows. kFilled: the scores already
  // hold the mask; otherwise bias_ does.
  template <int kTileVectors, int kTileKeys, bool kFilled>
  void ScoreTile(const Block& block, int64_t first, int64_t key, Float (&most)[kTileVectors]) const {
    const int64_t stride = PaddedKeyUnits(args_.head_dim);
    const float* keys = keys_ + key * stride;
    Float sum[kTileKeys][kTileVectors];
#pragma GCC unroll 16
    for (int j = 0; j < kTileKeys; ++j) {
#pragma GCC unroll 4
      for (int i = 0; i < kTileVectors; ++i) sum[j][i] = Simd::Set(0.0f);
    }
    const float* queries = block.queries;
    for (int64_t d = 0; d < dim_units_; ++d, queries += kRows) {
      Float query[kTileVectors];
#pragma GCC unroll 4
      for (int i = 0; i < kTileVectors; ++i) query[i] = Simd::Load(queries + i * kLanes);
#pragma GCC unroll 16
      for (int j = 0; j < kTileKeys; ++j) {
        const Float value = Simd::Set(keys[j * stride + d]);
#pragma GCC unroll 4
        for (int i = 0; i < kTileVectors; ++i) sum[j][i] = Simd::MultiplyAddUnits(query[i], value, sum[j][i]);
      }
    }
#pragma GCC unroll 16
    for (int j = 0; j < kTileKeys; ++j) {
      float* to = scores_ + (key + j) * kRows;
#pragma GCC unroll 4
      for (int i = 0; i < kTileVectors; ++i) {
        const Float bias = kFilled ? Simd::Load(to + i * kLanes) : Simd::Set(bias_[key + j]);
        Float score = Simd::Add(sum[j][i], bias);
        if constexpr (kFilled) score = OfSeen(block, first + key + j, i * kLanes, score);
        most[i] = Simd::Max(score, most[i]);
        Simd::Store(to + i * kLanes, score);
      }
    }
  }

  template <int kTileVectors, bool kFilled>
  void ScoreInTiles(const Block& block, int64_t first, int64_t keys, Float (&most)[kTileVectors]) const {
    const int64_t stride = PaddedKeyUnits(args_.head_dim);
    Simd::template MultiplyTiles<!kFilled>({keys_, stride}, {block.queries, kRows}, {scores_, kRows}, keys,
                                           kTileVectors * kLanes, stride);
    FindMost<kTileVectors, kFilled>(block, first, keys, most);
  }

  // Raises `most` to the largest score of each row. kHides: applies the causal mask first.
  template <int kTileVectors, bool kHides>
  void FindMost(const Block& block, int64_t first, int64_t keys, Float (&most)[kTileVectors]) const {
    for (int64_t j = 0; j < keys; ++j) {
#pragma GCC unroll 4
      for (int i = 0; i < kTileVectors; ++i) {
        float* to = scores_ + j * kRows + i * kLanes;
        if constexpr (kHides) Simd::Store(to, OfSeen(block, first + j, i * kLanes, Simd::Load(to)));
        most[i] = Simd::Max(Simd::Load(to), most[i]);
      }
    }
  }

  template <int kTileVectors, bool kFilled>
  void ScoreByVectors(const Block& block, int64_t first, int64_t keys, Float (&most)[kTileVectors]) const {
    constexpr int kTileKeys = Registers::kScoreKeys[kTileVectors - 1];
    int64_t key = 0;
    for (; key + kTileKeys <= keys; key += kTileKeys) {
      ScoreTile<kTileVectors, kTileKeys, kFilled>(block, first, key, most);
    }
    if constexpr (constexpr int kRest = kKeys % kTileKeys; kRest > 1) {
      for (; key + kRest <= keys; key += kRest) ScoreTile<kTileVectors, kRest, kFilled>(block, first, key, most);
    }
    for (; key < keys; ++key) ScoreTile<kTileVectors, 1, kFilled>(block, first, key, most);
  }

  // Computes the scores of a block of keys from `first` on, then the probabilities, not yet divided by their sum.
  template <int kTileVectors, bool kFilled>
  void Score(Block& block, int64_t first, int64_t keys) const {
    Float most[kTileVectors];
#pragma GCC unroll 4
    for (int i = 0; i < kTileVectors; ++i) most[i] = Simd::Load(block.most + i * kLanes);
    if constexpr (kInTiles) {
      ScoreInTiles<kTileVectors, kFilled>(block, first, keys, most);
    } else {
      ScoreByVectors<kTileVectors, kFilled>(block, first, keys, most);
    }
    if (!kFilled && args_.softcap != 0) {
      CapScores(block, first, keys);
#pragma GCC unroll 4
      for (int i = 0; i < kTileVectors; ++i) most[i] = Simd::Load(block.most + i * kLanes);
      FindMost<kTileVectors, true>(block, first, keys, most);
    }
    Float sum[kTileVectors];
#pragma GCC unroll 4
    for (int i = 0; i < kTileVectors; ++i) {
      const Float correction = Simd::Exp2(Simd::Subtract(Simd::Load(block.most + i * kLanes), most[i]));
      Simd::Store(block.most + i * kLanes, most[i]);
      Simd::Store(block.correction + i * kLanes, correction);
      sum[i] = Simd::Multiply(Simd::Load(block.sum + i * kLanes), correction);
    }
    for (int64_t j = 0; j < keys; j += kPair) {
#pragma GCC unroll 4
      for (int i = 0; i < kTileVectors; ++i) {
        const float* from = scores_ + j * kRows + i * kLanes;
        const Float a = Simd::Exp2(Simd::Subtract(Simd::Load(from), most[i]));
        Float b = a;
        sum[i] = Simd::Add(sum[i], a);
        if constexpr (kPair == 2) {
          b = Simd::Set(0.0f);
          if (j + 1 < keys) b = Simd::Exp2(Simd::Subtract(Simd::Load(from + kRows), most[i]));
          sum[i] = Simd::Add(sum[i], b);
        }
        // If a weight is NaN, so are the sum and y of its row, whatever StoreWeights stores.
        Simd::StoreWeights(scores_ + j / kUnit * kRows + i * kLanes, kRows, a, b);
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < kTileVectors; ++i) Simd::Store(block.sum + i * kLanes, sum[i]);
  }

  // out = out correction + probabilities values, for all rows, with AMX tiles.
  template <int kTileVectors, bool kFirst>
  void AddValuesInTiles(const Block& block, int64_t keys) const {
    const int64_t units = RoundUp(keys, kPair) / kUnit, whole = RoundUp(units, kTileUnits);
    for (int64_t j = units; j < whole; ++j) {
      for (int i = 0; i < kTileVectors; ++i) Simd::Store(scores_ + j * kRows + i * kLanes, Simd::Set(0.0f));
    }
    if constexpr (!kFirst) {
      for (int i = 0; i < kTileVectors; ++i) {
        const Float correction = Simd::Load(block.correction + i * kLanes);
        if (Simd::NonZero(Simd::Subtract(correction, Simd::Set(1.0f))) == 0) continue;
        for (int64_t d = 0; d < padded_dim_; ++d) {
          float* out = block.out + d * kRows + i * kLanes;
          Simd::Store(out, Simd::Multiply(Simd::Load(out), correction));
        }
      }
    }
    Simd::template MultiplyTiles<kFirst>({values_, kKeyUnits}, {scores_, kRows}, {block.out, kRows}, padded_dim_,
                                         kTileVectors * kLanes, whole);
  }

  // out = out correction + probabilities values, for kTileRows rows from `row` on and kTileVectors vectors of values
  // from `d` on. kFirst: out is uninitialized.
  template <int kTileRows, int kTileVectors, bool kFirst>
  void AddValuesTile(const Block& block, int64_t row, int64_t units, int64_t d) const {
    float* out = block.out + row * padded_dim_ + d;
    Float sum[kTileRows][kTileVectors];
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) {
      [[maybe_unused]] const Float correction = Simd::Set(block.correction[row + r]);
#pragma GCC unroll 4
      for (int i = 0; i < kTileVectors; ++i) {
        sum[r][i] = Simd::Set(0.0f);
        if constexpr (!kFirst) sum[r][i] = Simd::Multiply(Simd::Load(out + r * padded_dim_ + i * kLanes), correction);
      }
    }
    const float* probabilities = scores_ + row;
    const float* values = values_ + d;
    for (int64_t j = 0; j < units; ++j, probabilities += kRows, values += padded_dim_) {
      Float value[kTileVectors];
#pragma GCC unroll 4
      for (int i = 0; i < kTileVectors; ++i) value[i] = Simd::Load(values + i * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < kTileRows; ++r) {
        const Float probability = Simd::Set(probabilities[r]);
#pragma GCC unroll 4
        for (int i = 0; i < kTileVectors; ++i) sum[r][i] = Simd::MultiplyAddUnits(value[i], probability, sum[r][i]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) {
#pragma GCC unroll 4
      for (int i = 0; i < kTileVectors; ++i) Simd::Store(out + r * padded_dim_ + i * kLanes, sum[r][i]);
    }
  }

  template <int kTileVectors, bool kFirst>
  void AddValues(const Block& block, int64_t keys, int64_t d) const {
    constexpr int kTileRows = Registers::kValueRows[kTileVectors - 1], kRest = kRows % kTileRows;
    const int64_t units = RoundUp(keys, kPair) / kUnit;
    int64_t row = 0;
    for (; row < block.rows && row + kTileRows <= kRows; row += kTileRows) {
      AddValuesTile<kTileRows, kTileVectors, kFirst>(block, row, units, d);
    }
    if constexpr (kRest > 0) {
      if (row < block.rows) AddValuesTile<kRest, kTileVectors, kFirst>(block, row, units, d);
    }
  }

  template <int kTileVectors>
  void Attend(Block& block, int64_t first, int64_t keys) const {
    const bool by_row = args_.mask != nullptr && !MaskIsByKey();
    const bool hides = args_.causal && (block.least_seen < first + keys || block.most_begin > first);
    if (args_.softcap == 0 && (by_row || hides || (kInTiles && args_.mask != nullptr))) {
      FillScores(block, first, keys);
      Score<kTileVectors, true>(block, first, keys);
    } else {
      Score<kTileVectors, false>(block, first, keys);
    }
    if constexpr (kInTiles) {
      if (first == FirstKeys(block)) return AddValuesInTiles<kTileVectors, true>(block, keys);
      AddValuesInTiles<kTileVectors, false>(block, keys);
    } else {
      if (first == FirstKeys(block)) return AddValues<true>(block, keys);
      AddValues<false>(block, keys);
    }
  }

  template <bool kFirst>
  void AddValues(const Block& block, int64_t keys) const {
    int64_t d = 0;
    for (; d + kVectors * kLanes <= padded_dim_; d += kVectors * kLanes) {
      AddValues<kVectors, kFirst>(block, keys, d);
    }
    if constexpr (kVectors > 3) {
      if (padded_dim_ - d == 3 * kLanes) return AddValues<3, kFirst>(block, keys, d);
    }
    if constexpr (kVectors > 2) {
      if (padded_dim_ - d == 2 * kLanes) return AddValues<2, kFirst>(block, keys, d);
    }
    if (d < padded_dim_) AddValues<1, kFirst>(block, keys, d);
  }

  void AttendRows(Block& block, int64_t first, int64_t keys) const {
    if constexpr (kVectors > 3) {
      if (block.rows > 3 * kLanes) return Attend<4>(block, first, keys);
    }
    if constexpr (kVectors > 2) {
      if (block.rows > 2 * kLanes) return Attend<3>(block, first, keys);
    }
    if (block.rows > kLanes) return Attend<2>(block, first, keys);
    Attend<1>(block, first, keys);
  }

  void Write(Block& block) const {
    float* factors = block.correction;
    for (int64_t i = 0; i < block.rows; i += kLanes) {
      Simd::Store(factors + i, Simd::Divide(Simd::Set(1.0f), Simd::Load(block.sum + i)));
    }
    if constexpr (kInTiles) return WriteTransposed(block);
    for (int64_t i = 0; i < block.rows; ++i) {
      const int64_t row = block.first + i;
      float* y = AtByte(args_.y, HeadOf(row) * args_.y_head_bytes + QueryOf(row) * args_.y_row_bytes);
      const float* out = block.out + i * padded_dim_;
      const Float factor = Simd::Set(factors[i]);
      const bool hidden = args_.zero_hidden_rows && !(block.sum[i] > 0);
      for (int64_t d = 0; d < args_.head_dim; d += kLanes) {
        // Adding +0 turns -0 into +0: the sign of a zero could depend on the other rows of the block.
        const Float zero = Simd::Set(0.0f);
        const Float value = hidden ? zero : Simd::MultiplyAdd(Simd::Load(out + d), factor, zero);
        Simd::StoreSome(y + d, args_.head_dim - d, value);
      }
    }
  }

  void WriteTransposed(const Block& block) const {
    for (int64_t lane = 0; lane < block.rows; lane += kLanes) {
      const Float factor = Simd::Load(block.correction + lane);
      for (int64_t d = 0; d < args_.head_dim; d += kLanes) {
        Float columns[kLanes];
        for (int64_t i = 0; i < kLanes; ++i) {
          columns[i] = Simd::MultiplyAdd(Simd::Load(block.out + (d + i) * kRows + lane), factor, Simd::Set(0.0f));
        }
        Simd::Transpose(columns);
        for (int64_t i = 0; i < kLanes && lane + i < block.rows; ++i) {
          const int64_t row = block.first + lane + i;
          float* y = AtByte(args_.y, HeadOf(row) * args_.y_head_bytes + QueryOf(row) * args_.y_row_bytes);
          const bool hidden = args_.zero_hidden_rows && !(block.sum[lane + i] > 0);
          Simd::StoreSome(y + d, args_.head_dim - d, hidden ? Simd::Set(0.0f) : columns[i]);
        }
      }
    }
  }

 public:
  static int64_t ScratchBytes(int64_t head_dim) {
    const int64_t padded_dim = RoundUp(head_dim, kLanes);
    const int64_t floats = kKeys * kRows + kKeys * PaddedKeyUnits(head_dim) + kKeyUnits * padded_dim + kKeys +
                           kBlocks * kRows * (QueryUnits(head_dim) + padded_dim) + 6 * kAligned;
    return floats * static_cast<int64_t>(sizeof(float)) + kBlocks * static_cast<int64_t>(sizeof(Block));
  }

  static void Run(const AttentionArgs& args, int64_t row_begin, int64_t row_end, void* scratch) {
    if constexpr (Simd::kFlushes) {
      const simd::DenormalRule rule = simd::FlushDenormals();
      RunRows(args, row_begin, row_end, scratch);
      simd::RestoreDenormals(rule);
    } else {
      RunRows(args, row_begin, row_end, scratch);
    }
  }

 private:
  static void RunRows(const AttentionArgs& args, int64_t row_begin, int64_t row_end, void* scratch) {
    const AttentionLoop loop(args, scratch);
    if constexpr (kInTiles) Simd::StartTiles();
    const int64_t blocks = (row_end - row_begin + kRows - 1) / kRows;
    int64_t begin = args.keys, keys = 0;  // at least one row sees keys begin … keys - 1
    for (int64_t b = 0; b < blocks; ++b) {
      Block& block = loop.blocks_[b];
      const int64_t first = row_begin + b * kRows;
      loop.Begin(block, first, row_end - first < kRows ? row_end - first : kRows);
      begin = FirstKeys(block) < begin ? FirstKeys(block) : begin;
      keys = block.most_seen > keys ? block.most_seen : keys;
    }
    for (int64_t first = begin; first < keys; first += kKeys) {
      const int64_t count = keys - first < kKeys ? keys - first : kKeys;
      loop.CopyKeysAndValues(first, count);
      loop.FillBias(first, count);
      for (int64_t b = 0; b < blocks; ++b) {
        Block& block = loop.blocks_[b];
        if (FirstKeys(block) <= first && first < block.most_seen) loop.AttendRows(loop.blocks_[b], first, count);
      }
    }
    if constexpr (kInTiles) Simd::EndTiles();
    for (int64_t b = 0; b < blocks; ++b) loop.Write(loop.blocks_[b]);
  }
};

}  // namespace
}  // namespace ortolan
