// Where the x86 loops put what they have summed up for a panel. Included by x86_*.cc only; local to each.
#pragma once

#include "formats/bitmap.h"
#include "matmul/kernel.h"

namespace ortolan {
namespace {

// The outputs of a panel: 16 columns or, at the end of n, fewer.
struct PanelOutput {
  PanelOutput(const MatMulArgs& args_, int64_t panel_)
      : args(args_),
        panel(panel_),
        columns(static_cast<int>(args.w->n - First() < kPanelColumns ? args.w->n - First() : kPanelColumns)) {}

  // Row i of y is the sums, of all 16 columns, and the bias.
  template <typename Simd, typename Sums>
  void Store(int64_t i, Sums sums) const {
    if (args.bias != nullptr) sums = Simd::Add(sums, Simd::LoadColumns(args.bias + First(), columns));
    Simd::StoreColumns(args.Y(i, panel), columns, sums);
  }

  int64_t First() const { return panel * kPanelColumns; }

  const MatMulArgs& args;
  int64_t panel;
  int columns;
};

}  // namespace
}  // namespace ortolan
