#include "matmul/storage.h"

#include "formats/bitmap_int4.h"
#include "isa/features.h"

namespace ortolan {
namespace {

constexpr double kMostGrowth = 1.1;  // of dense storage

// Below this share of zeros dense storage is faster.
double DenseBelow(const BitmapLayout& layout) {
  switch (layout.value_bits) {
    case 16:
      return 0.07;
    case 8:
      return 0.11;
    default:
      return 0.3;
  }
}

}  // namespace

bool BitmapsAreFast(const BitmapLayout& layout) {
  // Weights of bytes and less take an instruction that expands bytes (AVX-512 VBMI).
  return layout.value_bits == 16 || ActiveFeatures().Has(feature_set::avx512);
}

bool IsWorthBitmap(const BitmapLayout& layout, int64_t k, int64_t n, int64_t stored) {
  const int64_t weights = BitmapPanels(n) * kPanelColumns * layout.PaddedK(k);
  const int64_t dense = weights * layout.value_bits / 8;
  const int64_t bitmap =
      weights / 8 + (stored * layout.value_bits + 7) / 8 + layout.Padding() + 8 * (BitmapPanels(n) + 1);
  const double zeros = 1.0 - static_cast<double>(stored) / static_cast<double>(k * n);
  return zeros >= DenseBelow(layout) || static_cast<double>(dense) > kMostGrowth * static_cast<double>(bitmap);
}

}  // namespace ortolan
