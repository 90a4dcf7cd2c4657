#include "formats/bitmap.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "formats/bf16.h"
#include "ort/error_text.h"

namespace ortolan {
namespace {

// The weight that bit i of row r of a tile stands for, relative to the tile's first input and column.
constexpr int64_t InputOf(int64_t row, int64_t bit) { return 2 * row + (bit & 1); }
constexpr int64_t ColumnOf(int64_t bit) { return bit >> 1; }

constexpr uint64_t LowBits(int64_t count) { return count >= 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1; }

template <typename T>
T Load(const uint8_t* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof(value));
  return value;
}

}  // namespace

BitmapMatrix PackBitmap(const float* w, int64_t row_stride, int64_t k, int64_t n, Storage storage) {
  const bool dense = storage == Storage::kDense;
  const int64_t panels = BitmapPanels(n);
  const int64_t tiles = BitmapTiles(k);
  BitmapMatrix packed;
  packed.k = k;
  packed.n = n;
  if (dense) {
    packed.values.reserve(static_cast<size_t>(panels * tiles * kBf16Bitmap.TileEntries()));
  } else {
    packed.masks.reserve(static_cast<size_t>(panels * tiles * kTileRows));
    packed.offsets.reserve(static_cast<size_t>(panels + 1));
    packed.offsets.push_back(0);
  }
  for (int64_t panel = 0; panel < panels; ++panel) {
    for (int64_t row = 0; row < tiles * kTileRows; ++row) {
      uint32_t bits = 0;
      for (int64_t bit = 0; bit < kRowValues; ++bit) {
        const int64_t input = InputOf(row, bit);
        const int64_t column = panel * kPanelColumns + ColumnOf(bit);
        uint16_t value = input < k && column < n ? RoundToBf16(w[input * row_stride + column]) : uint16_t{0};
        if ((value & 0x7fffu) == 0) {
          if (!dense) continue;
          value = 0;
        }
        bits |= uint32_t{1} << bit;
        packed.values.push_back(value);
      }
      if (!dense) packed.masks.push_back(bits);
    }
    if (!dense) packed.offsets.push_back(static_cast<int64_t>(packed.values.size()));
  }
  if (!dense) packed.values.resize(packed.values.size() + kBitmapPadding, 0);
  return packed;
}

void UnpackBitmap(const BitmapView& view, float* w, int64_t row_stride, int64_t column_stride) {
  const int64_t rows = BitmapTiles(view.k) * kTileRows;
  for (int64_t panel = 0; panel < BitmapPanels(view.n); ++panel) {
    const uint8_t* masks = view.PanelMasks(kBf16Bitmap, panel);
    const uint8_t* value = view.PanelValues(kBf16Bitmap, panel);
    const bool all_columns = (panel + 1) * kPanelColumns <= view.n;
    for (int64_t row = 0; row < rows; ++row) {
      const uint32_t mask = view.IsDense() ? ~uint32_t{0} : Load<uint32_t>(masks + row * sizeof(uint32_t));
      float* to = w + InputOf(row, 0) * row_stride + panel * kPanelColumns * column_stride;
      if (all_columns && InputOf(row, 1) < view.k) {
        // No branches: behind the last value there is padding, and dense storage has no bits that are not set.
        for (int64_t column = 0; column < kPanelColumns; ++column, to += column_stride) {
          for (int64_t input = 0; input < 2; ++input) {
            const uint32_t stored = (mask >> (2 * column + input)) & 1u;
            to[input * row_stride] = Bf16ToFloat(static_cast<uint16_t>(Load<uint16_t>(value) & (0u - stored)));
            value += stored * kValueBytes;
          }
        }
        continue;
      }
      for (int64_t bit = 0; bit < kRowValues; ++bit) {
        const int64_t input = InputOf(row, bit);
        const int64_t column = ColumnOf(bit);
        float weight = 0.0f;
        if (((mask >> bit) & 1u) != 0) {
          weight = Bf16ToFloat(Load<uint16_t>(value));
          value += kValueBytes;
        }
        if (input < view.k && panel * kPanelColumns + column < view.n) {
          to[(bit & 1) * row_stride + column * column_stride] = weight;
        }
      }
    }
  }
}

