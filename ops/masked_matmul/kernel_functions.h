// What a tier makes of the kernels: the functions that a row of kernels.inc declares.
#pragma once

#include "masked_matmul/number_loop.h"
#include "masked_matmul/panel_loop.h"
#include "masked_matmul/rows_loop.h"
#include "masked_matmul/tile_loop.h"

namespace ortolan {

// Defines the functions that a row of kernels.inc declares.
#define ORTOLAN_MASKED_KERNEL(name, Block, kTileRows, kSparseTileRows)                                              \
  bool ScanRows##name(const FloatRows& a, uint64_t* mask) { return ScanRows<Block>(a, mask); }                      \
  bool ScanBlocks##name(const FloatRows& b, uint64_t* masks, int64_t stride) {                                      \
    return ScanBlocks<Block>(b, masks, stride);                                                                     \
  }                                                                                                                 \
  void PackBlocks##name(const PackBlocksArgs& args) { PackBlocks<Block>(args); }                                    \
  bool PackTile##name(const FloatRows& a, float* tile) { return PackTile<Block, kTileRows>(a, tile); }              \
  bool PackSparseTile##name(const FloatRows& a, float* tile) { return PackTile<Block, kSparseTileRows>(a, tile); }  \
  void MultiplyTile##name(const TileArgs& args) { MultiplyTile<Block, kTileRows>(args); }                           \
  void MultiplySparseTile##name(const SparseTileArgs& args) { MultiplySparseTile<Block, kSparseTileRows>(args); }   \
  int64_t ListNumbers##name(const FloatRows& a, const NumberList& list) { return ListNumbers<Block>(a, list); }     \
  void PackPanel##name(const FloatRows& b, float* panel) { PackPanel<Block>(b, panel); }                            \
  void MultiplyNumbers##name(const NumbersArgs& args) { MultiplyNumbers<Block>(args); }                             \
  int64_t ListInputs##name(const FloatRows& a, const uint8_t* always, int32_t* inputs, float* to, int64_t to_row) { \
    return ListInputs<Block>(a, always, inputs, to, to_row);                                                        \
  }                                                                                                                 \
  void MultiplyRowsFloat##name(const RowsArgs& args, int64_t begin, int64_t end) {                                  \
    MultiplyRows<Block, FloatWeights>(args, begin, end);                                                            \
  }                                                                                                                 \
  void MultiplyRowsBf16##name(const RowsArgs& args, int64_t begin, int64_t end) {                                   \
    MultiplyRows<Block, Bf16Weights>(args, begin, end);                                                             \
  }                                                                                                                 \
  void MultiplyRowsInt8##name(const RowsArgs& args, int64_t begin, int64_t end) {                                   \
    MultiplyRows<Block, Int8Weights>(args, begin, end);                                                             \
  }                                                                                                                 \
  void PackInputsFloat##name(const RowsArgs& args, int64_t first, int64_t column, int64_t columns, float* panel) {  \
    PackInputs<Block, FloatWeights>(args, first, column, columns, panel);                                           \
  }                                                                                                                 \
  void PackInputsBf16##name(const RowsArgs& args, int64_t first, int64_t column, int64_t columns, float* panel) {   \
    PackInputs<Block, Bf16Weights>(args, first, column, columns, panel);                                            \
  }                                                                                                                 \
  void PackInputsInt8##name(const RowsArgs& args, int64_t first, int64_t column, int64_t columns, float* panel) {   \
    PackInputs<Block, Int8Weights>(args, first, column, columns, panel);                                            \
  }                                                                                                                 \
  void MultiplyPanel##name(const FloatRows& a, const float* panel, int64_t blocks, float* sums) {                   \
    MultiplyPanel<Block>(a, panel, blocks, sums);                                                                   \
  }

}  // namespace ortolan
