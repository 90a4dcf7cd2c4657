// VNNISpMM between quantized layers: x, and perhaps y, as u8 with one scale and zero point for all tokens, in the order
// in which the kernels read them.
//
//     D_ij = sum over l of (x[i, l] - x_zero_point) q[l, j]                                          exact
//     y[i, j] = D_ij                                                                                 int32, or
//     y[i, j] = D_ij (x_scale scales[j]) + bias[j]                                                   float32, or
//     y[i, j] = table[clamp(round(D_ij (x_scale scales[j] / y_scale) + bias[j] / y_scale) + y_zero_point, 0, 255)]
//
// round: to nearest, ties to even. Without a table y is the number itself. In float32 the argument of round is off by
// at most 8 2^-24 of the sum of its terms' magnitudes: next to the exact formula, y is the same or, near a tie, one
// step away. Kernels agree with each other likewise.
//
// Token blocks: m tokens of c numbers, in blocks of 64 tokens; of what is left a block of 64 if that is more than 48,
// else one of 32 if more than 16, then one of 16.
//
//     [c][width] a block, one after the other: the block that begins with token i stands at element i c
//
// Of u8 blocks of 64, token 16 v + 4 a + b stands at 16 a + 4 v + b: byte unpacks leave tokens 16 v, 16 v + 1, … in a
// vector. All others have their tokens in order. Kernels are 10 to 15 % faster on u8 blocks aligned to 64 bytes.
//
// What is in the places of missing tokens does not matter, and is anything after a kernel has written y.
#pragma once

#include <cstdint>
#include <span>

#include "formats/block_sparse_4x1.h"
#include "isa/features.h"

namespace ortolan {

inline constexpr int64_t kTokenBlock = 64;

// Tokens of the block that begins where `left` are left.
inline constexpr int64_t TokenBlockWidth(int64_t left) { return left > 48 ? 64 : left > 16 ? 32 : 16; }
// Tokens that the blocks of m have room for.
inline constexpr int64_t PaddedTokens(int64_t m) {
  const int64_t left = m % kTokenBlock;
  return m - left + (left > 48 ? 64 : (left + 15) / 16 * 16);
}

// The token, counted from the block's first one, that stands at this place of a u8 block.
constexpr int64_t TokenAt(int64_t width, int64_t place) {
  return width == kTokenBlock ? place % 16 / 4 * 16 + place / 16 * 4 + place % 4 : place;
}

// A part of the work is m tokens from a multiple of kTokenBlock on, with x and y of those.
struct QuantizedSpmmArgs {
  BlockSparseView w;              // has passed ValidateBlockSparse
  const int32_t* sums = nullptr;  // SumsOfOutputs(w)
  const float* scales = nullptr;  // [w.n]
  const float* bias = nullptr;    // [w.n], or null
  int64_t m = 0;
  const uint8_t* x = nullptr;  // token blocks of w.k numbers
  float x_scale = 0.0f;
  int32_t x_zero_point = 0;  // 0 … 255
  // One of the three, the others null.
  float* y = nullptr;              // [m][w.n]
  int64_t y_row_bytes = 0;         // from one row of y to the next, a multiple of 4
  int32_t* y_sums = nullptr;       // token blocks of w.n numbers
  uint8_t* y_blocks = nullptr;     // token blocks of w.n numbers
  float y_scale = 0.0f;            // not 0
  int32_t y_zero_point = 0;        // 0 … 255
  const uint8_t* table = nullptr;  // [256], or null
};

// Computes y for the panels (16 outputs each) panel_begin … panel_end-1 and all m tokens.
using QuantizedSpmmFn = void(const QuantizedSpmmArgs& args, int64_t panel_begin, int64_t panel_end);

// Rounds m rows of k floats to token blocks: clamp(round(x factor) + zero_point, 0, 255); NaN gives 255.
using QuantizeTokensFn = void(const float* x, int64_t x_row_bytes, int64_t m, int64_t k, float factor,
                              int32_t zero_point, uint8_t* blocks);

struct QuantizedSpmmKernel {
  const char* name;
  Features needs;
  QuantizeTokensFn* quantize;
  QuantizedSpmmFn* multiply;
};

// The rows of quantized_kernels.inc that this build has, best first; the last one runs on any CPU.
std::span<const QuantizedSpmmKernel> QuantizedSpmmKernels();

// The best kernel on a CPU of this tier. Never fails.
const QuantizedSpmmKernel& SelectQuantizedSpmm(Features features);

}  // namespace ortolan
