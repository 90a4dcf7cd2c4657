// Writes the sums of a panel to y. Included by *kernels.cc only; local to each.
#pragma once

#include "matmul/kernel.h"
#include "simd/columns.h"

namespace ortolan {
namespace {

// The outputs of a panel: 16 columns, or fewer at the end of n. Loops that store many rows use a local copy, because
// the compiler must assume that stores to y change objects in memory.
template <typename Simd>
struct PanelOutput {
  using Columns = simd::Columns<Simd>;

  PanelOutput(const MatMulArgs& args, int64_t panel)
      : y(args.Y(0, panel)),
        row_bytes(args.y_row_bytes),
        bias(args.bias == nullptr ? nullptr : args.bias + panel * kPanelColumns),
        columns(args.w->n - panel * kPanelColumns < kPanelColumns ? args.w->n - panel * kPanelColumns : kPanelColumns) {
  }

  // The outputs from row i on.
  PanelOutput RowsFrom(int64_t i) const {
    PanelOutput rows = *this;
    rows.y = Row(i);
    return rows;
  }
  float* Row(int64_t i) const { return reinterpret_cast<float*>(reinterpret_cast<char*>(y) + i * row_bytes); }
  typename Columns::Floats Bias() const {
    return bias == nullptr ? Columns::Set(0.0f) : Columns::LoadFirst(bias, columns);
  }
  // Store sums of all 16 columns as row i of y.
  void Store(int64_t i, const typename Columns::Floats& sums) const { Columns::StoreFirst(Row(i), columns, sums); }
  void StoreWithBias(int64_t i, const typename Columns::Floats& sums) const {
    Store(i, bias == nullptr ? sums : Columns::Add(sums, Bias()));
  }

  float* y;  // row 0
  int64_t row_bytes;
  const float* bias;  // or null
  int64_t columns;
};

}  // namespace
}  // namespace ortolan
