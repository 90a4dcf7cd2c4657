// Where the loops put what they have summed up for a panel. Included by *kernels.cc only; local to each.
#pragma once

#include "matmul/kernel.h"
#include "simd/columns.h"

namespace ortolan {
namespace {

// The outputs of a panel: 16 columns or, at the end of n, fewer.
template <typename Simd>
struct PanelOutput {
  using Columns = simd::Columns<Simd>;

  PanelOutput(const MatMulArgs& args_, int64_t panel_)
      : args(args_),
        panel(panel_),
        columns(args.w->n - panel * kPanelColumns < kPanelColumns ? args.w->n - panel * kPanelColumns : kPanelColumns) {
  }

  typename Columns::Floats Bias() const {
    return args.bias == nullptr ? Columns::Set(0.0f) : Columns::LoadFirst(args.bias + panel * kPanelColumns, columns);
  }
  // Row i of y is the sums, of all 16 columns.
  void Store(int64_t i, const typename Columns::Floats& sums) const {
    Columns::StoreFirst(args.Y(i, panel), columns, sums);
  }
  void StoreWithBias(int64_t i, const typename Columns::Floats& sums) const {
    Store(i, args.bias == nullptr ? sums : Columns::Add(sums, Bias()));
  }

  const MatMulArgs& args;
  int64_t panel;
  int64_t columns;
};

}  // namespace
}  // namespace ortolan
