// Finds what can be skipped in a product, and the cheapest way to multiply.
#pragma once

#include <cstdint>
#include <deque>

#include "host/host.h"
#include "isa/tuning.h"
#include "masked_matmul/masked_matmul.h"

namespace ortolan {

class CallMemory {
 public:
  explicit CallMemory(Host& host) : host_(host) {}
  template <typename T>
  T* New(int64_t count) {
    return reinterpret_cast<T*>(blocks_.emplace_back(host_, count * static_cast<int64_t>(sizeof(T))).data());
  }
  Host& host() { return host_; }

 private:
  Host& host_;
  std::deque<HostMemory> blocks_;
};

struct ProductSize {
  int64_t m = 0, k = 0, n = 0;  // A [m, k], B [k, n]
};

enum class Way {
  kDense,     // ONNX Runtime's MatMul
  kPanels,    // a dense product that unpacks B panel by panel
  kRows,      // only the rows of B that the few rows of A use
  kCompact,   // a dense product of the active inputs
  kBlocks,    // skips zero blocks of B
  kTwoSided,  // also skips unused inputs of tiles of A
  kValues,    // skips single zeros of A, treats B as dense
};

struct Pattern {
  bool of_a = true;                 // false: A was not scanned and is assumed to use all inputs
  uint64_t* tile_masks = nullptr;   // [sparse tiles][words], if A was scanned
  uint64_t* panel_masks = nullptr;  // [panels][words], only of inputs that a row of A uses
  uint64_t* active = nullptr;       // [words]: inputs that a row of A uses and whose row of B is nonzero
  bool finite = true;               // all scanned values of A and B are finite
  double active_inputs = 1;         // fraction of k
  double blocks = 1;                // fraction of the blocks of B that are nonzero and at an active input
  double used = 1;                  // average fraction of the inputs that a sparse tile uses
  double values = 1;                // fraction of nonzero values of A, from a sample of its rows
};

int64_t CountBits(const uint64_t* words, int64_t count);

// Returns kDense, kCompact, kBlocks, kTwoSided or kValues.
Way CheapestWay(const MaskedMatMulCosts& costs, const Pattern& pattern, const ProductSize& size);

// Scans A and B; m, k and n are at least 1. look_at_a false is for Way::kBlocks, whose product checks whether A is
// finite.
Pattern FindPattern(const MaskedMatMulKernel& kernel, const FloatRows& a, const FloatRows& b, bool look_at_a,
                    CallMemory& memory);

// Estimates only the fractions, from a sample of rows of A and B.
Pattern SamplePattern(const MaskedMatMulKernel& kernel, const FloatRows& a, const FloatRows& b, CallMemory& memory);

}  // namespace ortolan
