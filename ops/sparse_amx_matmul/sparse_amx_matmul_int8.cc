#include "sparse_amx_matmul/sparse_amx_matmul_int8.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "formats/bf16.h"
#include "isa/kernel_table.h"

namespace ortolan {

#define ORTOLAN_KERNEL(set, name, row_block, least_rows) \
  PackInt8ActivationsFn PackInt8##name;                  \
  SparseInt8MatMulFn MultiplyInt8##name;                 \
  SparseInt8MatMulFn MultiplyInt4##name;
#include "sparse_amx_matmul/kernels_int8.inc"
#undef ORTOLAN_KERNEL

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

void LoadScales(const SparseInt8MatMulArgs& args, int64_t panel, int64_t group, float* scales) {
  const int64_t bytes = ScaleBytes(args.group);
  const uint8_t* from = args.Scales(panel, group);
  for (int64_t j = 0; j < kPanelColumns; ++j, from += bytes) {
    if (args.group == kWholeColumn) {
      std::memcpy(&scales[j], from, sizeof(scales[j]));
    } else {
      uint16_t bits;
      std::memcpy(&bits, from, sizeof(bits));
      scales[j] = Bf16ToFloat(bits);
    }
  }
}

template <typename Stream>
void Multiply(const SparseInt8MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
  const BitmapView& w = args.w;
  const int64_t rows = kInt8Bitmap.Tiles(w.k) * kTileRows;
  const int64_t group_rows = args.group == kWholeColumn ? rows : args.group / kInt8Bitmap.row_inputs;
  for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
    const int64_t first = panel * kPanelColumns;
    const int64_t columns = std::min(kPanelColumns, w.n - first);
    for (int64_t i = 0; i < args.m; ++i) {
      const uint8_t* x =
          static_cast<const uint8_t*>(args.x) + i * SparseInt8MatMulKernel::PackedRowBytes(w.k, args.group);
      float x_scale;
      std::memcpy(&x_scale, x + kInt8Bitmap.PaddedK(w.k), sizeof(x_scale));
      const uint8_t* masks = w.PanelMasks(Stream::kLayout, panel);
      Stream weights(w.PanelValues(Stream::kLayout, panel));
      float* y = args.YRow(i) + first;
      float totals[kPanelColumns] = {};
      for (int64_t group = 0; group < ScaleRows(w.k, args.group); ++group) {
        int32_t sums[kPanelColumns] = {};
        const int64_t end = std::min(rows, (group + 1) * group_rows);
        for (int64_t row = group * group_rows; row < end; ++row) {
          uint64_t mask = ~uint64_t{0};
          if (!w.IsDense()) std::memcpy(&mask, masks + row * kInt8Bitmap.RowMaskBytes(), sizeof(mask));
          for (; mask != 0; mask &= mask - 1) {
            const int bit = __builtin_ctzll(mask);
            const int32_t q = static_cast<int8_t>(x[4 * row + (bit & 3)]);
            sums[bit >> 2] += q * weights.Next(row);
          }
        }
        float scales[kPanelColumns];
        LoadScales(args, panel, group, scales);
        for (int64_t j = 0; j < columns; ++j) {
          // The factors in the order of the formulas: their product with a sum may overflow in one and not the other.
          if (args.group == kWholeColumn) {
            totals[j] = static_cast<float>(sums[j]) * (x_scale * scales[j]);
          } else {
            totals[j] += static_cast<float>(sums[j]) * scales[j];
          }
        }
      }
      for (int64_t j = 0; j < columns; ++j) {
        const float product = args.group == kWholeColumn ? totals[j] : totals[j] * x_scale;
        y[j] = args.bias != nullptr ? product + args.bias[first + j] : product;
      }
    }
  }
}

}  // namespace

// Row after row: q [PaddedK], s.
void PackInt8Scalar(const float* x, int64_t x_row_bytes, int64_t m, int64_t k, int64_t group, void* packed) {
  const int64_t padded_k = kInt8Bitmap.PaddedK(k);
  uint8_t* out = static_cast<uint8_t*>(packed);
  for (int64_t i = 0; i < m; ++i, out += SparseInt8MatMulKernel::PackedRowBytes(k, group)) {
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

void MultiplyInt8Scalar(const SparseInt8MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
  Multiply<Int8Stream>(args, panel_begin, panel_end);
}

void MultiplyInt4Scalar(const SparseInt8MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
  Multiply<Int4Stream>(args, panel_begin, panel_end);
}

namespace {

constexpr SparseInt8MatMulKernel kKernels[] = {
#define ORTOLAN_KERNEL(set, name, row_block, least_rows) \
  {#name, feature_set::set, row_block, least_rows, &PackInt8##name, &MultiplyInt8##name, &MultiplyInt4##name},
#include "sparse_amx_matmul/kernels_int8.inc"
#undef ORTOLAN_KERNEL
};

}  // namespace

std::span<const SparseInt8MatMulKernel> SparseInt8MatMulKernels() { return kKernels; }

const SparseInt8MatMulKernel& SelectSparseInt8MatMul(Features features, int64_t m) {
  return SelectKernel(SparseInt8MatMulKernels(), features, {m});
}

}  // namespace ortolan
