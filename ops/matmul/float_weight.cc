#include "matmul/float_weight.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "formats/bf16.h"
#include "formats/float16.h"
#include "host/op_error.h"
#include "matmul/bitmap_layer.h"
#include "matmul/pack_panels.h"
#include "matmul/storage.h"

namespace ortolan {
namespace {

constexpr float kLargestInt8 = 127;
constexpr float kSmallestScale = std::numeric_limits<float>::min();
constexpr int64_t kRowInputs = kBf16Bitmap.row_inputs;

template <typename Stored>
Stored StoredAt(const FloatWeight& w, int64_t index) {
  Stored value = 0;
  std::memcpy(&value, static_cast<const char*>(w.values) + index * static_cast<int64_t>(sizeof(value)), sizeof(value));
  return value;
}

float ValueAt(const FloatWeight& w, int64_t index) {
  return w.is_half ? HalfToFloat(StoredAt<uint16_t>(w, index)) : StoredAt<float>(w, index);
}

int64_t IndexOf(const FloatWeight& w, int64_t input, int64_t column) {
  return w.transposed ? column * w.k + input : input * (w.row == 0 ? w.n : w.row) + column;
}

// Call at(number of the value, column, value) in the order in which the values are stored.
template <typename At>
void ForEachValue(const FloatWeight& w, const At& at) {
  const int64_t lines = w.transposed ? w.n : w.k, line = w.transposed ? w.k : w.n;
  for (int64_t outer = 0; outer < lines; ++outer) {
    const int64_t stored = w.transposed ? IndexOf(w, 0, outer) : IndexOf(w, outer, 0);
    for (int64_t inner = 0; inner < line; ++inner) {
      at(outer * line + inner, w.transposed ? outer : inner, ValueAt(w, stored + inner));
    }
  }
}

std::string WhyNotSizes(const FloatWeight& w, int64_t most_inputs) {
  if (w.k >= 1 && w.n >= 1 && w.n <= kMaxDimension && w.k <= most_inputs) return {};
  return ErrorText("its weight is ", w.k, " x ", w.n, ", expected 1 or more inputs and outputs, and ", most_inputs,
                   " inputs at most");
}

// -0 becomes +0, so that a zero weight has no bits set.
uint16_t ToBf16(float value) {
  const uint16_t bits = RoundToBf16(value);
  return (bits & 0x7fffu) == 0 ? uint16_t{0} : bits;
}

// Pack the columns of a panel in dense storage (formats/bitmap.h).
void PackPanel(const FloatWeight& w, int64_t panel, uint16_t* packed) {
  const int64_t first = panel * kPanelColumns;
  const int64_t columns = std::min(kPanelColumns, w.n - first);
  std::fill_n(packed, kBf16Bitmap.PaddedK(w.k) * kPanelColumns, uint16_t{0});
  for (int64_t l = 0; l < w.k; ++l) {
    uint16_t* const to = packed + l / kRowInputs * kPanelColumns * kRowInputs + l % kRowInputs;
    for (int64_t j = 0; j < columns; ++j) to[j * kRowInputs] = ToBf16(ValueAt(w, IndexOf(w, l, first + j)));
  }
}

}  // namespace

std::string WhyNotBf16(const FloatWeight& w) { return WhyNotSizes(w, kBf16Bitmap.max_k); }

std::string WhyNotInt8(const FloatWeight& w) {
  const std::string problem = WhyNotSizes(w, kInt8Bitmap.max_k);
  if (!problem.empty()) return problem;
  bool is_finite = true;
  ForEachValue(w, [&](int64_t, int64_t, float value) { is_finite = is_finite && std::isfinite(value); });
  return is_finite ? "" : "its weight holds NaN or infinity, expected finite numbers";
}

Int8Weight RoundedToInt8(const FloatWeight& w, std::vector<int8_t>& codes) {
  Int8Weight rounded;
  rounded.k = w.k;
  rounded.n = w.n;
  rounded.transposed = w.transposed;
  rounded.zero_points.assign(static_cast<size_t>(w.n), 0);
  std::vector<float> largest(static_cast<size_t>(w.n));
  codes.resize(static_cast<size_t>(w.k * w.n));
  ForEachValue(w, [&](int64_t, int64_t j, float value) {
    float& most = largest[static_cast<size_t>(j)];
    most = std::max(most, std::abs(value));
  });
  rounded.scales.resize(largest.size());
  std::transform(largest.begin(), largest.end(), rounded.scales.begin(),
                 [](float most) { return most > 0 ? std::max(most / kLargestInt8, kSmallestScale) : kSmallestScale; });
  ForEachValue(w, [&](int64_t index, int64_t j, float value) {
    const float q = std::nearbyint(value / rounded.scales[static_cast<size_t>(j)]);
    codes[static_cast<size_t>(index)] = static_cast<int8_t>(std::clamp(q, -kLargestInt8, kLargestInt8));
  });
  rounded.codes = reinterpret_cast<const uint8_t*>(codes.data());
  return rounded;
}

Bf16Columns::Bf16Columns(std::span<const FloatWeight> parts) {
  w_.view.k = w_.k = parts.front().k;
  for (const FloatWeight& part : parts) w_.n += part.n;
  w_.view.n = w_.n;
  const int64_t panel_values = kBf16Bitmap.PaddedK(w_.k) * kPanelColumns;
  dense_ = LineBytes(BitmapPanels(w_.n) * panel_values * kValueBytes);
  w_.view.values = dense_.data();
  uint16_t* panels = reinterpret_cast<uint16_t*>(dense_.data());
  for (const FloatWeight& part : parts) {
    ForEachPanel(BitmapPanels(part.n), panel_values * kValueBytes, 0,
                 [&](int64_t panel, int8_t*) { PackPanel(part, panel, panels + panel * panel_values); });
    panels += BitmapPanels(part.n) * panel_values;
  }
  const std::span<const uint16_t> values(reinterpret_cast<const uint16_t*>(dense_.data()),
                                         static_cast<size_t>(dense_.size() / kValueBytes));
  const int64_t stored = static_cast<int64_t>(values.size()) - std::count(values.begin(), values.end(), 0);
  if (IsForBitmap(kBf16Bitmap, w_.k, w_.n, stored)) StoreAsBitmap();
}

Bf16Columns::Bf16Columns(const StoredBytes& packed) {
  const std::string problem = WhyNotStored(kBf16Bitmap, packed);
  if (!problem.empty()) throw OpError(problem);
  w_.view = packed.View();
  w_.k = packed.k;
  w_.n = packed.n;
}

void Bf16Columns::StoreAsBitmap() {
  bitmap_ = BitmapOfDense<uint32_t>(kBf16Bitmap, w_.k, w_.n, reinterpret_cast<const uint16_t*>(dense_.data()));
  w_.view.masks = reinterpret_cast<const uint8_t*>(bitmap_.masks.data());
  w_.view.values = reinterpret_cast<const uint8_t*>(bitmap_.values.data());
  w_.view.offsets = bitmap_.offsets.data();
  dense_ = LineBytes();
}

LinearLayer Bf16Columns::Layer() const { return BitmapLayer(w_, kBf16Bitmap, Bf16Kernels()); }

}  // namespace ortolan
