// LutPostOp: y[i] = table[x[i]], a chain of element-wise operators on quantized values as one lookup. Reference:
// sparse-int8-transformers, section 3.3.
//
//     8-bit x (u8, i8)         table of 256 entries
//     16-bit x (u16, i16)      table of 65,536 entries
//
// The index is the bits of x[i] as an unsigned integer, so negative values index from the end of the table, as in ONNX
// Gather: entry 255 of an i8 table belongs to -1. An entry of 1, 2 or 4 bytes is copied unchanged, so the result is
// exact on every CPU.
//
// A kernel works on a range of elements. Kernels neither allocate nor create threads. Nothing needs to be aligned. y
// does not overlap x or the table.
#pragma once

#include <cstdint>
#include <span>

#include "isa/features.h"

namespace ortolan {

// Table entries for an x of this size.
constexpr int64_t LutEntries(int64_t index_bytes) { return int64_t{1} << (8 * index_bytes); }

struct LutArgs {
  const void* x;
  const void* table;
  void* y;
  int64_t count;  // elements of x and y
};

using LutFn = void(const LutArgs& args);

// Indexed by the bytes of an element of x (1 or 2) and of y (1, 2 or 4).
struct LutFunctions {
  LutFn* run[2][3];

  LutFn* For(int64_t index_bytes, int64_t entry_bytes) const { return run[index_bytes - 1][entry_bytes / 2]; }
};

struct LutKernel : LutFunctions {
  const char* name;
  Features needs;
};

// The kernels of this build, best first; the last one runs on any CPU.
std::span<const LutKernel> LutKernels();

}  // namespace ortolan
