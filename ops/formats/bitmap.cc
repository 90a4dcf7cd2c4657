#include "formats/bitmap.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "formats/bf16.h"
#include "formats/bitmap_int4.h"
#include "host/error_text.h"

namespace ortolan {
namespace {

constexpr uint64_t LowBits(int64_t count) { return count >= 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1; }

template <typename T>
T Load(const uint8_t* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof(value));
  return value;
}

uint64_t LoadMask(const uint8_t* bytes, const BitmapLayout& layout) {
  return layout.RowBits() == 64 ? Load<uint64_t>(bytes) : Load<uint32_t>(bytes);
}

// int4: even rows are in low nibbles, odd rows in high nibbles.
constexpr int ShiftOf(int64_t row) { return row % 2 == 0 ? 0 : 4; }

// Calls at(bit, input, column) for the weights of a row of a panel, in order.
template <const BitmapLayout& kLayout, typename At>
void ForEachWeight(int64_t panel, int64_t row, const At& at) {
  for (int64_t bit = 0; bit < kLayout.RowBits(); ++bit) {
    at(bit, kLayout.row_inputs * row + bit % kLayout.row_inputs, panel * kPanelColumns + bit / kLayout.row_inputs);
  }
}

// Packs w, row-major [k, n]. convert(weight) gives the value to store; a 0 is stored only in dense storage. Calls
// store(values, row, weight) for each stored weight, panel_end(values) after each panel.
template <const BitmapLayout& kLayout, typename Matrix, typename Weight, typename Convert, typename Store,
          typename PanelEnd>
Matrix Pack(const Weight* w, int64_t row_stride, int64_t k, int64_t n, Storage storage, const Convert& convert,
            const Store& store, const PanelEnd& panel_end) {
  const bool dense = storage == Storage::kDense;
  const int64_t panels = BitmapPanels(n);
  const int64_t rows = kLayout.Tiles(k) * kTileRows;
  Matrix packed;
  if (dense) {
    packed.values.reserve(static_cast<size_t>(panels * kLayout.Tiles(k) * kLayout.TileEntries()));
  } else {
    packed.masks.reserve(static_cast<size_t>(panels * rows));
    packed.offsets.reserve(static_cast<size_t>(panels + 1));
    packed.offsets.push_back(0);
  }
  for (int64_t panel = 0; panel < panels; ++panel) {
    for (int64_t row = 0; row < rows; ++row) {
      typename Matrix::Mask mask = 0;
      ForEachWeight<kLayout>(panel, row, [&](int64_t bit, int64_t input, int64_t column) {
        const auto weight = convert(input < k && column < n ? w[input * row_stride + column] : Weight{0});
        if (weight == 0 && !dense) return;
        mask |= typename Matrix::Mask{1} << bit;
        store(packed.values, row, weight);
      });
      if (!dense) packed.masks.push_back(mask);
    }
    panel_end(packed.values);
    if (!dense) packed.offsets.push_back(static_cast<int64_t>(packed.values.size()));
  }
  if (!dense) packed.values.resize(packed.values.size() + static_cast<size_t>(kLayout.Padding()), 0);
  return packed;
}

// Calls next(panel, row), which returns the next stored weight, for each stored weight in order.
template <const BitmapLayout& kLayout, typename Next>
void Unpack(const BitmapView& view, int8_t* q, int64_t row_stride, const Next& next) {
  for (int64_t panel = 0; panel < BitmapPanels(view.n); ++panel) {
    const uint8_t* masks = view.PanelMasks(kLayout, panel);
    for (int64_t row = 0; row < kLayout.Tiles(view.k) * kTileRows; ++row) {
      const uint64_t mask = view.IsDense() ? ~uint64_t{0} : LoadMask(masks + row * kLayout.RowMaskBytes(), kLayout);
      ForEachWeight<kLayout>(panel, row, [&](int64_t bit, int64_t input, int64_t column) {
        const int8_t weight = ((mask >> bit) & 1u) != 0 ? next(panel, row) : int8_t{0};
        if (input < view.k && column < view.n) q[input * row_stride + column] = weight;
      });
    }
  }
}

// Adds int8 rows of a panel position by position, as 16-bit sums, which compilers vectorize: this runs over all weights
// when a model is loaded.
void AddWholeRows(const uint8_t* values, int64_t rows, uint32_t (&position_sums)[kInt8Bitmap.RowBits()]) {
  constexpr int64_t kPositions = kInt8Bitmap.RowBits();
  constexpr int64_t kRowsOf16Bits = 256;  // of int8 values: their sums fit int16
  for (int64_t first = 0; first < rows; first += kRowsOf16Bits) {
    int16_t part[kPositions] = {};
    const int64_t end = std::min(rows, first + kRowsOf16Bits);
    for (int64_t row = first; row < end; ++row) {
      const uint8_t* const of_row = values + row * kPositions;
      for (int64_t i = 0; i < kPositions; ++i) part[i] = static_cast<int16_t>(part[i] + static_cast<int8_t>(of_row[i]));
    }
    for (int64_t i = 0; i < kPositions; ++i) position_sums[i] += static_cast<uint32_t>(part[i]);
  }
}

// AddWholeRows for rows that store only the weights with a mask bit.
void AddStoredRows(const uint8_t* masks, const uint8_t* values, int64_t rows,
                   uint32_t (&position_sums)[kInt8Bitmap.RowBits()]) {
  for (int64_t row = 0; row < rows; ++row) {
    uint64_t mask = LoadMask(masks + row * kInt8Bitmap.RowMaskBytes(), kInt8Bitmap);
    for (; mask != 0; mask &= mask - 1) {
      position_sums[__builtin_ctzll(mask)] += static_cast<uint32_t>(static_cast<int8_t>(*values++));
    }
  }
}

}  // namespace

