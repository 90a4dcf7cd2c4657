#include "formats/two_four.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "formats/bf16.h"
#include "host/error_text.h"

namespace ortolan {
namespace {

constexpr int64_t kQuad = 4;
constexpr int64_t kSpanQuads = kTwoFourSpanInputs / kQuad;
constexpr int kPositionBits = 2;
constexpr int64_t kBytePositions = 8 / kPositionBits;

// Positions of the two stored weights (slots) of a quad of a column.
struct Slots {
  int64_t entry;        // index in values of slot 0; slot 1 is next
  int entry_shift;      // int4: shift of the nibble
  int64_t position[2];  // bytes of masks with the positions
  int position_shift;
};

// Locates quad `quad` of column `column` of a panel, counted from the start of the panel.
template <const BitmapLayout& kLayout>
constexpr Slots SlotsOf(int64_t quad, int64_t column) {
  constexpr int64_t kRowQuads = kLayout.value_bits == 16 ? 1 : 2;
  constexpr int64_t kRowSlots = kTwoFourStored * kRowQuads * kPanelColumns;
  constexpr int64_t kEntryRows = kLayout.value_bits == 4 ? 2 : 1;  // rows that share an entry
  constexpr int64_t kSpanEntries = kRowSlots * kSpanQuads / kRowQuads / kEntryRows;
  const int64_t span = quad / kSpanQuads;
  const int64_t row = quad % kSpanQuads / kRowQuads;
  const int64_t slot = kTwoFourStored * (kRowQuads * column + quad % kRowQuads);
  const int64_t position = span * kTwoFourPositionBytes + slot * kLayout.EntryBytes() + row / kBytePositions;
  return {span * kSpanEntries + row / kEntryRows * kRowSlots + slot,
          kEntryRows == 2 && row % 2 == 1 ? 4 : 0,
          {position, position + kLayout.EntryBytes()},
          static_cast<int>(kPositionBits * (row % kBytePositions))};
}

// Calls each(panel, quad, column of the panel) for all quads of the packed matrix, including padding.
template <const BitmapLayout& kLayout, typename Each>
void ForEachQuad(int64_t k, int64_t n, const Each& each) {
  for (int64_t panel = 0; panel < BitmapPanels(n); ++panel) {
    for (int64_t quad = 0; quad < kLayout.PaddedK(k) / kQuad; ++quad) {
      for (int64_t column = 0; column < kPanelColumns; ++column) each(panel, quad, column);
    }
  }
}

uint16_t Stored(float weight) {
  const uint16_t bits = RoundToBf16(weight);
  return (bits & 0x7fffu) == 0 ? uint16_t{0} : bits;
}
int8_t Stored(int8_t weight) { return weight; }

template <typename Weight>
std::string Check(const Weight* w, int64_t row_stride, int64_t k, int64_t n) {
  for (int64_t first = 0; first < k; first += kQuad) {
    const int64_t end = std::min(first + kQuad, k);
    for (int64_t column = 0; column < n; ++column) {
      int64_t stored = 0;
      for (int64_t input = first; input < end; ++input) stored += Stored(w[input * row_stride + column]) != 0 ? 1 : 0;
      if (stored > kTwoFourStored) {
        return ErrorText(stored, " weights of inputs ", first, " to ", end - 1, " of column ", column,
                         " are nonzero, expected at most 2 of 4: the matrix is not 2:4 sparse");
      }
    }
  }
  return {};
}

// store(entry, slots, weight) writes a weight into its entry.
template <const BitmapLayout& kLayout, typename Value, typename Weight, typename Store>
TwoFourMatrix<Value> Pack(const Weight* w, int64_t row_stride, int64_t k, int64_t n, const Store& store) {
  const int64_t tiles = kLayout.Tiles(k);
  TwoFourMatrix<Value> packed;
  packed.masks.resize(static_cast<size_t>(BitmapPanels(n) * tiles * kLayout.TileMaskBytes()));
  packed.values.resize(static_cast<size_t>(BitmapPanels(n) * tiles * kLayout.TwoFourTileEntries()));
  ForEachQuad<kLayout>(k, n, [&](int64_t panel, int64_t quad, int64_t column) {
    decltype(Stored(Weight{})) weights[kQuad] = {};
    if (panel * kPanelColumns + column < n) {
      for (int64_t i = 0; i < std::min(kQuad, k - kQuad * quad); ++i) {
        weights[i] = Stored(w[(kQuad * quad + i) * row_stride + panel * kPanelColumns + column]);
      }
    }
    int positions[kQuad + kTwoFourStored] = {};
    int found = 0;
    for (int position = 0; position < kQuad && found < kTwoFourStored; ++position) {
      if (weights[position] != 0) positions[found++] = position;
    }
    if (found == 0) positions[1] = 1;
    if (found == 1 && positions[0] == 0) positions[1] = 1;
    if (found == 1 && positions[0] != 0) positions[1] = std::exchange(positions[0], 0);
    const Slots slots = SlotsOf<kLayout>(quad, column);
    for (int slot = 0; slot < kTwoFourStored; ++slot) {
      packed.masks[static_cast<size_t>(panel * tiles * kLayout.TileMaskBytes() + slots.position[slot])] |=
          static_cast<uint8_t>(positions[slot] << slots.position_shift);
      Value& entry =
          packed.values[static_cast<size_t>(panel * tiles * kLayout.TwoFourTileEntries() + slots.entry + slot)];
      store(entry, slots, weights[positions[slot]]);
    }
  });
  return packed;
}

// load(address of the entry, slots) returns the weight.
template <const BitmapLayout& kLayout, typename Weight, typename LoadWeight>
void Unpack(const BitmapView& view, Weight* w, int64_t row_stride, const LoadWeight& load) {
  ForEachQuad<kLayout>(view.k, view.n, [&](int64_t panel, int64_t quad, int64_t column) {
    const int64_t in_row = panel * kPanelColumns + column;
    if (in_row >= view.n) return;
    const int64_t inputs = std::min(kQuad, view.k - kQuad * quad);
    if (inputs <= 0) return;
    Weight* const to = w + kQuad * quad * row_stride + in_row;
    for (int64_t i = 0; i < inputs; ++i) to[i * row_stride] = Weight{0};
    const Slots slots = SlotsOf<kLayout>(quad, column);
    const uint8_t* const positions = view.PanelMasks(kLayout, panel);
    const uint8_t* const values = view.PanelValues(kLayout, panel);
    for (int slot = 0; slot < kTwoFourStored; ++slot) {
      const int64_t position = (positions[slots.position[slot]] >> slots.position_shift) & (kQuad - 1);
      if (position < inputs)
        to[position * row_stride] = load(values + (slots.entry + slot) * kLayout.EntryBytes(), slots);
    }
  });
}

// Returns a bit for each quad whose positions do not ascend. The positions of slots 0 are in the even units (bytes or
// u16) of `bits`, those of slots 1 in the odd ones.
template <int kUnitBits>
uint64_t NotAscending(uint64_t bits) {
  constexpr uint64_t kFirst = kUnitBits == 8 ? 0x00ff00ff00ff00ff : 0x0000ffff0000ffff;
  constexpr uint64_t kLow = 0x5555555555555555;
  const uint64_t other = bits >> kUnitBits;
  const uint64_t low = bits & kLow, high = (bits >> 1) & kLow;
  const uint64_t other_low = other & kLow, other_high = (other >> 1) & kLow;
  const uint64_t less = (~high & other_high) | (~(high ^ other_high) & ~low & other_low);
  return ~less & kLow & kFirst;
}

template <int kUnitBits>
std::string CheckPositions(const BitmapClaim& claim, const BitmapLayout& layout) {
  for (int64_t at = 0; at < claim.mask_bytes; at += kTwoFourPositionBytes) {
    uint64_t faults = 0;
    for (int64_t i = 0; i < kTwoFourPositionBytes; i += 8) {
      uint64_t bits;
      std::memcpy(&bits, claim.masks + at + i, sizeof(bits));
      faults |= NotAscending<kUnitBits>(bits);
    }
    if (faults != 0) {
      const int64_t panel_bytes = layout.Tiles(claim.k) * layout.TileMaskBytes();
      const int64_t input = at % panel_bytes / kTwoFourPositionBytes * kTwoFourSpanInputs;
      return ErrorText("masks (positions of 2:4 storage) of panel ", at / panel_bytes, ", inputs ", input, " to ",
                       input + kTwoFourSpanInputs - 1, ", do not ascend within each four inputs of a column");
    }
  }
  return {};
}

}  // namespace

std::string CheckTwoFour(const float* w, int64_t row_stride, int64_t k, int64_t n) {
  return Check(w, row_stride, k, n);
}
std::string CheckTwoFour(const int8_t* q, int64_t row_stride, int64_t k, int64_t n) {
  return Check(q, row_stride, k, n);
}

TwoFourMatrix<uint16_t> PackTwoFour(const float* w, int64_t row_stride, int64_t k, int64_t n) {
  return Pack<kBf16Bitmap, uint16_t>(w, row_stride, k, n,
                                     [](uint16_t& entry, const Slots&, uint16_t weight) { entry = weight; });
}

TwoFourMatrix<uint8_t> PackTwoFourInt8(const int8_t* q, int64_t row_stride, int64_t k, int64_t n) {
  return Pack<kInt8Bitmap, uint8_t>(
      q, row_stride, k, n, [](uint8_t& entry, const Slots&, int8_t weight) { entry = static_cast<uint8_t>(weight); });
}

TwoFourMatrix<uint8_t> PackTwoFourInt4(const int8_t* q, int64_t row_stride, int64_t k, int64_t n) {
  return Pack<kInt4Bitmap, uint8_t>(q, row_stride, k, n, [](uint8_t& entry, const Slots& slots, int8_t weight) {
    entry |= static_cast<uint8_t>(((weight + kInt4Bias) & 0xf) << slots.entry_shift);
  });
}

void UnpackTwoFour(const BitmapView& view, float* w, int64_t row_stride) {
  Unpack<kBf16Bitmap>(view, w, row_stride, [](const uint8_t* entry, const Slots&) {
    uint16_t bits;
    std::memcpy(&bits, entry, sizeof(bits));
    return Bf16ToFloat(bits);
  });
}

void UnpackTwoFourInt8(const BitmapView& view, int8_t* q, int64_t row_stride) {
  Unpack<kInt8Bitmap>(view, q, row_stride,
                      [](const uint8_t* entry, const Slots&) { return static_cast<int8_t>(*entry); });
}

void UnpackTwoFourInt4(const BitmapView& view, int8_t* q, int64_t row_stride) {
  Unpack<kInt4Bitmap>(view, q, row_stride, [](const uint8_t* entry, const Slots& slots) {
    return static_cast<int8_t>(((*entry >> slots.entry_shift) & 0xf) - kInt4Bias);
  });
}

std::string ValidateStored(const BitmapClaim& claim, const BitmapLayout& layout) {
  const bool in_range = claim.k >= 1 && claim.k <= layout.max_k && claim.n >= 1 && claim.n <= kMaxDimension;
  if (!in_range || !claim.IsTwoFour()) return ValidateBitmap(claim, layout);
  const int64_t tiles = BitmapPanels(claim.n) * layout.Tiles(claim.k);
  const int64_t mask_bytes = tiles * layout.TileMaskBytes();
  const int64_t entries = tiles * layout.TwoFourTileEntries();
  if (claim.mask_bytes != mask_bytes) {
    return ErrorText("masks hold ", claim.mask_bytes, " bytes, expected ", mask_bytes, " (", tiles, " tiles x ",
                     layout.TileMaskBytes(), ") for k=", claim.k, ", n=", claim.n);
  }
  if (claim.value_count != entries) {
    return ErrorText("values hold ", claim.value_count, " entries, expected ", entries, " (2:4 storage, ", tiles,
                     " tiles x ", layout.TwoFourTileEntries(), ") for k=", claim.k, ", n=", claim.n);
  }
  return layout.EntryBytes() == 2 ? CheckPositions<16>(claim, layout) : CheckPositions<8>(claim, layout);
}

}  // namespace ortolan
