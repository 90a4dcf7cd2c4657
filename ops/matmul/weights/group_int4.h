// int4 weights in groups with zero points, and their activations, as the loops read them. Included by
// group_int4_kernels.cc only; local to each.
#pragma once

#include "matmul/group_int4_weight.h"
#include "matmul/weights/int4.h"

namespace ortolan {
namespace {

// What stands behind the q of r packed rows: for each of them
//     scales      f32 [groups][r]   NaN for a group that is not finite, whose q are zero
//     minus_sums  i32 [groups][r]   - (sum of q), for zero points other than 8: at most 128 x 127, an int16
//     starts      i32 [groups][r]   - kNibbleBias (sum of q): where sums begin, to end as those of q (w - 8)
//                 or, where a column adds nibbles up in 16 bits, i16 [chunks][r][2]: the same of inputs 0 and 1 of the
//                 quads of a chunk (group_int4_weight.h), and of 2 and 3. What words lose on the way they have again at
//                 the end, for that fits.
struct GroupNumbers {
  GroupNumbers(const void* end_of_q, int64_t numbers)
      : scales(static_cast<const float*>(end_of_q)),
        minus_sums(reinterpret_cast<const int32_t*>(scales + numbers)),
        starts(minus_sums + numbers) {}

  const float* scales;
  const int32_t* minus_sums;
  const int32_t* starts;
};

template <typename Simd>
struct GroupInt4Weights : Int4Products<Simd, ByteProducts<Simd, true>> {
  using Columns = simd::Columns<Simd>;
  using Weight = GroupInt4Weight;
  using Floats = typename Columns::Floats;
  using Ints = typename Columns::Ints;
  static constexpr bool kDense = true;
  // Where few rows of x are multiplied at once, taking nibbles apart costs as much as some of them.
  static constexpr bool kBuffered = Simd::kRegisters == 16 && Simd::kLanes > 1;
  static constexpr bool kNarrowChunks = Simd::kNarrowNibbleSums;

  static Ints Widen(const Ints& words) { return AddWide(Columns::SetInt(0), words); }
  static Ints AddWide(const Ints& sums, const Ints& words) {
    const auto ones = Simd::SetInt(0x00010001);
    return Columns::template Of<Ints>([&](int i) { return Simd::DotPair(sums.at[i], words.at[i], ones); });
  }

  struct Stream : Int4Stream<Simd, Storage::kDense> {
    Stream(const Weight& w, int64_t panel, const PrefetchDistances& ahead)
        : Int4Stream<Simd, Storage::kDense>(nullptr, w.view.PanelWeights(panel), 0, ahead) {}
  };

  static Storage StorageOf(const Weight&) { return Storage::kDense; }
  static int64_t Group(const Weight& w) { return w.view.group; }
  static int64_t PackedRowBytes(const Weight& w) { return w.PackedRowBytes(); }

  struct GroupScales {
    Floats scales;
    bool has_zero_points;
    Ints zero_points;  // zero point - 8 in the low half of each, zero in the high one
  };
  struct Scales {
    Scales(const Weight& w, int64_t panel, int64_t groups)
        : is_f16(w.view.scale_type == ScaleType::kFloat16),
          scales(w.view.scales + panel * groups * kPanelColumns * (is_f16 ? 2 : 4)),
          zero_points(w.view.zero_points == nullptr ? nullptr : w.view.zero_points + panel * groups * kPanelColumns) {}

    // Always inline: gcc makes a function of what many copies of a loop call for each group.
    __attribute__((always_inline)) GroupScales Of(int64_t group) const {
      const int64_t first = group * kPanelColumns;
      return {is_f16 ? Columns::template Of<Floats>(
                           [&](int i) { return Simd::LoadF16(scales + 2 * (first + i * Simd::kLanes)); })
                     : Columns::Load(reinterpret_cast<const float*>(scales + 4 * first)),
              zero_points != nullptr, zero_points == nullptr ? Columns::SetInt(0) : ZeroPoints(first)};
    }
    Ints ZeroPoints(int64_t first) const {
      return Columns::template Of<Ints>([&](int i) {
        const auto less_8 = Simd::SubtractInt(Simd::LoadUint8(zero_points + first + i * Simd::kLanes), Simd::SetInt(8));
        return Simd::AndInt(less_8, Simd::SetInt(0xffff));
      });
    }
    // Always inline: see PrefetchLines.
    __attribute__((always_inline)) void Prefetch(int64_t groups) const {
      PrefetchLines(scales, groups * kPanelColumns * (is_f16 ? 2 : 4));
      if (zero_points != nullptr) PrefetchLines(zero_points, groups * kPanelColumns);
    }

