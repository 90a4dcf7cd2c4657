// The order of packed activations, and how the x86 loops read them. Included by x86_*.cc only; local to each.
//
// Rows of x are packed in blocks of r rows. A row of weights holds kRowInputs inputs of each column (2 in bf16, 4 in
// int8) and is multiplied with as many activations of each row of x, repeated in all columns. What four rows of weights
// meet lies side by side:
//
//     [inputs / (4 kRowInputs)][r][4][kRowInputs]
//
// With many rows of x, the loads that repeat an activation limit the speed. So a tier may take some rows of x by one
// load for four rows of weights, and repeat from that register.
#pragma once

#include <cstdint>

namespace ortolan {
namespace {

constexpr int kFourRows = 4;

// Of kRows rows of x. A tier gives
//     MultiplyAdd(Sums, Weights, const Activation*)     with activations in memory
//     kMostHeld                                         rows of x that it holds in registers at most; if not 0, also
//     Held Hold(const Activation*)                      those of four rows of weights
//     MultiplyAdd(Sums, Weights, Held, int row)         with those of one of them
template <typename Simd, typename Activation, int kRowInputs, int kRows>
class Activations {
 public:
  static constexpr int64_t kElements = kFourRows * kRowInputs * kRows;

  explicit Activations(const Activation* x) : x_(x) {
    if constexpr (kHeld > 0) {
      for (int i = 0; i < kHeld; ++i) held_[i] = Simd::Hold(x + kFourRows * kRowInputs * i);
    }
  }

  template <typename Sums, typename Weights>
  Sums MultiplyAdd(Sums sums, const Weights& weights, int row, int i) const {
    if constexpr (kHeld > 0) {
      if (i < kHeld) return Simd::MultiplyAdd(sums, weights, held_[i], row);
    }
    return Simd::MultiplyAdd(sums, weights, x_ + kRowInputs * (kFourRows * i + row));
  }

 private:
  // Half of few rows: with all of them the shuffles would be the limit. Measured: sparse_amx_matmul/README.md.
  static constexpr int kHeld = kRows < 4 ? 0 : kRows / 2 < Simd::kMostHeld ? kRows / 2 : Simd::kMostHeld;

  const Activation* x_;
  [[no_unique_address]] typename Simd::Held held_[kHeld > 0 ? kHeld : 1];
};

// Calls call.operator()<rows>(), the number as a constant, for 1 <= rows <= kMost; for no rows nothing.
template <int kMost, typename Call>
void WithRowCount(int64_t rows, const Call& call) {
  if constexpr (kMost > 0) {
    if (rows == kMost) return call.template operator()<kMost>();
    WithRowCount<kMost - 1>(rows, call);
  }
}

}  // namespace
}  // namespace ortolan
