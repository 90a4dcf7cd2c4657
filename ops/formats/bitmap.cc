#include "formats/bitmap.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "support/bf16.h"
#include "support/error_text.h"

namespace ortolan {
namespace {

// The weight that bit i of row r of a tile stands for, relative to the tile's first input and column.
constexpr int64_t InputOf(int64_t row, int64_t bit) { return 2 * row + (bit & 1); }
constexpr int64_t ColumnOf(int64_t bit) { return bit >> 1; }

template <typename T>
T Load(const uint8_t* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof(value));
  return value;
}

}  // namespace

BitmapMatrix PackBitmap(const float* w, int64_t row_stride, int64_t k, int64_t n) {
  const int64_t panels = BitmapPanels(n);
  const int64_t tiles = BitmapTiles(k);
  BitmapMatrix packed;
  packed.k = k;
  packed.n = n;
  packed.masks.resize(static_cast<size_t>(panels * tiles * kTileRows));
  packed.offsets.reserve(static_cast<size_t>(panels + 1));
  packed.offsets.push_back(0);
  uint32_t* mask = packed.masks.data();
  for (int64_t panel = 0; panel < panels; ++panel) {
    const int64_t columns = std::min(kPanelColumns, n - panel * kPanelColumns);
    for (int64_t row = 0; row < tiles * kTileRows; ++row, ++mask) {
      uint32_t bits = 0;
      for (int64_t bit = 0; bit < 2 * columns; ++bit) {
        const int64_t input = InputOf(row, bit);
        if (input >= k) continue;
        const uint16_t value = RoundToBf16(w[input * row_stride + panel * kPanelColumns + ColumnOf(bit)]);
        if ((value & 0x7fffu) == 0) continue;
        bits |= uint32_t{1} << bit;
        packed.values.push_back(value);
      }
      *mask = bits;
    }
    packed.offsets.push_back(static_cast<int64_t>(packed.values.size()));
  }
  packed.values.resize(packed.values.size() + kBitmapPadding, 0);
  return packed;
}

void UnpackBitmap(const BitmapView& view, float* w, int64_t row_stride) {
  const int64_t rows = BitmapTiles(view.k) * kTileRows;
  for (int64_t panel = 0; panel < BitmapPanels(view.n); ++panel) {
    const uint8_t* masks = view.masks + panel * rows * sizeof(uint32_t);
    const uint8_t* value = view.values + view.offsets[panel] * kValueBytes;
    for (int64_t row = 0; row < rows; ++row) {
      const uint32_t mask = Load<uint32_t>(masks + row * sizeof(uint32_t));
      for (int64_t bit = 0; bit < kRowValues; ++bit) {
        const int64_t input = InputOf(row, bit);
        const int64_t column = panel * kPanelColumns + ColumnOf(bit);
        float weight = 0.0f;
        if (((mask >> bit) & 1u) != 0) {
          weight = Bf16ToFloat(Load<uint16_t>(value));
          value += kValueBytes;
        }
        if (input < view.k && column < view.n) w[input * row_stride + column] = weight;
      }
    }
  }
}

std::string ValidateBitmap(const BitmapClaim& claim) {
  if (claim.k < 1 || claim.k > kMaxDimension || claim.n < 1 || claim.n > kMaxDimension) {
    return ErrorText("k and n are ", claim.k, " and ", claim.n, ", expected 1 to ", kMaxDimension, " each");
  }
  const int64_t panels = BitmapPanels(claim.n);
  const int64_t tiles = BitmapTiles(claim.k);
  if (claim.mask_bytes != panels * tiles * kTileMaskBytes) {
    return ErrorText("masks hold ", claim.mask_bytes, " bytes, expected ", panels * tiles * kTileMaskBytes, " (",
                     panels, " panels x ", tiles, " tiles x ", kTileMaskBytes, ") for k=", claim.k, ", n=", claim.n);
  }
  if (claim.offset_count != panels + 1) {
    return ErrorText("offsets hold ", claim.offset_count, " entries, expected ", panels + 1,
                     " (panels + 1) for n=", claim.n);
  }
  if (claim.offsets[0] != 0) return ErrorText("offsets[0] is ", claim.offsets[0], ", expected 0");
  for (int64_t panel = 0; panel < panels; ++panel) {
    const int64_t begin = claim.offsets[panel];
    const int64_t end = claim.offsets[panel + 1];
    if (end < begin) return ErrorText("offsets[", panel + 1, "] is ", end, ", less than the one before it, ", begin);
    // The padding may not be counted as values: a kernel loads kBitmapPadding values from any position.
    if (end > claim.value_count - kBitmapPadding) {
      return ErrorText("offsets[", panel + 1, "] is ", end, ", but values hold ", claim.value_count,
                       " entries of which the last ", kBitmapPadding, " are padding");
    }
  }
  if (claim.value_count != claim.offsets[panels] + kBitmapPadding) {
    return ErrorText("values hold ", claim.value_count, " entries, expected ", claim.offsets[panels] + kBitmapPadding,
                     " (the last offset, ", claim.offsets[panels], ", + ", kBitmapPadding, " of padding)");
  }
  const uint8_t* row_bytes = claim.masks;
  for (int64_t panel = 0; panel < panels; ++panel) {
    const int64_t columns = std::min(kPanelColumns, claim.n - panel * kPanelColumns);
    const uint32_t in_columns = columns == kPanelColumns ? ~uint32_t{0} : (uint32_t{1} << (2 * columns)) - 1;
    int64_t stored = 0;
    for (int64_t row = 0; row < tiles * kTileRows; ++row, row_bytes += sizeof(uint32_t)) {
      const uint32_t bits = Load<uint32_t>(row_bytes);
      const int64_t inputs_left = claim.k - 2 * row;
      const uint32_t in_inputs = inputs_left >= 2 ? ~uint32_t{0} : inputs_left == 1 ? 0x55555555u : 0u;
      if ((bits & ~(in_columns & in_inputs)) != 0) {
        return ErrorText("masks: row ", row, " of panel ", panel, " has bits set outside of the ", claim.k, " x ",
                         claim.n, " matrix");
      }
      stored += std::popcount(bits);
    }
    const int64_t expected = claim.offsets[panel + 1] - claim.offsets[panel];
    if (stored != expected) {
      return ErrorText("masks of panel ", panel, " have ", stored, " bits set, but offsets give it ", expected,
                       " values");
    }
  }
  return {};
}

}  // namespace ortolan
