#include "formats/scales.h"

#include "formats/bitmap.h"
#include "support/bf16.h"

namespace ortolan {
namespace {

template <typename T, typename Convert>
void Pack(const float* scales, int64_t groups, int64_t n, T* packed, Convert convert) {
  for (int64_t panel = 0; panel < BitmapPanels(n); ++panel) {
    for (int64_t group = 0; group < groups; ++group) {
      for (int64_t j = panel * kPanelColumns; j < (panel + 1) * kPanelColumns; ++j) {
        *packed++ = j < n ? convert(scales[group * n + j]) : T{0};
      }
    }
  }
}

}  // namespace

void PackScales(const float* scales, int64_t groups, int64_t n, float* packed) {
  Pack(scales, groups, n, packed, [](float scale) { return scale; });
}

void PackScales(const float* scales, int64_t groups, int64_t n, uint16_t* packed) {
  Pack(scales, groups, n, packed, RoundToBf16);
}

}  // namespace ortolan