BitmapMatrix PackBitmap(const float* w, int64_t row_stride, int64_t k, int64_t n, Storage storage) {
  return Pack<kBf16Bitmap, BitmapMatrix>(
      w, row_stride, k, n, storage,
      [](float weight) {
        const uint16_t bits = RoundToBf16(weight);
        return (bits & 0x7fffu) == 0 ? uint16_t{0} : bits;
      },
      [](std::vector<uint16_t>& values, int64_t, uint16_t weight) { values.push_back(weight); },
      [](const std::vector<uint16_t>&) {});
}

void UnpackBitmap(const BitmapView& view, float* w, int64_t row_stride, int64_t column_stride) {
  const int64_t rows = BitmapTiles(view.k) * kTileRows;
  for (int64_t panel = 0; panel < BitmapPanels(view.n); ++panel) {
    const uint8_t* masks = view.PanelMasks(kBf16Bitmap, panel);
    const uint8_t* value = view.PanelValues(kBf16Bitmap, panel);
    const bool all_columns = (panel + 1) * kPanelColumns <= view.n;
    for (int64_t row = 0; row < rows; ++row) {
      const uint32_t mask = view.IsDense() ? ~uint32_t{0} : Load<uint32_t>(masks + row * kBf16Bitmap.RowMaskBytes());
      float* to = w + 2 * row * row_stride + panel * kPanelColumns * column_stride;
      if (all_columns && 2 * row + 1 < view.k) {
        // Branch-free: padding after the last value makes the loads safe.
        for (int64_t column = 0; column < kPanelColumns; ++column, to += column_stride) {
          for (int64_t input = 0; input < 2; ++input) {
            const uint32_t stored = (mask >> (2 * column + input)) & 1u;
            to[input * row_stride] = Bf16ToFloat(static_cast<uint16_t>(Load<uint16_t>(value) & (0u - stored)));
            value += stored * kValueBytes;
          }
        }
        continue;
      }
      ForEachWeight<kBf16Bitmap>(panel, row, [&](int64_t bit, int64_t input, int64_t column) {
        float weight = 0.0f;
        if (((mask >> bit) & 1u) != 0) {
          weight = Bf16ToFloat(Load<uint16_t>(value));
          value += kValueBytes;
        }
        if (input < view.k && column < view.n) w[input * row_stride + column * column_stride] = weight;
      });
    }
  }
}

QuantizedBitmapMatrix PackBitmapInt8(const int8_t* q, int64_t row_stride, int64_t k, int64_t n, Storage storage) {
  return Pack<kInt8Bitmap, QuantizedBitmapMatrix>(
      q, row_stride, k, n, storage, [](int8_t weight) { return weight; },
      [](std::vector<uint8_t>& values, int64_t, int8_t weight) { values.push_back(static_cast<uint8_t>(weight)); },
      [](const std::vector<uint8_t>&) {});
}

void UnpackBitmapInt8(const BitmapView& view, int8_t* q, int64_t row_stride) {
  const uint8_t* value = view.values;
  Unpack<kInt8Bitmap>(view, q, row_stride, [&](int64_t, int64_t) { return static_cast<int8_t>(*value++); });
}

