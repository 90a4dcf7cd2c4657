#include "formats/bitmap_int8.h"

#include <algorithm>
#include <cstring>

#include "formats/bitmap_int4.h"

namespace ortolan {
namespace {

// The weight that bit i of row r of a panel stands for, relative to the panel's first column.
constexpr int64_t InputOf(int64_t row, int64_t bit) { return 4 * row + (bit & 3); }
constexpr int64_t ColumnOf(int64_t bit) { return bit >> 2; }

// int4: the nibbles of even rows are low ones, those of odd rows high ones.
constexpr int ShiftOf(int64_t row) { return row % 2 == 0 ? 0 : 4; }

uint64_t LoadMask(const uint8_t* bytes) {
  uint64_t mask;
  std::memcpy(&mask, bytes, sizeof(mask));
  return mask;
}

// Sets the masks and offsets. store(row, weight) is called for each weight that is not zero, in order;
// panel_end() returns where the next panel starts.
template <typename Store, typename PanelEnd>
void Pack(QuantizedBitmapMatrix& packed, const int8_t* q, int64_t row_stride, Store store, PanelEnd panel_end) {
  const int64_t k = packed.k;
  const int64_t n = packed.n;
  const int64_t panels = BitmapPanels(n);
  const int64_t rows = kInt8Bitmap.Tiles(k) * kTileRows;
  packed.masks.resize(static_cast<size_t>(panels * rows));
  packed.offsets.reserve(static_cast<size_t>(panels + 1));
  packed.offsets.push_back(0);
  uint64_t* mask = packed.masks.data();
  for (int64_t panel = 0; panel < panels; ++panel) {
    const int64_t columns = std::min(kPanelColumns, n - panel * kPanelColumns);
    for (int64_t row = 0; row < rows; ++row, ++mask) {
      for (int64_t bit = 0; bit < 4 * columns && 4 * row < k; ++bit) {
        const int64_t input = InputOf(row, bit);
        if (input >= k) continue;
        const int8_t weight = q[input * row_stride + panel * kPanelColumns + ColumnOf(bit)];
        if (weight == 0) continue;
        *mask |= uint64_t{1} << bit;
        store(row, weight);
      }
    }
    packed.offsets.push_back(panel_end());
  }
  packed.values.resize(packed.values.size() + static_cast<size_t>(kInt8Bitmap.Padding()), 0);
}

// next(panel, row) is called for each stored weight in order.
template <typename Next>
void Unpack(const BitmapView& view, int8_t* q, int64_t row_stride, Next next) {
  const int64_t rows = kInt8Bitmap.Tiles(view.k) * kTileRows;
  const uint8_t* masks = view.masks;
  for (int64_t panel = 0; panel < BitmapPanels(view.n); ++panel) {
    for (int64_t row = 0; row < rows; ++row, masks += sizeof(uint64_t)) {
      const uint64_t mask = LoadMask(masks);
      for (int64_t bit = 0; bit < kInt8Bitmap.RowBits(); ++bit) {
        const int8_t weight = ((mask >> bit) & 1u) != 0 ? next(panel, row) : int8_t{0};
        const int64_t input = InputOf(row, bit);
        const int64_t column = panel * kPanelColumns + ColumnOf(bit);
        if (input < view.k && column < view.n) q[input * row_stride + column] = weight;
      }
    }
  }
}

}  // namespace

QuantizedBitmapMatrix PackBitmapInt8(const int8_t* q, int64_t row_stride, int64_t k, int64_t n) {
  QuantizedBitmapMatrix packed{k, n, {}, {}, {}};
  Pack(
      packed, q, row_stride, [&](int64_t, int8_t weight) { packed.values.push_back(static_cast<uint8_t>(weight)); },
      [&] { return static_cast<int64_t>(packed.values.size()); });
  return packed;
}

void UnpackBitmapInt8(const BitmapView& view, int8_t* q, int64_t row_stride) {
  const uint8_t* value = view.values;
  Unpack(view, q, row_stride, [&](int64_t, int64_t) { return static_cast<int8_t>(*value++); });
}

QuantizedBitmapMatrix PackBitmapInt4(const int8_t* q, int64_t row_stride, int64_t k, int64_t n) {
  QuantizedBitmapMatrix packed{k, n, {}, {}, {}};
  size_t next[2] = {};  // byte of the even rows' and of the odd rows' stream
  Pack(
      packed, q, row_stride,
      [&](int64_t row, int8_t weight) {
        const size_t byte = next[row & 1]++;
        if (byte == packed.values.size()) packed.values.push_back(0);
        packed.values[byte] |= static_cast<uint8_t>(((weight + kInt4Bias) & 0xf) << ShiftOf(row));
      },
      [&] {
        next[0] = next[1] = packed.values.size();
        return static_cast<int64_t>(packed.values.size());
      });
  return packed;
}

void UnpackBitmapInt4(const BitmapView& view, int8_t* q, int64_t row_stride) {
  int64_t at = -1;
  const uint8_t* next[2] = {};
  Unpack(view, q, row_stride, [&](int64_t panel, int64_t row) {
    if (panel != at) next[0] = next[1] = view.values + view.offsets[panel];
    at = panel;
    return static_cast<int8_t>(((*next[row & 1]++ >> ShiftOf(row)) & 0xf) - kInt4Bias);
  });
}

}  // namespace ortolan
