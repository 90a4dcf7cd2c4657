#include "matmul/storage.h"

#include "formats/bitmap_int4.h"
#include "formats/bitmap_int8.h"
#include "host/error_text.h"
#include "isa/features.h"

namespace ortolan {
namespace {

constexpr double kMostGrowth = 1.1;  // relative to dense storage

// Fraction of zeros below which dense storage is faster.
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
  // Weights of one byte or less need the instruction that expands bytes (AVX-512 VBMI).
  return layout.value_bits == 16 || ActiveFeatures().Has(feature_set::avx512);
}

bool GainsFromPairs() {
  const Features active = ActiveFeatures();
  return active.Has(feature_set::avx2) && !active.Has(feature_set::avxvnni) && !active.Has(feature_set::avx512bw);
}

bool PairsAreKnownToFit(const BitmapView& view) { return GainsFromPairs() && PairsFitInt8(view); }

bool IsWorthBitmap(const BitmapLayout& layout, int64_t k, int64_t n, int64_t stored) {
  const int64_t weights = BitmapPanels(n) * kPanelColumns * layout.PaddedK(k);
  const int64_t dense = weights * layout.value_bits / 8;
  const int64_t bitmap =
      weights / 8 + (stored * layout.value_bits + 7) / 8 + layout.Padding() + 8 * (BitmapPanels(n) + 1);
  const double zeros = 1.0 - static_cast<double>(stored) / static_cast<double>(k * n);
  return zeros >= DenseBelow(layout) || static_cast<double>(dense) > kMostGrowth * static_cast<double>(bitmap);
}

BitmapView StoredBytes::View() const {
  BitmapView view;
  view.k = k;
  view.n = n;
  view.values = values.data();
  if (!masks.empty()) {
    view.masks = masks.data();
    view.offsets = offsets.data();
  }
  return view;
}

StoredBytes BytesOf(const BitmapLayout& layout, const BitmapView& view) {
  const int64_t panels = BitmapPanels(view.n), tiles = panels * layout.Tiles(view.k);
  int64_t entries = tiles * layout.TileEntries();
  StoredBytes stored;
  stored.k = view.k;
  stored.n = view.n;
  if (!view.IsDense()) {
    stored.masks = {view.masks, static_cast<size_t>(tiles * layout.TileMaskBytes())};
    stored.offsets = {view.offsets, static_cast<size_t>(panels + 1)};
    entries = stored.offsets.back() + layout.Padding();
  }
  stored.values = {view.values, static_cast<size_t>(entries * layout.EntryBytes())};
  return stored;
}

std::string WhyNotStored(const BitmapLayout& layout, const StoredBytes& stored) {
  const int64_t value_bytes = static_cast<int64_t>(stored.values.size());
  if (value_bytes % layout.EntryBytes() != 0) return ErrorText("values hold ", value_bytes, " bytes");
  BitmapClaim claim;
  claim.k = stored.k;
  claim.n = stored.n;
  claim.masks = stored.masks.data();
  claim.mask_bytes = static_cast<int64_t>(stored.masks.size());
  claim.value_count = value_bytes / layout.EntryBytes();
  claim.offsets = stored.offsets.data();
  claim.offset_count = static_cast<int64_t>(stored.offsets.size());
  return ValidateBitmap(claim, layout);
}

}  // namespace ortolan