std::string ValidateBitmap(const BitmapClaim& claim, const BitmapLayout& layout) {
  if (claim.k < 1 || claim.k > layout.max_k || claim.n < 1 || claim.n > kMaxDimension) {
    return ErrorText("k and n are ", claim.k, " and ", claim.n, ", expected 1 to ", layout.max_k, " and 1 to ",
                     kMaxDimension);
  }
  const int64_t panels = BitmapPanels(claim.n);
  const int64_t tiles = layout.Tiles(claim.k);
  const int64_t mask_bytes = panels * tiles * layout.TileMaskBytes();
  const int64_t padding = layout.Padding();
  if (claim.IsDense()) {
    const int64_t entries = panels * tiles * layout.TileEntries();
    if (claim.value_count == entries) return {};
    return ErrorText("without masks and offsets values hold ", claim.value_count, " entries, expected ", entries, " (",
                     panels, " panels x ", tiles, " tiles x ", layout.TileEntries(), ") for k=", claim.k,
                     ", n=", claim.n);
  }
  if (claim.mask_bytes != mask_bytes) {
    return ErrorText("masks hold ", claim.mask_bytes, " bytes, expected ", mask_bytes, " (", panels, " panels x ",
                     tiles, " tiles x ", layout.TileMaskBytes(), ") for k=", claim.k, ", n=", claim.n);
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
    // The padding may not be counted as values: a kernel loads as much from any position.
    if (end > claim.value_count - padding) {
      return ErrorText("offsets[", panel + 1, "] is ", end, ", but values hold ", claim.value_count,
                       " entries of which the last ", padding, " are padding");
    }
  }
  if (claim.value_count != claim.offsets[panels] + padding) {
    return ErrorText("values hold ", claim.value_count, " entries, expected ", claim.offsets[panels] + padding,
                     " (the last offset, ", claim.offsets[panels], ", + ", padding, " of padding)");
  }
  const uint8_t* row_bytes = claim.masks;
  for (int64_t panel = 0; panel < panels; ++panel) {
    const int64_t columns = std::min(kPanelColumns, claim.n - panel * kPanelColumns);
    const uint64_t in_columns = LowBits(columns * layout.row_inputs);
    int64_t stored[2] = {};  // in even and in odd rows
    for (int64_t row = 0; row < tiles * kTileRows; ++row, row_bytes += layout.RowMaskBytes()) {
      const uint64_t bits = layout.RowBits() == 64 ? Load<uint64_t>(row_bytes) : Load<uint32_t>(row_bytes);
      const uint64_t in_inputs = LowBits(std::clamp<int64_t>(claim.k - row * layout.row_inputs, 0, layout.row_inputs)) *
                                 (layout.row_inputs == 4 ? uint64_t{0x1111111111111111} : uint64_t{0x5555555555555555});
      if ((bits & ~(in_columns & in_inputs)) != 0) {
        return ErrorText("masks: row ", row, " of panel ", panel, " has bits set outside of the ", claim.k, " x ",
                         claim.n, " matrix");
      }
      stored[row & 1] += std::popcount(bits);
    }
    // int4: a byte holds a weight of an even row and one of an odd row.
    const int64_t needed = layout.value_bits == 4 ? std::max(stored[0], stored[1]) : stored[0] + stored[1];
    const int64_t expected = claim.offsets[panel + 1] - claim.offsets[panel];
    if (needed != expected) {
      return ErrorText("masks of panel ", panel, " have ", stored[0] + stored[1], " bits set, which take ", needed,
                       " entries of values, but offsets give it ", expected);
    }
  }
  return {};
}

}  // namespace ortolan