std::vector<int32_t> SumsOfColumnsInt8(const BitmapView& view) {
  std::vector<int32_t> sums(static_cast<size_t>(BitmapPanels(view.n) * kPanelColumns));
  const Storage storage = view.StoredAs();
  // 2:4 storage holds half of the weights; the columns of its rows are those of dense rows.
  const int64_t rows = kInt8Bitmap.Tiles(view.k) * kTileRows / (storage == Storage::kTwoFour ? 2 : 1);
  for (int64_t panel = 0; panel < BitmapPanels(view.n); ++panel) {
    const uint8_t* const values = view.PanelValues(kInt8Bitmap, panel);
    uint32_t position_sums[kInt8Bitmap.RowBits()] = {};
    if (storage == Storage::kBitmap) {
      AddStoredRows(view.PanelMasks(kInt8Bitmap, panel), values, rows, position_sums);
    } else {
      AddWholeRows(values, rows, position_sums);
    }
    for (int64_t i = 0; i < kInt8Bitmap.RowBits(); ++i) {
      int32_t& sum = sums[static_cast<size_t>(panel * kPanelColumns + i / kInt8Bitmap.row_inputs)];
      sum = static_cast<int32_t>(static_cast<uint32_t>(sum) + position_sums[i]);
    }
  }
  return sums;
}

bool PairsFitInt8(const BitmapView& view) {
  constexpr int32_t kMost = 128;
  if (view.StoredAs() != Storage::kDense) return false;
  const int64_t bytes = kInt8Bitmap.Tiles(view.k) * kInt8Bitmap.TileEntries();
  for (int64_t panel = 0; panel < BitmapPanels(view.n); ++panel) {
    const uint8_t* const values = view.PanelValues(kInt8Bitmap, panel);
    int16_t most = 0;
    for (int64_t i = 0; i < bytes; i += 2) {
      const int sum = static_cast<int8_t>(values[i]) + static_cast<int8_t>(values[i + 1]);
      most = std::max(most, static_cast<int16_t>(sum < 0 ? -sum : sum));
    }
    if (most > kMost) return false;
  }
  return true;
}

QuantizedBitmapMatrix PackBitmapInt4(const int8_t* q, int64_t row_stride, int64_t k, int64_t n, Storage storage) {
  size_t next[2] = {};  // next byte of the streams of even and odd rows
  return Pack<kInt4Bitmap, QuantizedBitmapMatrix>(
      q, row_stride, k, n, storage, [](int8_t weight) { return weight; },
      [&](std::vector<uint8_t>& values, int64_t row, int8_t weight) {
        const size_t byte = next[row & 1]++;
        if (byte == values.size()) values.push_back(0);
        values[byte] |= static_cast<uint8_t>(((weight + kInt4Bias) & 0xf) << ShiftOf(row));
      },
      [&](const std::vector<uint8_t>& values) { next[0] = next[1] = values.size(); });
}

void UnpackBitmapInt4(const BitmapView& view, int8_t* q, int64_t row_stride) {
  int64_t at = -1;
  const uint8_t* next[2] = {};
  Unpack<kInt4Bitmap>(view, q, row_stride, [&](int64_t panel, int64_t row) {
    if (panel != at) next[0] = next[1] = view.PanelValues(kInt4Bitmap, panel);
    at = panel;
    return static_cast<int8_t>(((*next[row & 1]++ >> ShiftOf(row)) & 0xf) - kInt4Bias);
  });
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
    return ErrorText("values hold ", claim.value_count, " entries, expected ", entries, " (dense storage, ", panels,
                     " panels x ", tiles, " tiles x ", layout.TileEntries(), ") for k=", claim.k, ", n=", claim.n);
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
    if (end < begin) return ErrorText("offsets[", panel + 1, "] is ", end, ", less than the previous offset, ", begin);
    // The padding must not count as values: a kernel loads a full row of entries from any position.
    if (end > claim.value_count - padding) {
      return ErrorText("offsets[", panel + 1, "] is ", end, ", but values hold ", claim.value_count,
                       " entries, including ", padding, " of padding");
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
    int64_t stored[2] = {};  // stored weights in even and in odd rows
    for (int64_t row = 0; row < tiles * kTileRows; ++row, row_bytes += layout.RowMaskBytes()) {
      const uint64_t bits = LoadMask(row_bytes, layout);
      const uint64_t in_inputs = LowBits(std::clamp<int64_t>(claim.k - row * layout.row_inputs, 0, layout.row_inputs)) *
                                 (layout.row_inputs == 4 ? uint64_t{0x1111111111111111} : uint64_t{0x5555555555555555});
      if ((bits & ~(in_columns & in_inputs)) != 0) {
        return ErrorText("masks: row ", row, " of panel ", panel, " has bits set outside of the ", claim.k, " x ",
                         claim.n, " matrix");
      }
      stored[row & 1] += std::popcount(bits);
    }
    // int4: a byte holds one weight of an even row and one of an odd row.
    const int64_t needed = layout.value_bits == 4 ? std::max(stored[0], stored[1]) : stored[0] + stored[1];
    const int64_t expected = claim.offsets[panel + 1] - claim.offsets[panel];
    if (needed != expected) {
      return ErrorText("masks of panel ", panel, " have ", stored[0] + stored[1], " bits set, which need ", needed,
                       " entries of values, but offsets leave ", expected);
    }
  }
  return {};
}

}  // namespace ortolan
