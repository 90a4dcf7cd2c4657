// The kernels of all tiers, written over a block of 16 floats: x86_*.cc and masked_matmul.cc say what a Block is and
// include this. Local to each file that includes it; nothing of the standard library that is a function is used.
//
//     struct Block { using Vector; using Scalar; Zero, Load, LoadFirst, Store, StoreFirst, Add, Broadcast,
//                    MultiplyAdd(Scalar, Vector, Vector), Bits (which of the 16 are not zero), HasNan,
//                    LoadBf16, LoadInt8 }
#pragma once

#include <cstdint>

#include "masked_matmul/masked_matmul.h"

namespace ortolan {
namespace {

#if defined(__GNUC__) && !defined(__clang__)
#define ORTOLAN_UNROLL _Pragma("GCC unroll 32")
#else
#define ORTOLAN_UNROLL _Pragma("clang loop unroll(full)")
#endif

template <typename T>
T* AtByte(T* from, int64_t bytes) {
  return reinterpret_cast<T*>(const_cast<char*>(reinterpret_cast<const char*>(from)) + bytes);
}

// ---- patterns -------------------------------------------------------------------------------------------------------

template <typename Block>
bool ScanRows(const FloatRows& a, uint64_t* mask) {
  using Vector = typename Block::Vector;
  // A sum of products with zero is NaN once a number is not finite.
  Vector finite = Block::Zero();
  const typename Block::Scalar zero = Block::Set(0.0f);
  for (int64_t word = 0; word < MaskWords(a.columns); ++word) {
    uint64_t bits = 0;
    for (int64_t part = 0; part < kMaskBits / kBlockColumns; ++part) {
      const int64_t first = word * kMaskBits + part * kBlockColumns;
      const int64_t left = a.columns - first;
      if (left <= 0) break;
      uint64_t any = 0;
      for (int64_t i = 0; i < a.rows; ++i) {
        const float* from = a.Row(i) + first;
        const Vector v = left >= kBlockColumns ? Block::Load(from) : Block::LoadFirst(from, left);
        finite = Block::MultiplyAdd(zero, v, finite);
        any |= Block::Bits(v);
      }
      bits |= any << (part * kBlockColumns);
    }
    mask[word] = bits;
  }
  return !Block::HasNan(finite);
}

template <typename Block>
bool ScanBlocks(const FloatRows& b, uint64_t* masks, int64_t stride) {
  using Vector = typename Block::Vector;
  Vector finite = Block::Zero();
  const typename Block::Scalar zero = Block::Set(0.0f);
  const int64_t panels = BlockPanels(b.columns);
  const int64_t whole = b.columns / kBlockColumns;
  for (int64_t panel = 0; panel < panels; ++panel) masks[panel * stride] = 0;
  for (int64_t i = 0; i < b.rows; ++i) {
    const float* from = b.Row(i);
    for (int64_t panel = 0; panel < whole; ++panel) {
      const Vector v = Block::Load(from + panel * kBlockColumns);
      finite = Block::MultiplyAdd(zero, v, finite);
      masks[panel * stride] |= static_cast<uint64_t>(Block::Bits(v) != 0) << i;
    }
    if (whole < panels) {
      const Vector v = Block::LoadFirst(from + whole * kBlockColumns, b.columns - whole * kBlockColumns);
      finite = Block::MultiplyAdd(zero, v, finite);
      masks[whole * stride] |= static_cast<uint64_t>(Block::Bits(v) != 0) << i;
    }
  }
  return !Block::HasNan(finite);
}

// ---- packing --------------------------------------------------------------------------------------------------------

// Panel by panel: the rows' loads jump, but the number of blocks, and not each bit, is what a branch must guess.
template <typename Block>
void PackBlocks(const PackBlocksArgs& args) {
  const int64_t panels = BlockPanels(args.b.columns);
  for (int64_t panel = 0; panel < panels; ++panel) {
    const int64_t column = panel * kBlockColumns;
    const int64_t left = args.b.columns - column;
    int64_t place = args.places[panel];
    for (uint64_t bits = args.masks[panel * args.stride]; bits != 0; bits &= bits - 1, ++place) {
      const int64_t i = __builtin_ctzll(bits);
      const float* from = args.b.Row(i) + column;
      const uint32_t row = args.first_row + static_cast<uint32_t>(i);
      Block::Store(args.values + place * kBlockColumns,
                   left >= kBlockColumns ? Block::Load(from) : Block::LoadFirst(from, left));
      if (args.ranks == nullptr) {
        args.inputs[place] = row;
      } else {
        args.ranks[panel * args.ranks_row + row] = static_cast<uint16_t>(place - args.starts[panel]);
      }
    }
    args.places[panel] = place;
  }
}

// A piece of a few rows after another: many streams at a time would be too many for the processor to foresee.
template <typename Block, int kRows>
bool PackTile(const FloatRows& a, float* tile) {
  static_assert(kRows % 4 == 0);
  constexpr int64_t kPiece = 128;
  // As in ScanRows.
  typename Block::Vector finite = Block::Zero();
  float finite_rest = 0.0f;
  const typename Block::Scalar zero = Block::Set(0.0f);
  int64_t l = 0;
  if (a.rows == kRows) {
    for (; l + kBlockColumns <= a.columns;) {
      const int64_t whole = (a.columns - l) / kBlockColumns * kBlockColumns;
      const int64_t end = l + (whole < kPiece ? whole : kPiece);
      for (int i = 0; i < kRows; i += 4) {
        for (int64_t from = l; from < end; from += kBlockColumns) {
          for (int r = 0; r < 4; ++r) {
            __builtin_prefetch(a.Row(i + r) + from + kPiece);
            finite = Block::MultiplyAdd(zero, Block::Load(a.Row(i + r) + from), finite);
          }
          Block::Transpose4x16(a.Row(i) + from, a.row_bytes, tile + from * kRows + i, kRows);
        }
      }
      l = end;
    }
  }
  for (; l < a.columns; ++l) {
    for (int64_t i = 0; i < kRows; ++i) {
      const float number = i < a.rows ? a.Row(i)[l] : 0.0f;
      finite_rest += 0.0f * number;
      tile[l * kRows + i] = number;
    }
  }
  for (int64_t i = 0; i < kRows; ++i) tile[a.columns * kRows + i] = 0.0f;
  return !Block::HasNan(finite) && finite_rest == 0.0f;
}

// ---- products -------------------------------------------------------------------------------------------------------

// The sums of a tile. kChains: how many products of a row are under way at a time.
template <typename Block, int kRows, int kChains>
struct TileSums {
  using Vector = typename Block::Vector;
  Vector sums[kChains][kRows];

