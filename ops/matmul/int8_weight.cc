#include "matmul/int8_weight.h"

#include <algorithm>
#include <limits>

#include "isa/features.h"
#include "ort/op_error.h"

namespace ortolan {
namespace {

constexpr int kMiddle = 128;
constexpr float kSmallestScale = std::numeric_limits<float>::min();
constexpr float kLargestScale = std::numeric_limits<float>::max() / 256;  // times a number it stays finite

// Below this share of zeros dense storage is faster than a bitmap (sparse_amx_matmul/README.md).
constexpr double kDenseBelow = 0.11;
constexpr double kMostGrowth = 1.1;

struct Range {
  int least = 0;
  int most = 0;
};

int CodeAt(const Int8Weight& w, int64_t place) {
  return w.is_signed ? static_cast<int>(static_cast<int8_t>(w.codes[place])) : static_cast<int>(w.codes[place]);
}

// Calls at(place in the codes, input, column).
template <typename At>
void ForEachCode(const Int8Weight& w, const At& at) {
  for (int64_t outer = 0; outer < (w.transposed ? w.n : w.k); ++outer) {
    const int64_t inner_size = w.transposed ? w.k : w.n;
    for (int64_t inner = 0; inner < inner_size; ++inner) {
      at(outer * inner_size + inner, w.transposed ? inner : outer, w.transposed ? outer : inner);
    }
  }
}

// Of codes less zero points; where any code would do, of what codes there may be.
Range RangeOf(const Int8Weight& w) {
  const int16_t middle = w.is_signed ? 0 : kMiddle;
  if (std::all_of(w.zero_points.begin(), w.zero_points.end(), [=](int16_t zero) { return zero == middle; })) {
    return {-kMiddle, kMiddle - 1};
  }
  Range range;
  ForEachCode(w, [&](int64_t place, int64_t, int64_t column) {
    const int number = CodeAt(w, place) - w.zero_points[static_cast<size_t>(column)];
    range.least = std::min(range.least, number);
    range.most = std::max(range.most, number);
  });
  return range;
}

bool FitsInt8(const Range& range) { return range.least >= -kMiddle && range.most < kMiddle; }

// Whether a bitmap is faster, where this CPU is fast with one: it takes an instruction that expands bytes.
bool IsForBitmap(int64_t k, int64_t n, int64_t stored) {
  if (!ActiveFeatures().Has(feature_set::avx512)) return false;
  const int64_t dense = BitmapPanels(n) * kPanelColumns * kInt8Bitmap.PaddedK(k);
  const int64_t bitmap = dense / 8 + stored + kInt8Bitmap.Padding() + 8 * (BitmapPanels(n) + 1);
  const double zeros = 1.0 - static_cast<double>(stored) / static_cast<double>(k * n);
  return zeros >= kDenseBelow || static_cast<double>(dense) > kMostGrowth * static_cast<double>(bitmap);
}

}  // namespace

std::string WhyNot(const Int8Weight& w) {
  if (w.k < 1 || w.n < 1 || w.n > kMaxDimension) {
    return ErrorText("its weight is ", w.k, " x ", w.n, ", expected 1 or more inputs and outputs");
  }
  if (w.k > kInt8Bitmap.max_k) {
    return ErrorText("it has ", w.k, " inputs, and a sum of more than ", kInt8Bitmap.max_k,
                     " quantized products may overflow");
  }
  for (const float scale : w.scales) {
    if (!(scale >= kSmallestScale && scale <= kLargestScale)) {
      return ErrorText("its weight has a scale of ", scale, ", expected numbers above 0; quantize the model again");
    }
  }
  if (w.k <= kMostInputsWithWeightZeroPoints) return {};
  const Range range = RangeOf(w);
  if (FitsInt8(range)) return {};
  return ErrorText("its numbers less their zero points go from ", range.least, " to ", range.most,
                   ", expected -128 to 127 for its ", w.k,
                   " inputs; quantize with symmetric int8 weights to have them taken over as they are");
}

Int8Columns::Int8Columns(std::span<const Int8Weight> parts) {
  const int64_t k = parts.front().k;
  int64_t n = 0;
  for (const Int8Weight& part : parts) n += part.n;
  const size_t padded = static_cast<size_t>(BitmapPanels(n) * kPanelColumns);
  std::vector<int8_t> q(static_cast<size_t>(k * n));
  scales_.resize(padded);
  std::vector<int32_t> zero_points(padded);
  int64_t first = 0;
  for (const Int8Weight& part : parts) {
    const bool is_symmetric = FitsInt8(RangeOf(part));
    const int middle = part.is_signed ? 0 : kMiddle;
    for (int64_t j = 0; j < part.n; ++j) {
      const size_t column = static_cast<size_t>(first + j), own = static_cast<size_t>(j);
      scales_[column] = part.scales[own];
      if (!is_symmetric) zero_points[column] = part.zero_points[own] - middle;
    }
    ForEachCode(part, [&](int64_t place, int64_t input, int64_t column) {
      const int zero = is_symmetric ? part.zero_points[static_cast<size_t>(column)] : middle;
      q[static_cast<size_t>(input * n + first + column)] = static_cast<int8_t>(CodeAt(part, place) - zero);
    });
    first += part.n;
  }
  const int64_t stored = std::count_if(q.begin(), q.end(), [](int8_t number) { return number != 0; });
  const Storage storage = IsForBitmap(k, n, stored) ? Storage::kBitmap : Storage::kDense;
  numbers_ = PackBitmapInt8(q.data(), n, k, n, storage);
  const bool is_dense = storage == Storage::kDense;
  w_.k = k;
  w_.n = n;
  w_.view = {k, n, is_dense ? nullptr : reinterpret_cast<const uint8_t*>(numbers_.masks.data()), numbers_.values.data(),
             is_dense ? nullptr : numbers_.offsets.data()};
  w_.scales = scales_.data();
  if (k > kMostInputsWithZeroPoints) return;
  column_sums_ = SumsOfColumnsInt8(w_.view);
  w_.column_sums = column_sums_.data();
  if (std::any_of(zero_points.begin(), zero_points.end(), [](int32_t zero) { return zero != 0; })) {
    zero_points_ = std::move(zero_points);
    w_.zero_points = zero_points_.data();
  }
}

LinearLayer Int8Columns::Layer() const {
  LinearLayer layer;
  layer.w = &w_;
  layer.kernels = Int8Kernels();
  layer.panel_inputs = kInt8Bitmap.PaddedK(w_.k);
  return layer;
}

}  // namespace ortolan
