#include "formats/scales.h"

#include <algorithm>
#include <vector>

#include "formats/bf16.h"

namespace ortolan {
void PackScales(const float* scales, int64_t groups, int64_t n, float* packed) {
  PackGroupRows(scales, groups, n, packed);
}

void PackScales(const float* scales, int64_t groups, int64_t n, uint16_t* packed) {
  std::vector<uint16_t> rounded(static_cast<size_t>(groups * n));
  std::transform(scales, scales + groups * n, rounded.begin(), RoundToBf16);
  PackGroupRows(rounded.data(), groups, n, packed);
}

}  // namespace ortolan
