// The product of a matrix A whose zeros are anywhere and a dense B, out of the numbers kernels; parallel and allocate
// are those of block_product.h.
#pragma once

#include <algorithm>
#include <cstdint>

#include "masked_matmul/block_product.h"

namespace ortolan {

// y = A B by Way::kNumbers; B is finite. No sum depends on how the work is divided.
template <typename Parallel, typename Allocate>
void MultiplyByNumbers(const MaskedMatMulKernel& kernel, const FloatRows& a, const FloatRows& b, float* y,
                       int64_t y_row_bytes, const Parallel& parallel, Allocate& allocate) {
  using namespace block_product;
  // Lists are made for so many rows and inputs at a time, 42 MB at most.
  constexpr int64_t kListedRows = 8 * kNumberRows;
  constexpr int64_t kListedInputs = 2048;
  const int64_t group = std::min(a.rows, kNumberRows);
  const int64_t most_groups = (std::min(a.rows, kListedRows) + group - 1) / group;
  const int64_t most_words = MaskWords(std::min(a.columns, kListedInputs));
  // Panels of the same width, so that the last one is no narrow rest.
  const int64_t blocks = BlockPanels(b.columns);
  const int64_t least_panels = (b.columns + kNumberColumns - 1) / kNumberColumns;
  const int64_t panel_blocks = (blocks + least_panels - 1) / least_panels;
  const int64_t panels = (blocks + panel_blocks - 1) / panel_blocks;
  const int64_t slots = std::min(most_groups * panels, kMostSlots);
  const int64_t list_numbers = group * kMaskBits + kMaskBits;
  float* values = New<float>(allocate, most_groups * most_words * list_numbers);
  uint8_t* inputs = New<uint8_t>(allocate, most_groups * most_words * list_numbers);
  uint16_t* list_rows = New<uint16_t>(allocate, most_groups * most_words * group);
  uint8_t* counts = New<uint8_t>(allocate, most_groups * most_words * group);
  int64_t* listed = New<int64_t>(allocate, most_groups * most_words);
  float* slot_panels = New<float>(allocate, slots * kMaskBits * kNumberColumns);
  float* slot_sums = New<float>(allocate, slots * group * kNumberColumns);
  RowsArgs of_b;
  of_b.b = b.data;
  of_b.n = b.columns;
  of_b.count = b.rows;
  const auto list = [&](int64_t place) {
    return NumberList{values + place * list_numbers, inputs + place * list_numbers, list_rows + place * group,
                      counts + place * group};
  };

  for (int64_t first_row = 0; first_row < a.rows; first_row += kListedRows) {
    const FloatRows of_rows = a.Rows(first_row, kListedRows);
    const int64_t groups = (of_rows.rows + group - 1) / group;
    for (int64_t first_input = 0; first_input < a.columns; first_input += kListedInputs) {
      const int64_t words = MaskWords(std::min(a.columns - first_input, kListedInputs));
      parallel(groups * words, [&](int64_t place) {
        FloatRows rows = of_rows.Rows(place / words * group, group);
        const int64_t input = first_input + place % words * kMaskBits;
        rows.data += input;
        rows.columns = std::min(kMaskBits, a.columns - input);
        listed[place] = kernel.list_numbers(rows, list(place));
      });
      parallel(slots, [&](int64_t slot) {
        float* panel_numbers = slot_panels + slot * kMaskBits * kNumberColumns;
        float* sums = slot_sums + slot * group * kNumberColumns;
        for (int64_t unit = slot; unit < groups * panels; unit += slots) {
          const int64_t first_of_group = unit / panels * group;
          const int64_t rows = std::min(group, of_rows.rows - first_of_group);
          const int64_t column = unit % panels * panel_blocks * kBlockColumns;
          const int64_t columns = std::min(panel_blocks * kBlockColumns, b.columns - column);
          std::fill_n(sums, rows * kNumberColumns, 0.0f);
          for (int64_t word = 0; word < words; ++word) {
            kernel.pack_inputs[0](of_b, first_input + word * kMaskBits, column, columns, panel_numbers);
            const int64_t place = unit / panels * words + word;
            kernel.multiply_numbers({list(place), listed[place], panel_numbers, BlockPanels(columns), sums});
          }
          for (int64_t i = 0; i < rows; ++i) {
            float* to =
                reinterpret_cast<float*>(reinterpret_cast<char*>(y) + (first_row + first_of_group + i) * y_row_bytes) +
                column;
            const float* from = sums + i * kNumberColumns;
            if (first_input == 0) {
              std::copy_n(from, columns, to);
            } else {
              for (int64_t j = 0; j < columns; ++j) to[j] += from[j];
            }
          }
        }
      });
    }
  }
}

}  // namespace ortolan
