// The product of rows of A and the listed inputs of a B of any type, out of the panel kernels: dense, but B is neither
// packed ahead nor unpacked as a whole. parallel and allocate are those of block_product.h.
#pragma once

#include <algorithm>
#include <cstdint>

#include "masked_matmul/block_product.h"

namespace ortolan {

// y[i, j] = sum over q of a[i, q] B[inputs[q], j] for all m rows and n columns, as args says. No sum depends on how the
// work is divided.
template <typename Parallel, typename Allocate>
void MultiplyByPanels(const MaskedMatMulKernel& kernel, PackInputsFn* pack, const RowsArgs& args,
                      const Parallel& parallel, Allocate& allocate) {
  using namespace block_product;
  const int64_t group = std::min(args.m, kNumberRows);
  const int64_t groups = (args.m + group - 1) / group;
  // Panels of the same width, so that the last one is no narrow rest.
  const int64_t blocks = BlockPanels(args.n);
  const int64_t least_panels = (args.n + kNumberColumns - 1) / kNumberColumns;
  const int64_t panel_columns = (blocks + least_panels - 1) / least_panels * kBlockColumns;
  const int64_t panels = (args.n + panel_columns - 1) / panel_columns;
  const int64_t units = groups * panels;
  const int64_t slots = std::min(units, kMostSlots);
  constexpr int64_t kPanelNumbers = kMaskBits * kNumberColumns;
  float* slot_panels = New<float>(allocate, slots * kPanelNumbers);
  float* slot_sums = New<float>(allocate, slots * group * kNumberColumns);
  parallel(slots, [&](int64_t slot) {
    float* panel = slot_panels + slot * kPanelNumbers;
    float* sums = slot_sums + slot * group * kNumberColumns;
    for (int64_t unit = slot; unit < units; unit += slots) {
      const int64_t first_row = unit / panels * group;
      const int64_t rows = std::min(group, args.m - first_row);
      const int64_t column = unit % panels * panel_columns;
      const int64_t columns = std::min(panel_columns, args.n - column);
      std::fill_n(sums, rows * kNumberColumns, 0.0f);
      for (int64_t first = 0; first < args.count; first += kMaskBits) {
        pack(args, first, column, columns, panel);
        const FloatRows a{args.a + first_row * args.a_row + first, args.a_row * static_cast<int64_t>(sizeof(float)),
                          rows, std::min(kMaskBits, args.count - first)};
        kernel.multiply_panel(a, panel, BlockPanels(columns), sums);
      }
      for (int64_t i = 0; i < rows; ++i) {
        std::copy_n(sums + i * kNumberColumns, columns, args.y + (first_row + i) * args.n + column);
      }
    }
  });
}

}  // namespace ortolan
