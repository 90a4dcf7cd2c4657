// Where the x86 loops put what they have summed up for a panel. Included by x86_*.cc only; local to each.
#pragma once

#include "formats/bitmap.h"
#include "matmul/matmul_args.h"

namespace ortolan {
namespace {

// The outputs of a panel: 16 columns or, at the end of n, fewer.
struct PanelOutput {
  PanelOutput(const MatMulArgs& args_, int64_t n, int64_t panel)
      : args(args_),
        first(panel * kPanelColumns),
        columns(static_cast<int>(n - first < kPanelColumns ? n - first : kPanelColumns)) {}

  // Row i of y is the sums, of all 16 columns, and the bias.
  template <typename Simd, typename Sums>
  void Store(int64_t i, Sums sums) const {
    if (args.bias != nullptr) sums = Simd::Add(sums, Simd::LoadColumns(args.bias + first, columns));
    Simd::StoreColumns(args.YRow(i) + first, columns, sums);
  }

  const MatMulArgs& args;
  int64_t first;
  int columns;
};

}  // namespace
}  // namespace ortolan
