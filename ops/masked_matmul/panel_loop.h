// The kernels of all tiers that take a pass of B as dense: 64 inputs of a panel of 128 columns, 32 KB, unpacked into
// the L1 cache, and the sums of a few rows of A in registers. So a B of any type is read once for 512 rows of A, and
// nothing of it is kept.
#pragma once

#include <cstdint>

#include "masked_matmul/number_loop.h"
#include "masked_matmul/rows_loop.h"

namespace ortolan {
namespace {

template <typename Block, typename Weights>
void PackInputs(const RowsArgs& args, int64_t first, int64_t column, int64_t columns, float* panel) {
  using Number = typename Weights::Number;
  constexpr int64_t kInputsAhead = 24;
  constexpr int64_t kLineColumns = kLineBytes / static_cast<int64_t>(sizeof(Number));
  const int64_t end = args.count - first < kMaskBits ? args.count : first + kMaskBits;
  const auto row = [&](int64_t q) { return static_cast<const Number*>(args.b) + args.inputs[q] * args.n + column; };
  for (int64_t q = first; q < end; ++q, panel += kNumberColumns) {
    const Number* from = row(q);
    if (q + kInputsAhead < args.count) {
      for (int64_t j = 0; j < columns; j += kLineColumns) __builtin_prefetch(row(q + kInputsAhead) + j);
    }
    const float* scales =
        args.scales == nullptr ? nullptr : args.scales + args.inputs[q] / args.group * args.n + column;
    int64_t j = 0;
    for (; j + kBlockColumns <= columns; j += kBlockColumns) {
      auto block = Weights::template Load<Block>(from + j);
      if (scales != nullptr) block = Block::Multiply(block, Block::Load(scales + j));
      Block::Store(panel + j, block);
    }
    for (; j < columns; ++j) panel[j] = Weights::ToFloat(from[j]) * (scales == nullptr ? 1.0f : scales[j]);
    for (; j % kBlockColumns != 0; ++j) panel[j] = 0.0f;
  }
}

template <typename Block, int kRows, int kBlocks>
void AddTile(const FloatRows& a, int64_t row, const float* panel, float* sums) {
  typename Block::Vector tile[kRows][kBlocks];
  const float* from[kRows];
  ORTOLAN_UNROLL
  for (int i = 0; i < kRows; ++i) {
    from[i] = a.Row(row + i);
    ORTOLAN_UNROLL
    for (int j = 0; j < kBlocks; ++j) tile[i][j] = Block::Load(sums + i * kNumberColumns + j * kBlockColumns);
  }
  for (int64_t l = 0; l < a.columns; ++l, panel += kNumberColumns) {
    typename Block::Scalar values[kRows];
    ORTOLAN_UNROLL
    for (int i = 0; i < kRows; ++i) values[i] = Block::Broadcast(from[i] + l);
    ORTOLAN_UNROLL
    for (int j = 0; j < kBlocks; ++j) {
      auto block = Block::Load(panel + j * kBlockColumns);
      Block::Keep(block);
      ORTOLAN_UNROLL
      for (int i = 0; i < kRows; ++i) tile[i][j] = Block::MultiplyAdd(values[i], block, tile[i][j]);
    }
  }
  ORTOLAN_UNROLL
  for (int i = 0; i < kRows; ++i) {
    ORTOLAN_UNROLL
    for (int j = 0; j < kBlocks; ++j) Block::Store(sums + i * kNumberColumns + j * kBlockColumns, tile[i][j]);
  }
}

template <typename Block, int kBlocks>
void AddPanel(const FloatRows& a, const float* panel, float* sums) {
  constexpr int kRows = Block::kVectorsABlock == 1 ? (kBlocks > 4 ? 3 : 6) : (Block::kVectorsABlock == 2 ? 4 : 2);
  int64_t i = 0;
  for (; i + kRows <= a.rows; i += kRows) {
    AddTile<Block, kRows, kBlocks>(a, i, panel, sums + i * kNumberColumns);
  }
  for (; i < a.rows; ++i) AddTile<Block, 1, kBlocks>(a, i, panel, sums + i * kNumberColumns);
}

template <int kBlocks>
struct BlockCount {
  static constexpr int kCount = kBlocks;
};

// As many blocks at a time as have their sums in registers.
template <typename Block>
void MultiplyPanel(const FloatRows& a, const float* panel, int64_t blocks, float* sums) {
  constexpr bool kWide = Block::kVectorsABlock == 1;
  int64_t done = 0;
  const auto take = [&](auto count) {
    AddPanel<Block, count.kCount>(a, panel + done * kBlockColumns, sums + done * kBlockColumns);
    done += count.kCount;
  };
  while (done < blocks) {
    const int64_t left = blocks - done;
    if (kWide && left >= 8) {
      take(BlockCount<kWide ? 8 : 1>());
    } else if (kWide && left >= 7) {
      take(BlockCount<kWide ? 7 : 1>());
    } else if (kWide && left >= 6) {
      take(BlockCount<kWide ? 6 : 1>());
    } else if (kWide && left >= 4) {
      take(BlockCount<kWide ? 4 : 1>());
    } else if (kWide && left >= 2) {
      take(BlockCount<kWide ? 2 : 1>());
    } else {
      take(BlockCount<1>());
    }
  }
}

}  // namespace
}  // namespace ortolan
