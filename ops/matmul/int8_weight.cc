#include "matmul/int8_weight.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "host/op_error.h"
#include "matmul/bitmap_layer.h"
#include "matmul/pack_panels.h"
#include "matmul/storage.h"

namespace ortolan {
namespace {

constexpr int kMiddle = 128;
constexpr float kSmallestScale = std::numeric_limits<float>::min();
constexpr float kLargestScale = std::numeric_limits<float>::max() / 256;  // finite after multiplication with a code

int CodeAt(const Int8Weight& w, int64_t index) {
  return w.is_signed ? static_cast<int>(static_cast<int8_t>(w.codes[index])) : static_cast<int>(w.codes[index]);
}

// Call at(index of the code, input, column).
template <typename At>
void ForEachCode(const Int8Weight& w, const At& at) {
  for (int64_t outer = 0; outer < (w.transposed ? w.n : w.k); ++outer) {
    const int64_t inner_size = w.transposed ? w.k : w.n;
    for (int64_t inner = 0; inner < inner_size; ++inner) {
      at(outer * w.Row() + inner, w.transposed ? inner : outer, w.transposed ? outer : inner);
    }
  }
}

// Return why kernels cannot run on the packed weights; empty if they can.
std::string WhyNotPacked(const PackedInt8& packed) {
  const std::string problem = WhyNotStored(kInt8Bitmap, packed);
  if (!problem.empty()) return problem;
  const size_t columns = static_cast<size_t>(BitmapPanels(packed.n) * kPanelColumns);
  const size_t sums = packed.k <= kMostInputsWithZeroPoints ? columns : 0;
  if (packed.scales.size() != columns || packed.column_sums.size() != sums) {
    return ErrorText("there are ", packed.scales.size(), " scales and ", packed.column_sums.size(),
                     " sums of columns, expected ", columns, " and ", sums);
  }
  // Bounds that keep all products and sums within int32.
  const auto are_within = [](std::span<const int32_t> values, int64_t least, int64_t most) {
    return std::all_of(values.begin(), values.end(), [=](int32_t one) { return one >= least && one <= most; });
  };
  if (!are_within(packed.column_sums, -kMiddle * packed.k, kMiddle * packed.k)) {
    return ErrorText("its column sums are out of range for ", packed.k, " int8 inputs");
  }
  if (packed.zero_points.empty()) return {};
  if (packed.zero_points.size() != columns || packed.k > kMostInputsWithWeightZeroPoints) {
    return ErrorText("there are ", packed.zero_points.size(), " zero points for ", packed.k, " inputs, expected ",
                     columns, " and at most ", kMostInputsWithWeightZeroPoints);
  }
  return are_within(packed.zero_points, -kMiddle, kMiddle - 1) ? "" : "its zero points do not fit int8";
}

// Pack the columns of a panel in dense storage (formats/bitmap_int8.h). minus: what to subtract from the codes of each
// column.
void PackPanel(const Int8Weight& w, int64_t panel, const std::vector<uint8_t>& minus, uint8_t* packed) {
  const int64_t first = panel * kPanelColumns;
  const int64_t columns = std::min(kPanelColumns, w.n - first);
  std::memset(packed, 0, static_cast<size_t>(kInt8Bitmap.PaddedK(w.k) * kPanelColumns));
  const uint8_t* const less = minus.data() + first;
  const int64_t input_step = w.transposed ? 1 : w.Row(), column_step = w.transposed ? w.k : 1;
  for (int64_t l = 0; l < w.k; ++l) {
    const uint8_t* const from = w.codes + l * input_step + first * column_step;
    uint8_t* const to =
        packed + l / kInt8Bitmap.row_inputs * kPanelColumns * kInt8Bitmap.row_inputs + l % kInt8Bitmap.row_inputs;
    for (int64_t j = 0; j < columns; ++j) {
      to[j * kInt8Bitmap.row_inputs] = static_cast<uint8_t>(from[j * column_step] - less[j]);
    }
  }
}

}  // namespace

ValueRange RangeOf(const Int8Weight& w) {
  const int16_t middle = w.is_signed ? 0 : kMiddle;
  if (std::all_of(w.zero_points.begin(), w.zero_points.end(), [=](int16_t zero) { return zero == middle; })) {
    return {-kMiddle, kMiddle - 1};
  }
  ValueRange range;
  ForEachCode(w, [&](int64_t index, int64_t, int64_t column) {
    const int value = CodeAt(w, index) - w.zero_points[static_cast<size_t>(column)];
    range.least = std::min(range.least, value);
    range.most = std::max(range.most, value);
  });
  return range;
}

std::string WhyNotScales(std::span<const float> scales) {
  for (const float scale : scales) {
    if (!(scale >= kSmallestScale && scale <= kLargestScale)) {
      return ErrorText("its weight has a scale of ", scale, ", expected positive scales; quantize the model again");
    }
  }
  return {};
}

std::string WhyNotValues(int64_t k, int64_t n, const ValueRange& range) {
  if (k < 1 || n < 1 || n > kMaxDimension) {
    return ErrorText("its weight is ", k, " x ", n, ", expected 1 or more inputs and outputs");
  }
  if (k > kInt8Bitmap.max_k) {
    return ErrorText("it has ", k, " inputs, and a sum of more than ", kInt8Bitmap.max_k,
                     " quantized products may overflow");
  }
  if (k <= kMostInputsWithWeightZeroPoints || range.FitsInt8()) return {};
  return ErrorText("its values less their zero points range from ", range.least, " to ", range.most,
                   ", expected -128 to 127 for its ", k,
                   " inputs; quantize with symmetric int8 weights to keep them exactly");
}

std::string WhyNot(const Int8Weight& w) {
  const std::string problem = WhyNotScales(w.scales);
  // The range of values matters for the longest layers only.
  const bool is_long = w.k > kMostInputsWithWeightZeroPoints && w.k <= kInt8Bitmap.max_k;
  return problem.empty() ? WhyNotValues(w.k, w.n, is_long ? RangeOf(w) : ValueRange{}) : problem;
}

Int8Columns::Int8Columns(std::span<const Int8Weight> parts) {
  w_.view.k = w_.k = parts.front().k;
  for (const Int8Weight& part : parts) w_.n += part.n;
  w_.view.n = w_.n;
  PackDense(parts);
  const std::span<const uint8_t> values(dense_.data(), static_cast<size_t>(dense_.size()));
  if (IsForBitmap(kInt8Bitmap, w_.k, w_.n, dense_.size() - std::count(values.begin(), values.end(), 0)))
    StoreAsBitmap();
  w_.scales = scales_.data();
  if (w_.k > kMostInputsWithZeroPoints) return;
  column_sums_ = SumsOfColumnsInt8(w_.view);
  w_.column_sums = column_sums_.data();
  w_.pairs_fit = PairsAreKnownToFit(w_.view);
  const auto is_zero = [](int32_t zero) { return zero == 0; };
  if (!std::all_of(zero_points_.begin(), zero_points_.end(), is_zero)) w_.zero_points = zero_points_.data();
}

Int8Columns::Int8Columns(const PackedInt8& packed) {
  const std::string problem = WhyNotPacked(packed);
  if (!problem.empty()) throw OpError(problem);
  w_.view = packed.View();
  w_.k = packed.k;
  w_.n = packed.n;
  w_.scales = packed.scales.data();
  if (!packed.column_sums.empty()) {
    w_.column_sums = packed.column_sums.data();
    w_.pairs_fit = PairsAreKnownToFit(w_.view);
  }
  if (!packed.zero_points.empty()) w_.zero_points = packed.zero_points.data();
}

PackedInt8 Int8Columns::Packed() const {
  const size_t columns = static_cast<size_t>(BitmapPanels(w_.n) * kPanelColumns);
  PackedInt8 packed{BytesOf(kInt8Bitmap, w_.view), {static_cast<const float*>(w_.scales), columns}, {}, {}};
  if (w_.column_sums != nullptr) packed.column_sums = {w_.column_sums, columns};
  if (w_.zero_points != nullptr) packed.zero_points = {w_.zero_points, columns};
  return packed;
}

void Int8Columns::PackDense(std::span<const Int8Weight> parts) {
  const int64_t panel_bytes = kInt8Bitmap.PaddedK(w_.k) * kPanelColumns;
  const size_t padded_n = static_cast<size_t>(BitmapPanels(w_.n) * kPanelColumns);
  dense_ = LineBytes(BitmapPanels(w_.n) * panel_bytes);
  w_.view.values = dense_.data();
  scales_.resize(padded_n);
  zero_points_.resize(padded_n);
  int64_t first = 0;
  for (const Int8Weight& part : parts) {
    const bool is_symmetric = RangeOf(part).FitsInt8();
    const int middle = part.is_signed ? 0 : kMiddle;
    std::vector<uint8_t> minus(
        static_cast<size_t>(part.n));  // subtracted from the codes modulo 256, because the result fits int8
    for (int64_t j = 0; j < part.n; ++j) {
      const size_t own = static_cast<size_t>(j), column = static_cast<size_t>(first + j);
      const int zero = part.zero_points[own];
      scales_[column] = part.scales[own];
      zero_points_[column] = is_symmetric ? 0 : zero - middle;
      minus[own] = static_cast<uint8_t>(is_symmetric ? zero : middle);
    }
    uint8_t* const panels = dense_.data() + first / kPanelColumns * panel_bytes;
    ForEachPanel(BitmapPanels(part.n), panel_bytes, 0,
                 [&](int64_t panel, int8_t*) { PackPanel(part, panel, minus, panels + panel * panel_bytes); });
    first += part.n;
  }
}

void Int8Columns::StoreAsBitmap() {
  bitmap_ = BitmapOfDense<uint64_t>(kInt8Bitmap, w_.k, w_.n, static_cast<const uint8_t*>(dense_.data()));
  w_.view.masks = reinterpret_cast<const uint8_t*>(bitmap_.masks.data());
  w_.view.values = bitmap_.values.data();
  w_.view.offsets = bitmap_.offsets.data();
  dense_ = LineBytes();
}

LinearLayer Int8Columns::Layer() const { return BitmapLayer(w_, kInt8Bitmap, Int8Kernels()); }

}  // namespace ortolan
