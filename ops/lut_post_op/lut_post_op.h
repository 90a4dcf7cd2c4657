// LutPostOp: y[i] = table[x[i]]: a chain of element-wise operators on quantized numbers as one lookup
// (sparse-int8-transformers, section 3.3; graph_passes/find/lut.py makes the tables).
//
//     x of 8 bits (u8, i8)       table of 256 entries
//     x of 16 bits (u16, i16)    table of 65,536 entries
//
// The index is the bits of x[i] as an unsigned number: entry 255 of an i8 table belongs to -1. So kernels know no
// signs, and negative numbers index from the table's end, as in ONNX Gather. An entry is 1, 2 or 4 bytes, which are
// copied as they are: the answer is exact, NaNs included, and the same on every CPU.
//
// A kernel works on a range of elements. It allocates nothing and knows no threads. Nothing need be aligned; y overlaps
// neither x nor the table.
#pragma once

#include <cstdint>
#include <span>

#include "isa/features.h"

namespace ortolan {

// Entries of a table for x of this many bytes.
constexpr int64_t LutEntries(int64_t index_bytes) { return int64_t{1} << (8 * index_bytes); }

struct LutArgs {
  const void* x;
  const void* table;
  void* y;
  int64_t count;  // elements of x and y
};

using LutFn = void(const LutArgs& args);

// By the bytes of an element of x, 1 or 2, and of an element of y, 1, 2 or 4.
struct LutFunctions {
  LutFn* run[2][3];

  LutFn* For(int64_t index_bytes, int64_t entry_bytes) const { return run[index_bytes - 1][entry_bytes / 2]; }
};

struct LutKernel : LutFunctions {
  const char* name;
  Features needs;
};

// The rows of kernels.inc that this build has, best first; the last one runs on any CPU.
std::span<const LutKernel> LutKernels();

}  // namespace ortolan
