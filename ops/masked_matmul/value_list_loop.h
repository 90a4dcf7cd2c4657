// The kernels that skip single zeros of A. Included only by kernels.cc.
//
// A pass is 64 inputs: their part of a panel of B, 32 KB, stays in the L1 cache while all rows of A are multiplied with
// it, each with the list of its nonzero values. A row's sums stay in registers.
#pragma once

#include <cstdint>

#include "masked_matmul/tile_loop.h"

namespace ortolan {
namespace {

// A counting sort groups rows with the same number of values, so that the length of the inner loop is predictable.
int64_t ListValues(const FloatRows& a, const ValueList& list) {
  // Prefetch distance in rows. Prefetches are needed because 64 elements of a row are too short for the hardware
  // prefetcher.
  constexpr int64_t kRowsAhead = 8;
  uint64_t masks[kDensePanelRows];
  int64_t first[kMaskBits + 2] = {};
  for (int64_t i = 0; i < a.rows; ++i) {
    const float* row = a.Row(i);
    if (i + kRowsAhead < a.rows) {
      for (int64_t l = 0; l < a.columns; l += kBlockColumns) __builtin_prefetch(a.Row(i + kRowsAhead) + l);
    }
    uint64_t mask = 0;
    for (int64_t l = 0; l < a.columns; l += kBlockColumns) {
      mask |= static_cast<uint64_t>(Block::NonZero(LoadBlock(row + l, a.columns - l))) << l;
    }
    masks[i] = mask;
    ++first[__builtin_popcountll(mask)];
  }
  // Omits rows without nonzero values.
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
  int64_t slot = 0;
  for (int64_t q = 0; q < listed; ++q) {
    const int64_t i = list.rows[q];
    Simd::CompressFloats(masks[i], a.Row(i), list.values + slot);
    slot += Simd::ListBits(masks[i], uint8_t{0}, list.inputs + slot);
  }
  return listed;
}

template <int kBlocks>
void AddValues(const ValuesArgs& args, int64_t first_block) {
  const float* panel = args.panel + first_block * kBlockColumns;
  const float* values = args.list.values;
  const uint8_t* inputs = args.list.inputs;
  for (int64_t q = 0; q < args.listed; ++q) {
    float* to = args.sums + args.list.rows[q] * kDensePanelColumns + first_block * kBlockColumns;
    const int64_t count = args.list.counts[q];
    Floats sums[kBlocks];
#pragma GCC unroll 8
    for (int j = 0; j < kBlocks; ++j) sums[j] = Block::Load(to + j * kBlockColumns);
    const auto add = [&](int64_t input, const float* value) {
      const float* from = panel + input * kDensePanelColumns;
      const Simd::Float factor = Simd::Set(*value);
#pragma GCC unroll 8
      for (int j = 0; j < kBlocks; ++j) {
        sums[j] = Block::MultiplyAdd(factor, Block::Load(from + j * kBlockColumns), sums[j]);
      }
    };
    // Loads four inputs at once: fewer loop iterations, and their number is easier to predict.
    int64_t p = 0;
    for (; p + 4 <= count; p += 4) {
      uint32_t four;
      __builtin_memcpy(&four, inputs + p, sizeof(four));
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) add(four >> (8 * i) & 0xff, values + p + i);
    }
    for (; p < count; ++p) add(inputs[p], values + p);
#pragma GCC unroll 8
    for (int j = 0; j < kBlocks; ++j) Block::Store(to + j * kBlockColumns, sums[j]);
    values += count;
    inputs += count;
  }
}

// Processes at a time the blocks whose sums fit the registers.
void MultiplyValues(const ValuesArgs& args) {
  TakeAll<kOneRegister ? 8 : 4>(0, args.blocks, [&]<int kBlocks>(int64_t first) { AddValues<kBlocks>(args, first); });
}

}  // namespace
}  // namespace ortolan
