#include "matmul/nbits_weight.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "formats/int4_group.h"
#include "formats/int8_group.h"
#include "host/op_error.h"
#include "matmul/pack_panels.h"

namespace ortolan {
namespace {

constexpr int64_t kGroupSizes[] = {128, 64, 32};  // best first
constexpr float kMiddle4 = 8;
constexpr float kMiddle8 = 128;
constexpr float kLargestScale8 = std::numeric_limits<float>::max() / 256;  // finite after multiplication with a code

// Call at(first input, end, block) for the blocks of a column.
template <typename At>
void ForEachBlock(const NBitsWeight& stored, const At& at) {
  for (int64_t block = 0; block < stored.Blocks(); ++block) {
    const int64_t first = block * stored.block_size;
    at(first, std::min(first + stored.block_size, stored.k), block);
  }
}

bool IsInteger(float value, float most) { return value >= 0 && value <= most && value == std::rint(value); }

bool AreAll(const std::vector<float>& codes, float value) {
  return std::all_of(codes.begin(), codes.end(), [=](float one) { return one == value; });
}

// Return whether each column has one scale and zero point in all blocks of each run of inputs.
bool IsConstantIn(const NBitsWeight& stored, int64_t run) {
  const int64_t blocks = stored.Blocks();
  for (int64_t first = 0; first < stored.k; first += run) {
    const int64_t begin = first / stored.block_size;
    const int64_t last = (std::min(first + run, stored.k) - 1) / stored.block_size;
    if (begin == last) continue;
    for (int64_t j = 0; j < stored.n; ++j) {
      const auto same = [=](const std::vector<float>& rows) {
        const auto row = rows.begin() + j * blocks;
        return std::all_of(row + begin + 1, row + last + 1, [=](float one) { return one == row[begin]; });
      };
      if (!same(stored.scales) || (!stored.zero_points.empty() && !same(stored.zero_points))) return false;
    }
  }
  return true;
}

// Return the block size if it is a group size, else the largest group size that divides it, or simply the largest if
// there is only one block. Return 0 if no group size fits.
int64_t GroupOfBlock(int64_t k, int64_t block_size) {
  if (std::find(std::begin(kGroupSizes), std::end(kGroupSizes), block_size) != std::end(kGroupSizes)) return block_size;
  if (block_size >= k) return kGroupSizes[0];  // there is only one block
  for (const int64_t size : kGroupSizes) {
    if (block_size % size == 0) return size;
  }
  return 0;
}

// With 8 bits, neighbouring blocks of equal scales form one group.
int64_t GroupOf(const NBitsWeight& stored) {
  if (stored.bits == 4) return GroupOfBlock(stored.k, stored.block_size);
  for (const int64_t size : kGroupSizes) {
    if (IsConstantIn(stored, size)) return size;
  }
  return 0;
}

std::string WhyNot4(const NBitsWeight& stored) {
  for (const float zero_point : stored.zero_points) {
    if (!std::isfinite(zero_point)) return "its zero points hold NaN or infinity, expected finite numbers";
  }
  for (size_t i = 0; i < stored.scales.size(); ++i) {
    const float scale = stored.scales[i];
    const float minimum = stored.zero_points.empty() ? 0.0f : scale * stored.zero_points[i];
    if (!std::isfinite(std::abs(scale) * kLargestInt4 + std::abs(minimum))) {
      return "its scales hold NaN, infinity or values that make weights overflow";
    }
  }
  return {};
}

// The range of a column's codes less their zero points.
struct Range {
  int least = 255;
  int most = -255;
};

Range RangeOf(const NBitsWeight& stored, int64_t column) {
  const uint8_t* const codes = stored.codes + column * stored.ColumnBytes();
  Range range;
  ForEachBlock(stored, [&](int64_t first, int64_t end, int64_t block) {
    uint8_t least = 255, most = 0;
    for (int64_t l = first; l < end; ++l) {
      least = std::min(least, codes[l]);
      most = std::max(most, codes[l]);
    }
    const int zero_point = static_cast<int>(stored.zero_points[static_cast<size_t>(column * stored.Blocks() + block)]);
    range.least = std::min(range.least, least - zero_point);
    range.most = std::max(range.most, most - zero_point);
  });
  return range;
}

std::string WhyNot8(const NBitsWeight& stored) {
  for (const float scale : stored.scales) {
    if (!(std::abs(scale) <= kLargestScale8)) {
      return ErrorText("its scales hold ", scale, ", expected finite values below 1e36");
    }
  }
  for (const float zero_point : stored.zero_points) {
    if (!IsInteger(zero_point, 255)) {
      return ErrorText("its zero points hold ", zero_point, ", expected integers 0 to 255");
    }
  }
  if (AreAll(stored.zero_points, kMiddle8)) return {};
  for (int64_t j = 0; j < stored.n; ++j) {
    const Range range = RangeOf(stored, j);
    if (range.least < -128 || range.most > 127) {
      return ErrorText("its values less their zero points range from ", range.least, " to ", range.most,
                       ", expected -128 to 127; quantize with symmetric int8 weights");
    }
  }
  return {};
}

// Return the float16 of the same value, if a normal one exists. (Subnormals would do, but are not worth the code.)
std::optional<uint16_t> ToHalf(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000, exponent = bits >> 23 & 0xff, fraction = bits & 0x7fffff;
  if ((bits << 1) == 0) return static_cast<uint16_t>(sign);
  if (exponent < 113 || exponent > 142 || (fraction & 0x1fff) != 0) return std::nullopt;
  return static_cast<uint16_t>(sign | (exponent - 112) << 10 | fraction >> 13);
}

bool AreHalves(const std::vector<float>& rows) {
  return std::all_of(rows.begin(), rows.end(), [](float value) { return ToHalf(value).has_value(); });
}

// Call write(index in [panels, groups, 16], value) for the value of each block and group.
template <typename Write>
void SpreadRows(const NBitsWeight& stored, const GroupWeight& w, const std::vector<float>& rows, const Write& write) {
  const int64_t groups = ScaleRows(w.k, w.view.group);
  for (int64_t j = 0; j < w.n; ++j) {
    const float* const row = rows.data() + j * stored.Blocks();
    int64_t index = j / kPanelColumns * groups * kPanelColumns + j % kPanelColumns;
    for (int64_t g = 0; g < groups; ++g, index += kPanelColumns) {
      write(index, row[g * w.view.group / stored.block_size]);
    }
  }
}

LineBytes Zeros(int64_t bytes) {
  LineBytes memory(bytes);
  std::memset(memory.data(), 0, static_cast<size_t>(bytes));
  return memory;
}

// Pack scales or minimums in the scale type.
LineBytes PackFloats(const NBitsWeight& stored, const GroupWeight& w, const std::vector<float>& rows) {
  const int64_t count = BitmapPanels(w.n) * ScaleRows(w.k, w.view.group) * kPanelColumns;
  const bool is_half = w.view.scale_type == ScaleType::kFloat16;
  LineBytes packed = Zeros(count * (is_half ? 2 : 4));
  SpreadRows(stored, w, rows, [&](int64_t index, float value) {
    if (is_half) {
      const uint16_t half = *ToHalf(value);
      std::memcpy(packed.data() + 2 * index, &half, sizeof(half));
    } else {
      std::memcpy(packed.data() + 4 * index, &value, sizeof(value));
    }
  });
  return packed;
}

int64_t SizeOf(std::span<const uint8_t> bytes) { return static_cast<int64_t>(bytes.size()); }

// Return why kernels cannot run on the packed weights; empty if they can.
std::string WhyNotPacked(const PackedNBits& packed) {
  if (packed.bits != 4 && packed.bits != 8) return ErrorText("its weight has ", packed.bits, " bits, expected 4 or 8");
  const int64_t scale_bytes = packed.has_half_scales ? 2 : 4;
  for (const std::span<const uint8_t> rows : {packed.scales, packed.minimums}) {
    if (SizeOf(rows) % scale_bytes != 0) return ErrorText("its scales or minimums hold ", rows.size(), " bytes");
  }
  if (packed.bits == 8 && !(packed.zero_points.empty() && packed.minimums.empty())) {
    return "its 8-bit weight has zero points or minimums, expected neither";
  }
  GroupClaim claim;
  claim.k = packed.k;
  claim.n = packed.n;
  claim.group = packed.group;
  claim.weight_bytes = SizeOf(packed.weights);
  claim.scale_count = SizeOf(packed.scales) / scale_bytes;
  claim.zero_points = packed.zero_points.data();
  claim.zero_point_count = SizeOf(packed.zero_points);
  claim.minimum_count = SizeOf(packed.minimums) / scale_bytes;
  return ValidateGroups(packed.bits == 4 ? kInt4Bitmap : kInt8Bitmap, claim);
}

}  // namespace

std::string WhyNotSizes(int64_t k, int64_t n, int64_t bits, int64_t block_size) {
  if (bits != 4 && bits != 8) return ErrorText("its weight is stored in ", bits, " bits, expected 4 or 8");
  if (k < 1 || n < 1 || n > kMaxDimension) {
    return ErrorText("its weight is ", k, " x ", n, ", expected 1 or more inputs and outputs");
  }
  if (k > kInt4Bitmap.max_k) {
    return ErrorText("it has ", k, " inputs, and a sum of more than ", kInt4Bitmap.max_k,
                     " quantized products may overflow");
  }
  const bool is_odd = bits == 4 && block_size % 2 != 0;
  if (block_size < 1 || is_odd || block_size > kMaxDimension || (bits == 4 && GroupOfBlock(k, block_size) == 0)) {
    return ErrorText("its block_size is ", block_size, ", expected a multiple of 32");
  }
  return {};
}

std::string NBitsGroups::WhyNot(const NBitsWeight& stored) {
  const std::string problem = stored.bits == 4 ? WhyNot4(stored) : WhyNot8(stored);
  if (!problem.empty() || GroupOf(stored) != 0) return problem;
  return ErrorText("its scales are for blocks of ", stored.block_size, " inputs, expected a multiple of 32");
}

NBitsGroups::NBitsGroups(const NBitsWeight& stored) : kind_(stored.bits == 4 ? Int4Groups() : Int8Groups()) {
  const std::string problem = WhyNot(stored);
  if (!problem.empty()) throw OpError(problem);
  w_.view.k = w_.k = stored.k;
  w_.view.n = w_.n = stored.n;
  w_.view.group = GroupOf(stored);
  weights_ = LineBytes(GroupWeightBytes(kind_.layout, stored.k, stored.n));
  w_.view.weights = weights_.data();
  if (stored.bits == 4) {
    PackCodes4(stored);
  } else {
    PackCodes8(stored);
  }
  PackScales(stored);
}

NBitsGroups::NBitsGroups(const PackedNBits& packed) : kind_(packed.bits == 4 ? Int4Groups() : Int8Groups()) {
  const std::string problem = WhyNotPacked(packed);
  if (!problem.empty()) throw OpError(problem);
  GroupView& view = w_.view;
  view.k = w_.k = packed.k;
  view.n = w_.n = packed.n;
  view.group = packed.group;
  view.scale_type = packed.has_half_scales ? ScaleType::kFloat16 : ScaleType::kFloat32;
  view.weights = packed.weights.data();
  view.scales = packed.scales.data();
  if (!packed.zero_points.empty()) view.zero_points = packed.zero_points.data();
  if (!packed.minimums.empty()) view.minimums = packed.minimums.data();
}

PackedNBits NBitsGroups::Packed() const {
  const GroupView& view = w_.view;
  const auto bytes = [](const uint8_t* data, int64_t size) {
    return std::span(data, data == nullptr ? 0 : static_cast<size_t>(size));
  };
  PackedNBits packed;
  packed.k = w_.k;
  packed.n = w_.n;
  packed.bits = kind_.layout.value_bits;
  packed.group = view.group;
  packed.has_half_scales = view.scale_type == ScaleType::kFloat16;
  const int64_t count = BitmapPanels(w_.n) * ScaleRows(w_.k, view.group) * kPanelColumns;
  const int64_t scale_bytes = count * (packed.has_half_scales ? 2 : 4);
  packed.weights = bytes(view.weights, GroupWeightBytes(kind_.layout, w_.k, w_.n));
  packed.scales = bytes(view.scales, scale_bytes);
  packed.zero_points = bytes(view.zero_points, count);
  packed.minimums = bytes(view.minimums, scale_bytes);
  return packed;
}

void NBitsGroups::PackCodes4(const NBitsWeight& stored) {
  const int64_t panel_bytes = GroupWeightBytes(kind_.layout, w_.k, 1);
  ForEachPanel(BitmapPanels(w_.n), panel_bytes, 0, [&](int64_t panel, int8_t*) {
    const int64_t column = panel * kPanelColumns;
    PackInt4GroupPanel(stored.codes + column * stored.ColumnBytes(), stored.ColumnBytes(), w_.k,
                       std::min(kPanelColumns, w_.n - column), weights_.data() + panel * panel_bytes);
  });
}

void NBitsGroups::PackCodes8(const NBitsWeight& stored) {
  const int64_t padded_k = kind_.layout.PaddedK(w_.k);
  const int64_t panel_bytes = GroupWeightBytes(kind_.layout, w_.k, 1);
  ForEachPanel(BitmapPanels(w_.n), panel_bytes, padded_k * kPanelColumns, [&](int64_t panel, int8_t* columns) {
    std::fill_n(columns, padded_k * kPanelColumns, int8_t{0});
    const int64_t end_column = std::min(w_.n, (panel + 1) * kPanelColumns);
    for (int64_t j = panel * kPanelColumns; j < end_column; ++j) {
      const uint8_t* const codes = stored.codes + j * stored.ColumnBytes();
      int8_t* const q = columns + j % kPanelColumns * padded_k;
      ForEachBlock(stored, [&](int64_t first, int64_t end, int64_t block) {
        const size_t index = static_cast<size_t>(j * stored.Blocks() + block);
        const int zero_point = static_cast<int>(stored.zero_points.empty() ? kMiddle8 : stored.zero_points[index]);
        for (int64_t l = first; l < end; ++l) q[l] = static_cast<int8_t>(codes[l] - zero_point);
      });
    }
    PackInt8GroupPanel(columns, w_.k, weights_.data() + panel * panel_bytes);
  });
}

// Pack scales and, for 4 bits, zero points or minimums; as float16 if it represents all of them.
void NBitsGroups::PackScales(const NBitsWeight& stored) {
  GroupView& view = w_.view;
  const bool has_zero_points = stored.bits == 4 && !stored.zero_points.empty();
  const bool is_whole = std::all_of(stored.zero_points.begin(), stored.zero_points.end(),
                                    [](float zero_point) { return IsInteger(zero_point, kLargestZeroPoint); });
  std::vector<float> minimums;
  if (has_zero_points && !is_whole) {
    minimums.resize(stored.scales.size());
    std::transform(stored.scales.begin(), stored.scales.end(), stored.zero_points.begin(), minimums.begin(),
                   [](float scale, float zero_point) { return -scale * zero_point; });
  }
  const bool is_half = AreHalves(stored.scales) && AreHalves(minimums);
  view.scale_type = is_half ? ScaleType::kFloat16 : ScaleType::kFloat32;
  scales_ = PackFloats(stored, w_, stored.scales);
  view.scales = scales_.data();
  if (!minimums.empty()) {
    minimums_ = PackFloats(stored, w_, minimums);
    view.minimums = minimums_.data();
  } else if (has_zero_points && !AreAll(stored.zero_points, kMiddle4)) {
    zero_points_ = Zeros(BitmapPanels(w_.n) * ScaleRows(w_.k, view.group) * kPanelColumns);
    SpreadRows(stored, w_, stored.zero_points,
               [&](int64_t index, float value) { zero_points_.data()[index] = static_cast<uint8_t>(value); });
    view.zero_points = zero_points_.data();
  }
}

}  // namespace ortolan
