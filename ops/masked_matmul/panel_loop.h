// The kernels that treat B as dense. Included only by kernels.cc.
//
// A pass is 64 inputs of a panel of 128 columns, 32 KB, unpacked into the L1 cache, with the sums of a few rows of A in
// registers. So B is read once for 512 rows of A.
#pragma once

#include <cstdint>

#include "masked_matmul/rows_loop.h"
#include "masked_matmul/value_list_loop.h"

namespace ortolan {
namespace {

template <typename Element>
void PackInputs(const RowsArgs& args, int64_t first, int64_t column, int64_t columns, float* panel) {
  constexpr int64_t kInputsAhead = 8;
  constexpr int64_t kLineColumns = kLineBytes / static_cast<int64_t>(sizeof(Element));
  const int64_t end = args.count - first < kMaskBits ? args.count : first + kMaskBits;
  const auto row = [&](int64_t q) { return static_cast<const Element*>(args.b) + args.Input(q) * args.n + column; };
  for (int64_t q = first; q < end; ++q, panel += kDensePanelColumns) {
    const Element* from = row(q);
    if (q + kInputsAhead < args.count) {
      for (int64_t j = 0; j < columns; j += kLineColumns) __builtin_prefetch(row(q + kInputsAhead) + j);
    }
    const float* scales = args.scales == nullptr ? nullptr : args.scales + args.Input(q) / args.group * args.n + column;
    int64_t j = 0;
    for (; j + kBlockColumns <= columns; j += kBlockColumns) {
      Floats block = LoadElements(from + j);
      if (scales != nullptr) block = Block::Multiply(block, Block::Load(scales + j));
      Block::Store(panel + j, block);
    }
    for (; j < columns; ++j) panel[j] = ToFloat(from[j]) * (scales == nullptr ? 1.0f : scales[j]);
    for (; j % kBlockColumns != 0; ++j) panel[j] = 0.0f;
  }
}

template <int kRows, int kBlocks>
void AddTile(const FloatRows& a, int64_t row, const float* panel, float* sums) {
  Floats tile[kRows][kBlocks];
  const float* from[kRows];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
    from[i] = a.Row(row + i);
#pragma GCC unroll 8
    for (int j = 0; j < kBlocks; ++j) tile[i][j] = Block::Load(sums + i * kDensePanelColumns + j * kBlockColumns);
  }
  for (int64_t l = 0; l < a.columns; ++l, panel += kDensePanelColumns) {
    if constexpr (kOneRegister) {
      Simd::Float values[kRows];
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) values[i] = Simd::Set(from[i][l]);
#pragma GCC unroll 8
      for (int j = 0; j < kBlocks; ++j) {
        const Floats block = Block::Kept(Block::Load(panel + j * kBlockColumns));
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i) tile[i][j] = Block::MultiplyAdd(values[i], block, tile[i][j]);
      }
    } else {  // too few registers: one row at a time
      static_assert(kBlocks == 1);
      const Floats block = Block::Kept(Block::Load(panel));
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        tile[i][0] = Block::MultiplyAdd(Block::Kept(Simd::Set(from[i][l])), block, tile[i][0]);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kBlocks; ++j) Block::Store(sums + i * kDensePanelColumns + j * kBlockColumns, tile[i][j]);
  }
}

// Processes a few rows at a time, and of the panel those blocks whose sums fit the registers.
void MultiplyPanel(const FloatRows& a, const float* panel, int64_t blocks, float* sums) {
  TakeAll<kOneRegister ? 8 : 1>(0, blocks, [&]<int kBlocks>(int64_t first) {
    constexpr int kRows = kOneRegister ? (kBlocks > 4 ? 3 : 6) : (Block::kRegisters == 2 ? 6 : 2);
    const float* from = panel + first * kBlockColumns;
    float* to = sums + first * kBlockColumns;
    int64_t i = 0;
    for (; i + kRows <= a.rows; i += kRows) AddTile<kRows, kBlocks>(a, i, from, to + i * kDensePanelColumns);
    for (; i < a.rows; ++i) AddTile<1, kBlocks>(a, i, from, to + i * kDensePanelColumns);
  });
}

}  // namespace
}  // namespace ortolan
