// The kernels that find patterns, pack, and multiply by tiles, over blocks of 16 floats. Included only by kernels.cc.
#pragma once

#include <cstdint>

#include "masked_matmul/masked_matmul.h"
#include "simd/at_byte.h"
#include "simd/columns.h"
#include "simd/target.h"

namespace ortolan {
namespace {

// 16 floats of a row, in registers.
using Block = simd::Columns<Simd>;
using Floats = Block::Floats;
static_assert(Block::kColumns == kBlockColumns);

constexpr bool kOneRegister = Block::kRegisters == 1;
constexpr int kTileRows = kOneRegister ? 48 : 16;
constexpr int kSparseTileRows = kOneRegister ? 8 : 4;

// Loads a block whose first `left` columns exist.
inline Floats LoadBlock(const float* from, int64_t left) {
  return left >= kBlockColumns ? Block::Load(from) : Block::LoadFirst(from, left);
}

// Adds 0 x values to the sum, which becomes NaN if a value is not finite.
inline Floats AddZeroTimes(const Floats& values, const Floats& sum) {
  return Block::MultiplyAdd(Simd::Set(0.0f), values, sum);
}

// Calls take<count>(first) to cover first … end-1: kMost at a time, then fewer for the rest.
template <int kMost, typename Take>
void TakeAll(int64_t first, int64_t end, const Take& take) {
  for (; first + kMost <= end; first += kMost) take.template operator()<kMost>(first);
  if constexpr (kMost > 1) {
    if (first < end) TakeAll<kMost - 1>(first, end, take);
  }
}

bool ScanRows(const FloatRows& a, uint64_t* mask) {
  Floats finite = Block::Set(0.0f);
  for (int64_t word = 0; word < MaskWords(a.columns); ++word) {
    uint64_t bits = 0;
    for (int64_t part = 0; part < kMaskBits / kBlockColumns; ++part) {
      const int64_t first = word * kMaskBits + part * kBlockColumns;
      const int64_t left = a.columns - first;
      if (left <= 0) break;
      uint64_t any = 0;
      for (int64_t i = 0; i < a.rows; ++i) {
        const Floats v = LoadBlock(a.Row(i) + first, left);
        finite = AddZeroTimes(v, finite);
        any |= Block::NonZero(v);
      }
      bits |= any << (part * kBlockColumns);
    }
    mask[word] = bits;
  }
  return !Block::HasNan(finite);
}

bool ScanBlocks(const FloatRows& b, uint64_t* masks, int64_t stride) {
  Floats finite = Block::Set(0.0f);
  const int64_t panels = BlockPanels(b.columns);
  const int64_t whole = b.columns / kBlockColumns;
  for (int64_t panel = 0; panel < panels; ++panel) masks[panel * stride] = 0;
  for (int64_t i = 0; i < b.rows; ++i) {
    const auto scan = [&](int64_t panel, const Floats& v) {
      finite = AddZeroTimes(v, finite);
      masks[panel * stride] |= static_cast<uint64_t>(Block::NonZero(v) != 0) << i;
    };
    const float* from = b.Row(i);
    for (int64_t panel = 0; panel < whole; ++panel) scan(panel, Block::Load(from + panel * kBlockColumns));
    if (whole < panels) {
      scan(whole, Block::LoadFirst(from + whole * kBlockColumns, b.columns - whole * kBlockColumns));
    }
  }
  return !Block::HasNan(finite);
}

// Packs panel by panel: loads jump between rows, but branches depend on the number of blocks, not on each bit.
void PackBlocks(const PackBlocksArgs& args) {
  const int64_t panels = BlockPanels(args.b.columns);
  for (int64_t panel = 0; panel < panels; ++panel) {
    const int64_t column = panel * kBlockColumns;
    int64_t slot = args.slots[panel];
    for (uint64_t bits = args.masks[panel * args.stride]; bits != 0; bits &= bits - 1, ++slot) {
      const int64_t i = __builtin_ctzll(bits);
      const uint32_t row = args.first_row + static_cast<uint32_t>(i);
      Block::Store(args.values + slot * kBlockColumns, LoadBlock(args.b.Row(i) + column, args.b.columns - column));
      if (args.ranks == nullptr) {
        args.inputs[slot] = row;
      } else {
        args.ranks[panel * args.ranks_row + row] = static_cast<uint16_t>(slot - args.starts[panel]);
      }
    }
    args.slots[panel] = slot;
  }
}

// Four rows at a time: the hardware prefetcher could not follow more streams.
template <int kRows>
bool PackTile(const FloatRows& a, float* tile) {
  static_assert(kRows % 4 == 0);
  constexpr int64_t kPiece = 128;
  constexpr int64_t kRowBytes = kRows * static_cast<int64_t>(sizeof(float));
  Floats finite = Block::Set(0.0f);
  float finite_rest = 0.0f;
  int64_t l = 0;
  if (a.rows == kRows) {
    for (; l + kBlockColumns <= a.columns;) {
      const int64_t whole = (a.columns - l) / kBlockColumns * kBlockColumns;
      const int64_t end = l + (whole < kPiece ? whole : kPiece);
      for (int i = 0; i < kRows; i += 4) {
        for (int64_t from = l; from < end; from += kBlockColumns) {
          for (int r = 0; r < 4; ++r) {
            __builtin_prefetch(a.Row(i + r) + from + kPiece);
            finite = AddZeroTimes(Block::Load(a.Row(i + r) + from), finite);
          }
          Block::Transpose4(a.Row(i) + from, a.row_bytes, tile + from * kRows + i, kRowBytes);
        }
      }
      l = end;
    }
  }
  for (; l < a.columns; ++l) {
    for (int64_t i = 0; i < kRows; ++i) {
      const float value = i < a.rows ? a.Row(i)[l] : 0.0f;
      finite_rest += 0.0f * value;
      tile[l * kRows + i] = value;
    }
  }
  for (int64_t i = 0; i < kRows; ++i) tile[a.columns * kRows + i] = 0.0f;
  return !Block::HasNan(finite) && finite_rest == 0.0f;
}

inline void StoreSum(const TileArgs& args, int64_t row, const Floats& sum) {
  float* y = AtByte(args.y, row * args.y_row_bytes);
  if (args.columns == kBlockColumns) {
    Block::Store(y, args.add ? Block::Add(sum, Block::Load(y)) : sum);
  } else {
    Block::StoreFirst(y, args.columns, args.add ? Block::Add(sum, Block::LoadFirst(y, args.columns)) : sum);
  }
}

// Computes the sums of kBlocks x 16 rows of a tile and kColumns columns of a panel, from `first` on, into `columns`. A
// register holds rows of an input, and each element of B is multiplied with all of them. Registers with blocks of B
// would need more loads per product.
template <int kColumns, int kBlocks>
void SumColumns(const TileArgs& args, int first, float (&columns)[kBlocks][kBlockColumns][kBlockColumns]) {
  Floats sums[kColumns][kBlocks];
#pragma GCC unroll 8
  for (int j = 0; j < kColumns; ++j) {
#pragma GCC unroll 4
    for (int r = 0; r < kBlocks; ++r) sums[j][r] = Block::Set(0.0f);
  }
  const float* block = args.values + first;
  const auto add = [&](uint64_t input) __attribute__((always_inline)) {
    const float* from = args.tile + input * kTileRows;
    Floats a[kBlocks];
#pragma GCC unroll 4
    for (int r = 0; r < kBlocks; ++r) a[r] = Block::Kept(Block::Load(from + r * kBlockColumns));
#pragma GCC unroll 8
    for (int j = 0; j < kColumns; ++j) {
      const auto b = Block::Kept(Simd::Set(block[j]));
#pragma GCC unroll 4
      for (int r = 0; r < kBlocks; ++r) sums[j][r] = Block::MultiplyAdd(b, a[r], sums[j][r]);
    }
    block += kBlockColumns;
  };
  // Loads two inputs at once: loading an index costs as much as loading a vector.
  for (int64_t q = 0; q < args.count; q += 2) {
    uint64_t pair;
    __builtin_memcpy(&pair, args.inputs + q, sizeof(pair));
    add(pair & 0xffffffffu);
    add(pair >> 32);
  }
#pragma GCC unroll 4
  for (int r = 0; r < kBlocks; ++r) {
#pragma GCC unroll 8
    for (int j = 0; j < kColumns; ++j) Block::Store(columns[r][first + j], sums[j][r]);
  }
}

// Multiplies kBlocks x 16 rows of a tile with a panel, a few columns at a time so that sums fit the registers, and
// transposes the sums into rows of y.
template <int kBlocks>
void MultiplyTileBlocks(const TileArgs& args) {
  constexpr int kRows = kBlocks * kBlockColumns;
  constexpr int64_t kRowBytes = kBlockColumns * static_cast<int64_t>(sizeof(float));
  alignas(64) float columns[kBlocks][kBlockColumns][kBlockColumns];
  alignas(64) float rows[kRows][kBlockColumns];
  for (int64_t i = 0; i < args.rows; ++i) __builtin_prefetch(AtByte(args.y, i * args.y_row_bytes), 1);
  const auto bring_into_rows = [&](int first, int end) {
    for (int r = 0; r < kBlocks; ++r) {
      for (int j = first; j < end; j += 4) {
        Block::Transpose4(columns[r][j], kRowBytes, &rows[r * kBlockColumns][j], kRowBytes);
      }
    }
  };
  if constexpr (Block::kRegisters == 2) {
    SumColumns<6>(args, 0, columns);
    SumColumns<6>(args, 6, columns);
    SumColumns<4>(args, 12, columns);
    bring_into_rows(0, kBlockColumns);
  } else {
    constexpr int kColumns = kOneRegister ? 8 : 4;
    for (int column = 0; column < kBlockColumns; column += kColumns) {
      SumColumns<kColumns>(args, column, columns);
      bring_into_rows(column, column + kColumns);
    }
  }
  for (int64_t i = 0; i < args.rows; ++i) StoreSum(args, i, Block::Load(rows[i]));
}

void MultiplyTile(const TileArgs& args) {
  constexpr int kMost = kTileRows / kBlockColumns;
  static_assert(kMost == 1 || kMost == 3);
  if (args.rows <= kBlockColumns) return MultiplyTileBlocks<1>(args);
  if (args.rows <= 2 * kBlockColumns) return MultiplyTileBlocks<kMost == 1 ? 1 : 2>(args);
  MultiplyTileBlocks<kMost>(args);
}

void MultiplySparseTile(const SparseTileArgs& args) {
  // Independent accumulators a row: two if the rows alone do not hide the latency of a multiply-add.
  constexpr int kChains = kSparseTileRows * Block::kRegisters < 8 ? 2 : 1;
  int64_t count = 0;
  for (int64_t word = 0; word < MaskWords(args.k); ++word) {
    count += Simd::ListBits(args.tile_mask[word] & args.panel_mask[word], static_cast<uint16_t>(word * kMaskBits),
                            args.list + count);
  }
  for (int i = 0; i < 4; ++i) args.list[count + i] = static_cast<uint16_t>(args.k);
  Floats sums[kChains][kSparseTileRows];
#pragma GCC unroll 8
  for (int i = 0; i < kSparseTileRows; ++i) {
#pragma GCC unroll 2
    for (int chain = 0; chain < kChains; ++chain) sums[chain][i] = Block::Set(0.0f);
  }
  for (int64_t q = 0; q < count; q += 4) {
    uint64_t four;
    __builtin_memcpy(&four, args.list + q, sizeof(four));
#pragma GCC unroll 4
    for (int p = 0; p < 4; ++p) {
      const uint64_t l = four >> (16 * p) & 0xffff;
      const float* a = args.tile + l * kSparseTileRows;
      const Floats block = Block::Load(args.values + args.ranks[l] * kBlockColumns);
#pragma GCC unroll 8
      for (int i = 0; i < kSparseTileRows; ++i) {
        Floats& sum = sums[p % kChains][i];
        sum = Block::MultiplyAdd(Simd::Set(a[i]), block, sum);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kSparseTileRows; ++i) {
    Floats sum = sums[0][i];
#pragma GCC unroll 2
    for (int chain = 1; chain < kChains; ++chain) sum = Block::Add(sum, sums[chain][i]);
    if (i < args.rows) StoreSum(args, i, sum);
  }
}

}  // namespace
}  // namespace ortolan
