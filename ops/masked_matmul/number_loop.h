// The kernels of all tiers that skip numbers of A one by one, over the Block of tile_loop.h.
//
// A pass is 64 inputs: what they have of a panel of B, 32 KB, stays in the L1 cache while all rows of A go past it,
// each with the list of its numbers that are not zero. Sums of a row of the panel stay in registers during a pass.
#pragma once

#include <cstdint>

#include "masked_matmul/tile_loop.h"

namespace ortolan {
namespace {

// Pieces of rows are too short for the processor's prefetcher.
inline constexpr int64_t kNumberRowsAhead = 8;

inline void AskFor(const float* numbers, int64_t count) {
  for (int64_t i = 0; i < count; i += 16) __builtin_prefetch(numbers + i);
}

// By counting, so that rows with as many numbers are together: the end of a row's loop is then foreseen.
template <typename Block>
int64_t ListNumbers(const FloatRows& a, const NumberList& list) {
  uint64_t masks[kNumberRows];
  int64_t first[kMaskBits + 2] = {};
  for (int64_t i = 0; i < a.rows; ++i) {
    const float* row = a.Row(i);
    if (i + kNumberRowsAhead < a.rows) AskFor(a.Row(i + kNumberRowsAhead), a.columns);
    uint64_t mask = 0;
    for (int64_t column = 0; column < a.columns; column += kBlockColumns) {
      const int64_t left = a.columns - column;
      const auto block = left >= kBlockColumns ? Block::Load(row + column) : Block::LoadFirst(row + column, left);
      mask |= static_cast<uint64_t>(Block::Bits(block)) << column;
    }
    masks[i] = mask;
    ++first[__builtin_popcountll(mask)];
  }
  // Rows without numbers are left out.
  int64_t listed = 0;
  first[0] = 0;
  for (int64_t count = 1; count <= kMaskBits; ++count) {
    const int64_t rows = first[count];
    first[count] = listed;
    listed += rows;
  }
  for (int64_t i = 0; i < a.rows; ++i) {
    const int count = __builtin_popcountll(masks[i]);
    if (count == 0) continue;
    list.counts[first[count]] = static_cast<uint8_t>(count);
    list.rows[first[count]++] = static_cast<uint16_t>(i);
  }
  float* values = list.values;
  uint8_t* inputs = list.inputs;
  for (int64_t q = 0; q < listed; ++q) {
    const int64_t i = list.rows[q];
    Block::PackNumbers(a.Row(i), masks[i], values, inputs);
    values += list.counts[q];
    inputs += list.counts[q];
  }
  return listed;
}

// What any CPU does for PackNumbers.
inline void PackNumbersOneByOne(const float* row, uint64_t mask, float* values, uint8_t* inputs) {
  for (; mask != 0; mask &= mask - 1) {
    const int l = __builtin_ctzll(mask);
    *values++ = row[l];
    *inputs++ = static_cast<uint8_t>(l);
  }
}

template <typename Block>
void PackPanel(const FloatRows& b, float* panel) {
  for (int64_t l = 0; l < b.rows; ++l, panel += kNumberColumns) {
    const float* from = b.Row(l);
    if (l + kNumberRowsAhead < b.rows) AskFor(b.Row(l + kNumberRowsAhead), b.columns);
    for (int64_t column = 0; column < b.columns; column += kBlockColumns) {
      const int64_t left = b.columns - column;
      Block::Store(panel + column,
                   left >= kBlockColumns ? Block::Load(from + column) : Block::LoadFirst(from + column, left));
    }
  }
}

template <typename Block, int kBlocks>
void AddNumbers(const NumbersArgs& args, int64_t first_block) {
  const float* panel = args.panel + first_block * kBlockColumns;
  const float* values = args.list.values;
  const uint8_t* inputs = args.list.inputs;
  for (int64_t q = 0; q < args.listed; ++q) {
    float* to = args.sums + args.list.rows[q] * kNumberColumns + first_block * kBlockColumns;
    const int64_t count = args.list.counts[q];
    typename Block::Vector sums[kBlocks];
    ORTOLAN_UNROLL
    for (int j = 0; j < kBlocks; ++j) sums[j] = Block::Load(to + j * kBlockColumns);
    const auto add = [&](int64_t input, const float* value) {
      const float* from = panel + input * kNumberColumns;
      const typename Block::Scalar factor = Block::Broadcast(value);
      ORTOLAN_UNROLL
      for (int j = 0; j < kBlocks; ++j) {
        sums[j] = Block::MultiplyAdd(factor, Block::Load(from + j * kBlockColumns), sums[j]);
      }
    };
    // Four inputs a load, and few turns of the loop: their number is easier to foresee.
    int64_t p = 0;
    for (; p + 4 <= count; p += 4) {
      uint32_t four;
      __builtin_memcpy(&four, inputs + p, sizeof(four));
      ORTOLAN_UNROLL
      for (int i = 0; i < 4; ++i) add(four >> (8 * i) & 0xff, values + p + i);
    }
    for (; p < count; ++p) add(inputs[p], values + p);
    ORTOLAN_UNROLL
    for (int j = 0; j < kBlocks; ++j) Block::Store(to + j * kBlockColumns, sums[j]);
    values += count;
    inputs += count;
  }
}

// As many blocks at a time as have their sums in registers.
template <typename Block>
void MultiplyNumbers(const NumbersArgs& args) {
  constexpr int64_t kMost = Block::kVectorsABlock == 1 ? 8 : 4;
  for (int64_t block = 0; block < args.blocks;) {
    const int64_t left = args.blocks - block;
    if (left >= kMost) {
      AddNumbers<Block, kMost>(args, block);
      block += kMost;
      continue;
    }
    switch (left) {
      case 7:
        AddNumbers<Block, kMost == 8 ? 7 : 1>(args, block);
        break;
      case 6:
        AddNumbers<Block, kMost == 8 ? 6 : 1>(args, block);
        break;
      case 5:
        AddNumbers<Block, kMost == 8 ? 5 : 1>(args, block);
        break;
      case 4:
        AddNumbers<Block, kMost == 8 ? 4 : 1>(args, block);
        break;
      case 3:
        AddNumbers<Block, 3>(args, block);
        break;
      case 2:
        AddNumbers<Block, 2>(args, block);
        break;
      default:
        AddNumbers<Block, 1>(args, block);
    }
    break;
  }
}

}  // namespace
}  // namespace ortolan
