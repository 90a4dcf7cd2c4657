// What there is to skip in a product, and which way of multiplying is cheapest for it.
#pragma once

#include <cstdint>
#include <deque>

#include "host/host.h"
#include "isa/tuning.h"
#include "masked_matmul/masked_matmul.h"

namespace ortolan {

// Memory of a host that lives as long as a call.
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
  kRows,      // the rows of B that a few rows of A use
  kCompact,   // a dense product of the active inputs
  kBlocks,    // blocks of B skipped
  kTwoSided,  // inputs of a tile of A skipped too
  kValues,    // numbers of A skipped one by one, B taken as dense
};

struct Pattern {
  bool of_a = true;                 // false: A was not looked at, and is taken to use all inputs
  uint64_t* tile_masks = nullptr;   // [sparse tiles][words], if A was looked at
  uint64_t* panel_masks = nullptr;  // [panels][words], without the inputs that no row of A uses
  uint64_t* active = nullptr;       // [words]: the inputs that a row of A uses and whose row of B is not zero
  bool finite = true;               // all of A and B that was looked at
  double active_inputs = 1;         // share of k
  double blocks = 1;                // share of all blocks of B that are neither zero nor of an inactive input
  double used = 1;                  // share of the inputs that a sparse tile uses, on average
  double values = 1;                // share of A's numbers that are not zero, from a sample of its rows
};

int64_t CountBits(const uint64_t* words, int64_t count);

// kDense, kCompact, kBlocks, kTwoSided or kNumbers.
Way CheapestWay(const MaskedMatMulCosts& costs, const Pattern& pattern, const ProductSize& size);

// m, k and n are 1 or more. look_at_a false: for Way::kBlocks, which finds out whether A is finite.
Pattern FindPattern(const MaskedMatMulKernel& kernel, const FloatRows& a, const FloatRows& b, bool look_at_a,
                    CallMemory& memory);

// What a few rows of A and B show: the shares, no masks. They may hold more zeros than the rest, or fewer.
Pattern SamplePattern(const MaskedMatMulKernel& kernel, const FloatRows& a, const FloatRows& b, CallMemory& memory);

}  // namespace ortolan
