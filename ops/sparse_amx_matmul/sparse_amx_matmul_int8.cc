#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "formats/bf16.h"
#include "matmul/bitmap_weight.h"

namespace ortolan {

namespace {

// The next stored weight of a row, in the order of its mask bits.
class Int8Stream {
 public:
  static constexpr const BitmapLayout& kLayout = kInt8Bitmap;
  explicit Int8Stream(const uint8_t* values) : next_(values) {}
  int32_t Next(int64_t) { return static_cast<int8_t>(*next_++); }

 private:
  const uint8_t* next_;
};

class Int4Stream {
 public:
  static constexpr const BitmapLayout& kLayout = kInt4Bitmap;
  explicit Int4Stream(const uint8_t* values) : next_{values, values} {}
  int32_t Next(int64_t row) {
    const int byte = *next_[row & 1]++;
    return ((row & 1) == 0 ? byte & 0xf : byte >> 4) - kInt4Bias;
  }

 private:
  const uint8_t* next_[2];
};

void LoadScales(const BitmapWeight& w, int64_t panel, int64_t group, float* scales) {
  const int64_t bytes = ScaleBytes(w.group);
  const uint8_t* from = w.Scales(panel, group);
  for (int64_t j = 0; j < kPanelColumns; ++j, from += bytes) {
    if (w.group == kWholeColumn) {
      std::memcpy(&scales[j], from, sizeof(scales[j]));
    } else {
      uint16_t bits;
      std::memcpy(&bits, from, sizeof(bits));
      scales[j] = Bf16ToFloat(bits);
    }
  }
}

template <typename Stream>
void Multiply(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
  const BitmapWeight& w = WeightOf<BitmapWeight>(args);
  const int64_t rows = kInt8Bitmap.Tiles(w.k) * kTileRows;
  const int64_t group_rows = w.group == kWholeColumn ? rows : w.group / kInt8Bitmap.row_inputs;
  for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
    const int64_t first = panel * kPanelColumns;
    const int64_t columns = std::min(kPanelColumns, w.n - first);
    for (int64_t i = 0; i < args.m; ++i) {
      const uint8_t* x = static_cast<const uint8_t*>(args.x) + i * w.QuantizedRowBytes();
      float x_scale;
      std::memcpy(&x_scale, x + kInt8Bitmap.PaddedK(w.k), sizeof(x_scale));
      const uint8_t* masks = w.view.PanelMasks(Stream::kLayout, panel);
      Stream weights(w.view.PanelValues(Stream::kLayout, panel));
      float* y = args.Y(i, panel);
      float totals[kPanelColumns] = {};
      for (int64_t group = 0; group < ScaleRows(w.k, w.group); ++group) {
        int32_t sums[kPanelColumns] = {};
        const int64_t end = std::min(rows, (group + 1) * group_rows);
        for (int64_t row = group * group_rows; row < end; ++row) {
          uint64_t mask = ~uint64_t{0};
          if (!w.view.IsDense()) std::memcpy(&mask, masks + row * kInt8Bitmap.RowMaskBytes(), sizeof(mask));
          for (; mask != 0; mask &= mask - 1) {
            const int bit = __builtin_ctzll(mask);
            const int32_t q = static_cast<int8_t>(x[4 * row + (bit & 3)]);
            sums[bit >> 2] += q * weights.Next(row);
          }
        }
        float scales[kPanelColumns];
        LoadScales(w, panel, group, scales);
        for (int64_t j = 0; j < columns; ++j) {
          // The factors in the order of the formulas: their product with a sum may overflow in one and not the other.
          if (w.group == kWholeColumn) {
            totals[j] = static_cast<float>(sums[j]) * (x_scale * scales[j]);
          } else {
            totals[j] += static_cast<float>(sums[j]) * scales[j];
          }
        }
      }
      for (int64_t j = 0; j < columns; ++j) {
        const float product = w.group == kWholeColumn ? totals[j] : totals[j] * x_scale;
        y[j] = args.bias != nullptr ? product + args.bias[first + j] : product;
      }
    }
  }
}

}  // namespace

namespace scalar {

// Row after row: q [PaddedK], s.
void PackInt8(const MatMulWeight& w, const float* x, int64_t x_row_bytes, int64_t m, void* packed) {
  const int64_t k = w.k;
  const int64_t padded_k = kInt8Bitmap.PaddedK(k);
  uint8_t* out = static_cast<uint8_t*>(packed);
  for (int64_t i = 0; i < m; ++i, out += static_cast<const BitmapWeight&>(w).QuantizedRowBytes()) {
    const float* row = reinterpret_cast<const float*>(reinterpret_cast<const char*>(x) + i * x_row_bytes);
    float largest = 0x1p-100f;
    bool finite = true;
    for (int64_t l = 0; l < k; ++l) {
      finite = finite && std::isfinite(row[l]);
      largest = std::max(largest, std::fabs(row[l]));
    }
    const float factor = 127.0f / largest;
    for (int64_t l = 0; l < padded_k; ++l) {
      const float q = l < k && finite ? std::nearbyint(row[l] * factor) : 0.0f;
      out[l] = static_cast<uint8_t>(static_cast<int>(q));
    }
    const float scale = finite ? largest / 127.0f : std::numeric_limits<float>::quiet_NaN();
    std::memcpy(out + padded_k, &scale, sizeof(scale));
  }
}

void PackInt4(const MatMulWeight& w, const float* x, int64_t x_row_bytes, int64_t m, void* packed) {
  PackInt8(w, x, x_row_bytes, m, packed);
}

void MultiplyInt8(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
  Multiply<Int8Stream>(args, panel_begin, panel_end);
}

void MultiplyInt4(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
  Multiply<Int4Stream>(args, panel_begin, panel_end);
}

}  // namespace scalar
}  // namespace ortolan
