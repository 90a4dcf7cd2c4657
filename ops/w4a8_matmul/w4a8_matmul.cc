#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "formats/f16.h"
#include "matmul/group_int4_weight.h"

namespace ortolan {

namespace {

float Scale(const Int4GroupView& w, int64_t panel, int64_t g, int64_t column) {
  const uint8_t* scales = w.Scales(panel, g);
  if (w.scale_type == ScaleType::kFloat32) {
    float scale;
    std::memcpy(&scale, scales + column * 4, sizeof(scale));
    return scale;
  }
  uint16_t bits;
  std::memcpy(&bits, scales + column * 2, sizeof(bits));
  return F16ToFloat(bits);
}

}  // namespace

namespace scalar {

// Row after row: q [PaddedK], s [groups], sums of q [groups].
void PackGroupInt4(const MatMulWeight& w, const float* x, int64_t x_row_bytes, int64_t m, void* packed) {
  const int64_t k = w.k;
  const int64_t group = static_cast<const GroupInt4Weight&>(w).view.group;
  const int64_t row_bytes = static_cast<const GroupInt4Weight&>(w).PackedRowBytes();
  const int64_t padded_k = kInt4Bitmap.PaddedK(k);
  const int64_t groups = ScaleRows(k, group);
  uint8_t* out = static_cast<uint8_t*>(packed);
  for (int64_t i = 0; i < m; ++i, out += row_bytes) {
    const float* row = reinterpret_cast<const float*>(reinterpret_cast<const char*>(x) + i * x_row_bytes);
    float* scales = reinterpret_cast<float*>(out + padded_k);
    std::fill(out, out + padded_k, uint8_t{0});
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t end = std::min(k, (g + 1) * group);
      float largest = 0x1p-100f;
      bool finite = true;
      for (int64_t l = g * group; l < end; ++l) {
        finite = finite && std::isfinite(row[l]);
        largest = std::max(largest, std::fabs(row[l]));
      }
      const float factor = 127.0f / largest;
      int sum = 0;
      for (int64_t l = g * group; l < end && finite; ++l) {
        const int q = static_cast<int>(std::nearbyint(row[l] * factor));
        out[l] = static_cast<uint8_t>(q);
        sum += q;
      }
      scales[g] = finite ? largest / 127.0f : std::numeric_limits<float>::quiet_NaN();
      scales[groups + g] = static_cast<float>(sum);
    }
  }
}

void MultiplyGroupInt4(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
  const Int4GroupView& w = WeightOf<GroupInt4Weight>(args).view;
  const int64_t row_bytes = WeightOf<GroupInt4Weight>(args).PackedRowBytes();
  const int64_t padded_k = kInt4Bitmap.PaddedK(w.k);
  const int64_t groups = w.Groups();
  for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
    const int64_t first = panel * kPanelColumns;
    const int64_t columns = std::min(kPanelColumns, w.n - first);
    for (int64_t i = 0; i < args.m; ++i) {
      const uint8_t* x = static_cast<const uint8_t*>(args.x) + i * row_bytes;
      const float* x_scales = reinterpret_cast<const float*>(x + padded_k);
      float* y = args.Y(i, panel);
      for (int64_t j = 0; j < columns; ++j) {
        float total = 0.0f;
        for (int64_t g = 0; g < groups; ++g) {
          const int zero = w.zero_points == nullptr ? kMiddleZeroPoint : w.ZeroPoints(panel, g)[j];
          int32_t sum = 0;
          for (int64_t l = g * w.group; l < std::min(w.k, (g + 1) * w.group); ++l) {
            // Inputs 8r … 8r+3 are low nibbles, 8r+4 … 8r+7 high ones of the same bytes.
            const int byte = w.PanelWeights(panel)[l / 8 * 64 + j * 4 + l % 4];
            sum += static_cast<int8_t>(x[l]) * ((l % 8 < 4 ? byte & 0xf : byte >> 4) - zero);
          }
          total += static_cast<float>(sum) * (Scale(w, panel, g, j) * x_scales[g]);
        }
        y[j] = args.bias != nullptr ? total + args.bias[first + j] : total;
      }
    }
  }
}

}  // namespace scalar
}  // namespace ortolan
