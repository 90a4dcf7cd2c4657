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

// Sets the masks and offsets. store(row, weight) is called for each weight that is stored, in order; panel_end()
// returns where the next panel starts.
template <typename Store, typename PanelEnd>
void Pack(QuantizedBitmapMatrix& packed, const int8_t* q, int64_t row_stride, Storage storage, Store store,
          PanelEnd panel_end) {
  const bool dense = storage == Storage::kDense;
  const int64_t k = packed.k;
  const int64_t n = packed.n;
  const int64_t panels = BitmapPanels(n);
  const int64_t rows = kInt8Bitmap.Tiles(k) * kTileRows;
  if (!dense) {
    packed.masks.reserve(static_cast<size_t>(panels * rows));
    packed.offsets.reserve(static_cast<size_t>(panels + 1));
    packed.offsets.push_back(0);
  }
  for (int64_t panel = 0; panel < panels; ++panel) {
    for (int64_t row = 0; row < rows; ++row) {
      uint64_t mask = 0;
      for (int64_t bit = 0; bit < kInt8Bitmap.RowBits(); ++bit) {
        const int64_t input = InputOf(row, bit);
        const int64_t column = panel * kPanelColumns + ColumnOf(bit);
        const int8_t weight = input < k && column < n ? q[input * row_stride + column] : int8_t{0};
        if (weight == 0 && !dense) continue;
        mask |= uint64_t{1} << bit;
        store(row, weight);
      }
      if (!dense) packed.masks.push_back(mask);
    }
    const int64_t end = panel_end();
    if (!dense) packed.offsets.push_back(end);
  }
  if (!dense) packed.values.resize(packed.values.size() + static_cast<size_t>(kInt8Bitmap.Padding()), 0);
}

// next(panel, row) is called for each stored weight in order.
template <typename Next>
void Unpack(const BitmapView& view, int8_t* q, int64_t row_stride, Next next) {
  const int64_t rows = kInt8Bitmap.Tiles(view.k) * kTileRows;
  for (int64_t panel = 0; panel < BitmapPanels(view.n); ++panel) {
    const uint8_t* masks = view.PanelMasks(kInt8Bitmap, panel);
    for (int64_t row = 0; row < rows; ++row) {
      const uint64_t mask = view.IsDense() ? ~uint64_t{0} : LoadMask(masks + row * kInt8Bitmap.RowMaskBytes());
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

QuantizedBitmapMatrix PackBitmapInt8(const int8_t* q, int64_t row_stride, int64_t k, int64_t n, Storage storage) {
  QuantizedBitmapMatrix packed{k, n, {}, {}, {}};
  Pack(
      packed, q, row_stride, storage,
      [&](int64_t, int8_t weight) { packed.values.push_back(static_cast<uint8_t>(weight)); },
      [&] { return static_cast<int64_t>(packed.values.size()); });
  return packed;
}

void UnpackBitmapInt8(const BitmapView& view, int8_t* q, int64_t row_stride) {
  const uint8_t* value = view.values;
  Unpack(view, q, row_stride, [&](int64_t, int64_t) { return static_cast<int8_t>(*value++); });
}

QuantizedBitmapMatrix PackBitmapInt4(const int8_t* q, int64_t row_stride, int64_t k, int64_t n, Storage storage) {
  QuantizedBitmapMatrix packed{k, n, {}, {}, {}};
  size_t next[2] = {};  // byte of the even rows' and of the odd rows' stream
  Pack(
      packed, q, row_stride, storage,
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
    if (panel != at) next[0] = next[1] = view.PanelValues(kInt4Bitmap, panel);
    at = panel;
    return static_cast<int8_t>(((*next[row & 1]++ >> ShiftOf(row)) & 0xf) - kInt4Bias);
  });
}

}  // namespace ortolan