    bool is_f16;
    const uint8_t* scales;
    const uint8_t* zero_points;
  };

  template <int kRows>
  struct Numbers : GroupNumbers {
    Numbers(const void* end_of_q, int64_t groups) : GroupNumbers(end_of_q, groups * kRows) {}

    Ints Start(int64_t group, int row) const {
      const int64_t at = group * kRows + row;
      constexpr int32_t kBias = Simd::kNibbleBias;
      return Columns::SetInt(kNarrowChunks ? kBias * minus_sums[at] : starts[at]);
    }
    Ints StartChunk(int64_t chunk, int row) const { return Columns::SetInt(starts[chunk * kRows + row]); }
    Floats Add(const Floats& total, Ints sums, const GroupScales& of, int64_t group, int row) const {
      const int64_t at = group * kRows + row;
      if (of.has_zero_points) {
        const auto minus_sum = Simd::SetInt(minus_sums[at]);
        sums = Columns::template Of<Ints>(
            [&](int i) { return Simd::DotPair(sums.at[i], of.zero_points.at[i], minus_sum); });
      }
      const Floats scale = Columns::Multiply(of.scales, Columns::Set(scales[at]));
      return Columns::MultiplyAdd(Columns::ToFloat(sums), scale, total);
    }
    Floats End(const Floats& total, int) const { return total; }
  };

  // Where the words of a chunk begin.
  static int32_t Words(const InputSums& sums) {
    constexpr uint32_t kBias = Simd::kNibbleBias;
    const uint32_t low = 0 - kBias * static_cast<uint32_t>(sums.all - sums.upper);
    const uint32_t high = 0 - kBias * static_cast<uint32_t>(sums.upper);
    return static_cast<int32_t>((low & 0xffff) | high << 16);
  }

  // In a block of r rows
  //     q  i8 [k-quad / 4][r][4][4]   in the order of activations.h
  //     GroupNumbers
  static void PackRows(const Weight& w, const float* x, int64_t x_row_bytes, int64_t m, int64_t row_block,
                       void* packed) {
    const int64_t padded_k = kInt4Bitmap.PaddedK(w.k);
    const int64_t group = w.view.group;
    const int64_t groups = ScaleRows(w.k, group);
    const auto pack = [&](const float* row, char* block, int64_t rows, int64_t i) {
      float* scales = reinterpret_cast<float*>(block + rows * padded_k);
      int32_t* minus_sums = reinterpret_cast<int32_t*>(scales + groups * rows);
      int32_t* starts = minus_sums + groups * rows;
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t begin = g * group;
        const int64_t length = w.k - begin < group ? w.k - begin : group;
        const RowScale scale = ScaleOf<Simd>(row + begin, length);
        // The last group ends with the padding.
        const int64_t end = g + 1 == groups ? padded_k : begin + group;
        const int64_t part = kNarrowChunks ? w.ChunkInputs() : end - begin;
        int32_t sum = 0;
        for (int64_t from = begin; from < end; from += part) {
          const int64_t to = end - from < part ? end : from + part;
          const InputSums sums = QuantizeInputs<Simd>(row, w.k, from, to, scale, block, rows, i);
          sum += sums.all;
          const int64_t at = (kNarrowChunks ? from / part : g) * rows + i;
          starts[at] = kNarrowChunks ? Words(sums) : -static_cast<int32_t>(Simd::kNibbleBias) * sums.all;
        }
        scales[g * rows + i] = scale.scale;
        minus_sums[g * rows + i] = -sum;
      }
    };
    PackRowBlocks(x, x_row_bytes, m, row_block, packed, PackedRowBytes(w), pack);
  }
};

}  // namespace
}  // namespace ortolan
