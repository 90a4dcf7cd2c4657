#include "formats/group.h"

#include <algorithm>

#include "formats/k_quant.h"
#include "host/error_text.h"

namespace ortolan {
namespace {

std::string ValidateZeroPoints(const GroupClaim& claim) {
  // Compute the maximum, because compilers do not vectorize a loop with an early exit.
  if (claim.zero_point_steps == kFractionSteps) return {};  // every byte is valid
  uint8_t largest = 0;
  for (int64_t i = 0; i < claim.zero_point_count; ++i) largest = std::max(largest, claim.zero_points[i]);
  if (largest <= kLargestZeroPoint) return {};
  return ErrorText("zero_points hold ", static_cast<int>(largest), ", expected 0 to ", kLargestZeroPoint);
}

}  // namespace

std::string ValidateGroups(const BitmapLayout& layout, const GroupClaim& claim) {
  if (claim.k < 1 || claim.k > layout.max_k || claim.n < 1 || claim.n > kMaxDimension) {
    return ErrorText("k x n is ", claim.k, " x ", claim.n, ", expected 1 to ", layout.max_k, " x 1 to ", kMaxDimension);
  }
  const bool in_subgroups = claim.subgroups.size != 0;
  if (in_subgroups && layout.value_bits != 4) {
    return ErrorText("subgroup_size is ", claim.subgroups.size, ", expected 0 with ", layout.value_bits,
                     "-bit weights");
  }
  if (!in_subgroups && claim.subgroups.bits != 4) {
    return ErrorText("bits is ", claim.subgroups.bits, ", expected 4 without subgroups");
  }
  const int64_t scale_bits = claim.subgroups.scale_bits;
  if (scale_bits != 0 && (!in_subgroups || scale_bits != kKQuantScaleBits)) {
    return ErrorText("subgroup_scale_bits is ", scale_bits, ", expected ", in_subgroups ? kKQuantScaleBits : 0,
                     " or none");
  }
  if (scale_bits != 0 && !IsGroupSizeOfKQuants(claim.group)) {
    return ErrorText("group_size is ", claim.group, ", expected 32, 64, 128 or 256");
  }
  if (in_subgroups && scale_bits == 0 && !IsGroupSizeOfSubgroups(claim.group)) {
    return ErrorText("group_size is ", claim.group, ", expected 64, 128 or 256 with subgroups");
  }
  if (!in_subgroups && !IsGroupSize(claim.group)) {
    return ErrorText("group_size is ", claim.group, ", expected 32, 64 or 128");
  }
  const int64_t panels = BitmapPanels(claim.n);
  const int64_t groups = ScaleRows(claim.k, claim.group);
  const int64_t bytes = GroupWeightBytes(layout, claim.k, claim.n);
  if (claim.weight_bytes != bytes) {
    return ErrorText("weights hold ", claim.weight_bytes, " bytes, expected ", bytes);
  }
  const int64_t expected = panels * groups * kPanelColumns;
  if (claim.scale_count != expected) {
    return ErrorText("scales have ", claim.scale_count, " elements, expected ", expected, " (", panels, " panels x ",
                     groups, " groups x ", kPanelColumns, ")");
  }
  if (scale_bits != 0) {
    if (claim.zero_point_count == 0) return ValidateKQuants(claim);
    return ErrorText("zero_points have ", claim.zero_point_count, " elements, expected none with subgroups");
  }
  if (in_subgroups) {
    if (claim.zero_point_count != 0 || claim.minimum_count != 0) {
      return ErrorText("zero_points have ", claim.zero_point_count, " elements and minimums ", claim.minimum_count,
                       ", expected neither with subgroups");
    }
    return ValidateSubgroups(claim.subgroups, claim.k, claim.n);
  }
  if (claim.zero_point_count != 0 && claim.minimum_count != 0) {
    return ErrorText("zero_points have ", claim.zero_point_count, " elements and minimums ", claim.minimum_count,
                     ", expected one of them or neither");
  }
  if (claim.minimum_count != 0 && claim.minimum_count != expected) {
    return ErrorText("minimums have ", claim.minimum_count, " elements, expected ", expected, " or none");
  }
  if (claim.zero_point_steps != 1 && claim.zero_point_steps != kFractionSteps) {
    return ErrorText("zero_point_steps is ", claim.zero_point_steps, ", expected 1 or ", kFractionSteps);
  }
  if (claim.zero_point_count == 0) return {};
  if (claim.zero_point_count != expected) {
    return ErrorText("zero_points have ", claim.zero_point_count, " elements, expected ", expected, " or none");
  }
  return ValidateZeroPoints(claim);
}

}  // namespace ortolan
