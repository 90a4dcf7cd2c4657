// The order of packed activations, and how the loops read them. Included by *kernels.cc only; local to each.
//
// Rows of x are packed in blocks of r rows. A row of weights holds kRowInputs inputs of each column (2 in bf16, 4 in
// int8). It is multiplied with the same number of activations of each row of x, repeated in all columns. The
// activations for four rows of weights are contiguous:
//
//     [inputs / (4 kRowInputs)][r][4][kRowInputs]
//
// or, for fewer rows of weights, [inputs / kInputsTogether][r][kInputsTogether].
//
// With many rows of x, the loads that repeat activations limit the speed. So, registers permitting, some rows of x are
// loaded once for four rows of weights and repeated from that register.
#pragma once

#include <cstdint>

namespace ortolan {
namespace {

constexpr int kFourRows = 4;

// Rows of weights whose activations are contiguous: four, or fewer that hold the same number of inputs.
template <typename Weights>
constexpr int kRowsTogether = Weights::kInputsTogether / Weights::kRowInputs;

// Rows of x in a block, if their sums fill this number of registers.
template <typename Simd>
constexpr int RowsWithSumsIn(int registers) {
  return registers * Simd::kLanes >= 16 ? static_cast<int>(registers * Simd::kLanes / 16) : 1;
}
template <typename Simd>
constexpr int kHalfOfRegisters = RowsWithSumsIn<Simd>(Simd::kRegisters / 2);

// Maximum number of sums of 16 columns that one row of x is spread over.
template <typename Simd>
constexpr int kMostOneRowChains = Simd::kRegisters * Simd::kLanes >= 64 ? 4 : 1;

// True if repeating activations from a register is free: then all rows of x are held in registers.
template <typename Weights>
constexpr bool kHoldsAllRows = false;
template <typename Weights>
  requires requires { Weights::kHoldsAll; }
constexpr bool kHoldsAllRows<Weights> = Weights::kHoldsAll;

// Activations of kRows rows of x. Weights: a kind of weights/*.h.
template <typename Weights, int kRows>
class Activations {
  using Activation = typename Weights::Activation;

 public:
  static constexpr int64_t kElements = Weights::kInputsTogether * kRows;

  explicit Activations(const Activation* x) : x_(x) {
    if constexpr (kHeld > 0) {
      for (int i = 0; i < kHeld; ++i) held_[i] = Weights::Hold(x + Weights::kInputsTogether * i);
    }
  }

  // part: a part of a row of weights, Weights::Part<kPart>.
  template <int kPart, typename Sums, typename Part>
  Sums MultiplyAdd(const Sums& sums, const Part& part, int row, int i) const {
    if constexpr (kHeld > 0) {
      if (i < kHeld) return Weights::MultiplyAddHeld(sums, part, held_[i], row);
    }
    const Activation* const x = x_ + Weights::kInputsTogether * i + Weights::kRowInputs * row;
    return Weights::template MultiplyAddPart<kPart>(sums, part, x);
  }

 private:
  // Rows of x held in registers: at most half of the rows, and none if there are few rows, because otherwise shuffles
  // limit the speed (sparse_amx_matmul/README.md).
  static constexpr int kHalfOrMost = kRows < 4 ? 0 : kRows / 2 < Weights::kMostHeld ? kRows / 2 : Weights::kMostHeld;
  static constexpr int kHeld = kHoldsAllRows<Weights> ? kRows : kHalfOrMost;

  const Activation* x_;
  [[no_unique_address]] typename Weights::Held held_[kHeld > 0 ? kHeld : 1];
};

// Call call.operator()<rows>() with rows as a constant, 1 <= rows <= kMost; do nothing for 0 rows.
template <int kMost, typename Call>
void WithRowCount(int64_t rows, const Call& call) {
  if constexpr (kMost > 0) {
    if (rows == kMost) return call.template operator()<kMost>();
    WithRowCount<kMost - 1>(rows, call);
  }
}

}  // namespace
}  // namespace ortolan
