#include "formats/k_quant.h"

#include "host/error_text.h"

namespace ortolan {
namespace {

std::string ValidateZeroPoint(const GroupClaim& claim) {
  const SubgroupClaim& subgroups = claim.subgroups;
  const int64_t middle = int64_t{1} << (subgroups.bits - 1);
  if (claim.minimum_count != 0 || subgroups.minimum_count != 0) {
    if (subgroups.bits == 6) return "minimums are present, expected none with 6 bits";
    if (subgroups.zero_point != 0) {
      return ErrorText("subgroup_zero_point is ", subgroups.zero_point, ", expected 0 with minimums");
    }
    return {};
  }
  if (subgroups.zero_point == middle || (subgroups.zero_point == 0 && subgroups.bits < 6)) return {};
  return ErrorText("subgroup_zero_point is ", subgroups.zero_point, ", expected ", subgroups.bits < 6 ? "0 or " : "",
                   middle, " with ", subgroups.bits, " bits");
}

}  // namespace

std::string ValidateKQuants(const GroupClaim& claim) {
  const SubgroupClaim& subgroups = claim.subgroups;
  if (!IsSubgroupSize(subgroups.size)) {
    return ErrorText("subgroup_size is ", subgroups.size, ", expected 16 or 32");
  }
  if (subgroups.bits < 4 || subgroups.bits > 6) return ErrorText("bits is ", subgroups.bits, ", expected 4, 5 or 6");
  const int64_t panels = BitmapPanels(claim.n);
  const int64_t rows = kInt4Bitmap.PaddedK(claim.k) / subgroups.size;
  const int64_t expected = panels * rows * kPanelColumns;
  if (subgroups.scale_count != 0 && subgroups.scale_count != expected) {
    return ErrorText("subgroup_scales have ", subgroups.scale_count, " elements, expected ", expected, " (", panels,
                     " panels x ", rows, " subgroups x ", kPanelColumns, ") or none");
  }
  const int64_t groups = panels * ScaleRows(claim.k, claim.group) * kPanelColumns;
  if (claim.minimum_count != 0 && claim.minimum_count != groups) {
    return ErrorText("minimums have ", claim.minimum_count, " elements, expected ", groups, " or none");
  }
  if (subgroups.minimum_count != 0 && (claim.minimum_count == 0 || subgroups.minimum_count != expected)) {
    return ErrorText("subgroup_minimums have ", subgroups.minimum_count, " elements, expected ",
                     claim.minimum_count == 0 ? 0 : expected, " or none");
  }
  const int64_t high_bytes = panels * PanelHighBytes(claim.k, subgroups.bits);
  if (subgroups.high_bytes != high_bytes) {
    return ErrorText("high_bits hold ", subgroups.high_bytes, " bytes, expected ", high_bytes, " for ", subgroups.bits,
                     " bits");
  }
  return ValidateZeroPoint(claim);
}

}  // namespace ortolan