  TileSums() {
    ORTOLAN_UNROLL
    for (int chain = 0; chain < kChains; ++chain) {
      ORTOLAN_UNROLL
      for (int i = 0; i < kRows; ++i) sums[chain][i] = Block::Zero();
    }
  }

  template <int kChain>
  void Add(const float* activations, const float* block) {
    const Vector v = Block::Load(block);
    ORTOLAN_UNROLL
    for (int i = 0; i < kRows; ++i) {
      sums[kChain][i] = Block::MultiplyAdd(Block::Broadcast(activations + i), v, sums[kChain][i]);
    }
  }

  void Store(const TileArgs& args) {
    ORTOLAN_UNROLL
    for (int i = 0; i < kRows; ++i) {
      Vector sum = sums[0][i];
      ORTOLAN_UNROLL
      for (int chain = 1; chain < kChains; ++chain) sum = Block::Add(sum, sums[chain][i]);
      if (i >= args.rows) continue;
      float* y = AtByte(args.y, i * args.y_row_bytes);
      if (args.columns == kBlockColumns) {
        Block::Store(y, args.add ? Block::Add(sum, Block::Load(y)) : sum);
      } else {
        Block::StoreFirst(y, args.columns, args.add ? Block::Add(sum, Block::LoadFirst(y, args.columns)) : sum);
      }
    }
  }
};

// As many chains as there are registers for, where the rows alone do not hide the latency.
template <typename Block, int kRows>
constexpr int Chains() {
  return kRows * Block::kVectorsABlock < 8 ? 2 : 1;
}

// kBlocks x 16 rows of a tile by a panel. A register holds 16 rows of an input, and a number of B is multiplied with
// all of them: for each load there are kColumns x kBlocks / (kColumns + kBlocks) products, where a register of a block
// of B would leave one. sums of a few columns at a time; y is brought into rows at the end.
template <typename Block, int kTileRows, int kBlocks>
void MultiplyTileBlocks(const TileArgs& args) {
  using Vector = typename Block::Vector;
  constexpr int kColumns = Block::kTileColumns;
  constexpr int kRows = kBlocks * kBlockColumns;
  alignas(64) float rows[kRows][kBlockColumns];
  for (int64_t i = 0; i < args.rows; ++i) __builtin_prefetch(AtByte(args.y, i * args.y_row_bytes), 1);
  for (int column = 0; column < kBlockColumns; column += kColumns) {
    Vector sums[kColumns][kBlocks];
    ORTOLAN_UNROLL
    for (int j = 0; j < kColumns; ++j) {
      ORTOLAN_UNROLL
      for (int r = 0; r < kBlocks; ++r) sums[j][r] = Block::Zero();
    }
    const float* block = args.values + column;
    const auto add = [&](uint64_t input) __attribute__((always_inline)) {
      const float* from = args.tile + input * kTileRows;
      Vector a[kBlocks];
      ORTOLAN_UNROLL
      for (int r = 0; r < kBlocks; ++r) {
        a[r] = Block::Load(from + r * kBlockColumns);
        Block::Keep(a[r]);
      }
      ORTOLAN_UNROLL
      for (int j = 0; j < kColumns; ++j) {
        auto b = Block::Broadcast(block + j);
        Block::Keep(b);
        ORTOLAN_UNROLL
        for (int r = 0; r < kBlocks; ++r) sums[j][r] = Block::MultiplyAdd(b, a[r], sums[j][r]);
      }
      block += kBlockColumns;
    };
    // Two inputs a load: a load of an index costs as much as one of a vector.
    for (int64_t q = 0; q < args.count; q += 2) {
      uint64_t pair;
      __builtin_memcpy(&pair, args.inputs + q, sizeof(pair));
      add(pair & 0xffffffffu);
      add(pair >> 32);
    }
    ORTOLAN_UNROLL
    for (int r = 0; r < kBlocks; ++r) {
      alignas(64) float columns[kColumns][kBlockColumns];
      ORTOLAN_UNROLL
      for (int j = 0; j < kColumns; ++j) Block::Store(columns[j], sums[j][r]);
      for (int j = 0; j < kColumns; j += 4) {
        Block::Transpose4x16(columns[j], sizeof(columns[j]), &rows[r * kBlockColumns][column + j], kBlockColumns);
      }
    }
  }
  for (int64_t i = 0; i < args.rows; ++i) {
    float* y = AtByte(args.y, i * args.y_row_bytes);
    const Vector sum = Block::Load(rows[i]);
    if (args.columns == kBlockColumns) {
      Block::Store(y, args.add ? Block::Add(sum, Block::Load(y)) : sum);
    } else {
      Block::StoreFirst(y, args.columns, args.add ? Block::Add(sum, Block::LoadFirst(y, args.columns)) : sum);
    }
  }
}

template <typename Block, int kTileRows>
void MultiplyTile(const TileArgs& args) {
  constexpr int kMost = kTileRows / kBlockColumns;
  static_assert(kMost == 1 || kMost == 3);
  if (args.rows <= kBlockColumns) return MultiplyTileBlocks<Block, kTileRows, 1>(args);
  if (args.rows <= 2 * kBlockColumns) return MultiplyTileBlocks<Block, kTileRows, kMost == 1 ? 1 : 2>(args);
  MultiplyTileBlocks<Block, kTileRows, kMost>(args);
}

template <typename Block, int kRows>
void MultiplySparseTile(const SparseTileArgs& args) {
  constexpr int kChains = Chains<Block, kRows>();
  const int64_t count = Block::ListBits(args.tile_mask, args.panel_mask, MaskWords(args.k), args.list);
  for (int i = 0; i < 4; ++i) args.list[count + i] = static_cast<uint16_t>(args.k);
  TileSums<Block, kRows, kChains> sums;
  for (int64_t q = 0; q < count; q += 4) {
    uint64_t four;
    __builtin_memcpy(&four, args.list + q, sizeof(four));
    const uint64_t l[] = {four & 0xffff, (four >> 16) & 0xffff, (four >> 32) & 0xffff, four >> 48};
    sums.template Add<0>(args.tile + l[0] * kRows, args.values + args.ranks[l[0]] * kBlockColumns);
    sums.template Add<kChains - 1>(args.tile + l[1] * kRows, args.values + args.ranks[l[1]] * kBlockColumns);
    sums.template Add<0>(args.tile + l[2] * kRows, args.values + args.ranks[l[2]] * kBlockColumns);
    sums.template Add<kChains - 1>(args.tile + l[3] * kRows, args.values + args.ranks[l[3]] * kBlockColumns);
  }
  sums.Store(args);
}

// The numbers of the bits set in both masks, as any CPU finds them.
inline int64_t ListBitsOneByOne(const uint64_t* a, const uint64_t* b, int64_t words, uint16_t* list) {
  int64_t count = 0;
  for (int64_t word = 0; word < words; ++word) {
    for (uint64_t bits = a[word] & b[word]; bits != 0; bits &= bits - 1) {
      list[count++] = static_cast<uint16_t>(word * kMaskBits + __builtin_ctzll(bits));
    }
  }
  return count;
}

}  // namespace
}  // namespace ortolan
