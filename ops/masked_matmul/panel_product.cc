#include <algorithm>

#include "host/thread_scratch.h"
#include "masked_matmul/products.h"

namespace ortolan {
namespace {

// A product split into groups of rows and panels of columns. All panels but the last have the same width, chosen so
// that the last panel is not narrow.
struct Panels {
  Panels(int64_t rows, int64_t n) : group(std::min(rows, kDensePanelRows)), groups((rows + group - 1) / group) {
    const int64_t least = (n + kDensePanelColumns - 1) / kDensePanelColumns;
    columns = (BlockPanels(n) + least - 1) / least * kBlockColumns;
    count = (n + columns - 1) / columns;
  }

  int64_t group, groups;   // rows of a group, number of groups
  int64_t columns, count;  // columns of a panel, number of panels
};

// Calls add(group, column, columns, panel, sums) for each group of rows and panel of columns, which accumulates
// products in sums, then adds the sums to y [rows][n], or stores them. panel and sums are scratch; sums start at zero.
template <typename Add>
void ForEachPanel(Host& host, const Panels& panels, int64_t rows, int64_t n, bool add_to_y, float* y, const Add& add) {
  const int64_t groups = (rows + panels.group - 1) / panels.group;
  const int64_t scratch_floats = (kMaskBits + panels.group) * kDensePanelColumns;
  ForEachWithScratch(host, groups * panels.count, scratch_floats * kFloatBytes, [&](int64_t unit, char* scratch) {
    float* panel = reinterpret_cast<float*>(scratch);
    float* sums = panel + kMaskBits * kDensePanelColumns;
    const int64_t group = unit / panels.count;
    const int64_t first_row = group * panels.group;
    const int64_t last_row = std::min(rows, first_row + panels.group);
    const int64_t column = unit % panels.count * panels.columns;
    const int64_t columns = std::min(panels.columns, n - column);
    std::fill_n(sums, (last_row - first_row) * kDensePanelColumns, 0.0f);
    add(group, column, columns, panel, sums);
    for (int64_t i = first_row; i < last_row; ++i) {
      float* to = y + i * n + column;
      const float* from = sums + (i - first_row) * kDensePanelColumns;
      if (add_to_y) {
        for (int64_t j = 0; j < columns; ++j) to[j] += from[j];
      } else {
        std::copy_n(from, columns, to);
      }
    }
  });
}

}  // namespace

void MultiplyByValues(const MaskedMatMulKernel& kernel, const FloatRows& a, const FloatRows& b, float* y,
                      CallMemory& memory) {
  // Lists are built for this many rows and inputs at a time, 42 MB at most.
  constexpr int64_t kListedRows = 8 * kDensePanelRows;
  constexpr int64_t kListedInputs = 2048;
  const Panels panels(std::min(a.rows, kListedRows), b.columns);
  const int64_t group = panels.group;
  const int64_t list_values = group * kMaskBits + kMaskBits;
  const int64_t lists = panels.groups * MaskWords(std::min(a.columns, kListedInputs));
  float* values = memory.New<float>(lists * list_values);
  uint8_t* inputs = memory.New<uint8_t>(lists * list_values);
  uint16_t* list_rows = memory.New<uint16_t>(lists * group);
  uint8_t* counts = memory.New<uint8_t>(lists * group);
  int64_t* listed = memory.New<int64_t>(lists);
  const auto list = [&](int64_t slot) {
    return ValueList{values + slot * list_values, inputs + slot * list_values, list_rows + slot * group,
                     counts + slot * group};
  };
  RowsArgs of_b;
  of_b.b = b.data;
  of_b.n = b.columns;
  of_b.count = b.rows;

  for (int64_t first_row = 0; first_row < a.rows; first_row += kListedRows) {
    const FloatRows rows = a.Rows(first_row, kListedRows);
    for (int64_t first_input = 0; first_input < a.columns; first_input += kListedInputs) {
      const int64_t words = MaskWords(std::min(a.columns - first_input, kListedInputs));
      memory.host().ParallelFor((rows.rows + group - 1) / group * words, [&](int64_t slot) {
        FloatRows part = rows.Rows(slot / words * group, group);
        const int64_t input = first_input + slot % words * kMaskBits;
        part.data += input;
        part.columns = std::min(kMaskBits, a.columns - input);
        listed[slot] = kernel.list_values(part, list(slot));
      });
      const auto add = [&](int64_t of_group, int64_t column, int64_t columns, float* panel, float* sums) {
        for (int64_t word = 0; word < words; ++word) {
          kernel.pack_inputs[0](of_b, first_input + word * kMaskBits, column, columns, panel);
          const int64_t slot = of_group * words + word;
          kernel.multiply_values({list(slot), listed[slot], panel, BlockPanels(columns), sums});
        }
      };
      ForEachPanel(memory.host(), panels, rows.rows, b.columns, first_input > 0, y + first_row * b.columns, add);
    }
  }
}

void MultiplyByPanels(const MaskedMatMulKernel& kernel, ElementType element_type, const RowsArgs& args,
                      CallMemory& memory) {
  const Panels panels(args.m, args.n);
  PackInputsFn* const pack = kernel.pack_inputs[static_cast<int>(element_type)];
  const auto add = [&](int64_t group, int64_t column, int64_t columns, float* panel, float* sums) {
    const int64_t first_row = group * panels.group;
    for (int64_t first = 0; first < args.count; first += kMaskBits) {
      pack(args, first, column, columns, panel);
      const FloatRows a{args.a + first_row * args.a_row + first, args.a_row * kFloatBytes,
                        std::min(panels.group, args.m - first_row), std::min(kMaskBits, args.count - first)};
      kernel.multiply_panel(a, panel, BlockPanels(columns), sums);
    }
  };
  ForEachPanel(memory.host(), panels, args.m, args.n, false, args.y, add);
}

}  // namespace ortolan
