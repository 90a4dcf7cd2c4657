#include "formats/subgroup.h"

#include "host/error_text.h"

namespace ortolan {

std::string ValidateSubgroups(const SubgroupClaim& claim, int64_t k, int64_t n) {
  if (!IsSubgroupSize(claim.size)) return ErrorText("subgroup_size is ", claim.size, ", expected 0, 16 or 32");
  if (claim.bits < 4 || claim.bits > 6) return ErrorText("bits is ", claim.bits, ", expected 4, 5 or 6");
  const int64_t panels = BitmapPanels(n);
  const int64_t rows = kInt4Bitmap.PaddedK(k) / claim.size;
  if (claim.scale_count != panels * rows * kPanelColumns) {
    return ErrorText("subgroup_scales have ", claim.scale_count, " elements, expected ", panels * rows * kPanelColumns,
                     " (", panels, " panels x ", rows, " subgroups x ", kPanelColumns, ")");
  }
  const int64_t high_bytes = panels * PanelHighBytes(k, claim.bits);
  if (claim.high_bytes != high_bytes) {
    return ErrorText("high_bits hold ", claim.high_bytes, " bytes, expected ", high_bytes, " for ", claim.bits,
                     " bits");
  }
  return {};
}

std::vector<uint8_t> PackHighBits(const uint8_t* q, int64_t row_stride, int64_t k, int64_t n, int64_t bits) {
  constexpr int64_t kRowInputs = kInt4Bitmap.row_inputs;
  constexpr int64_t kRowBytes = kPanelColumns * kRowInputs;
  const int64_t high_bits = bits - 4;
  const int64_t rows_together = 8 / high_bits;
  const int64_t panel_bytes = PanelHighBytes(k, bits);
  std::vector<uint8_t> packed(static_cast<size_t>(BitmapPanels(n) * panel_bytes));
  for (int64_t l = 0; l < k; ++l) {
    const int64_t row = l / kRowInputs;
    const int64_t first = row / rows_together * kRowBytes + l % kRowInputs;
    const int64_t shift = 8 - high_bits * (row % rows_together + 1);
    for (int64_t j = 0; j < n; ++j) {
      const int64_t byte = j / kPanelColumns * panel_bytes + first + j % kPanelColumns * kRowInputs;
      packed[static_cast<size_t>(byte)] |= static_cast<uint8_t>(q[l * row_stride + j] >> 4 << shift);
    }
  }
  return packed;
}

}  // namespace ortolan
