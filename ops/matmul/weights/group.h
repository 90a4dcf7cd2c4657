// Weights in groups of 4 and 8 bits, and their activations, for the loops: the common part of group_int4.h and
// group_int8.h. Local to each file that includes them.
#pragma once

#include "matmul/group_weight.h"
#include "matmul/weights/quantized.h"

namespace ortolan {
namespace {

// Stored after the q of r packed rows, for each of them:
//
//     scales       f32 [groups][r]   NaN for a group that is not finite, whose q are zero
//     minus_sums   i32 [groups][r]   - (sum of q), for zero points other than 8: at most 128 x 127, an int16
//     scaled_sums  f32 [groups][r]   if weights need them: scale x (sum of q)
//     starts       i32 [groups][r]   - (bias of the weights) x (sum of q): initial sums, which cancel the bias
//                  or, if a target sums nibbles in 16 bits, i16 [chunks][r][2]: the same for inputs 0 and 1 of the
//                  quads of a chunk (group_weight.h), and for inputs 2 and 3. Words may wrap around on the way; the
//                  final value fits.
struct GroupRowTerms {
  GroupRowTerms(const void* end_of_q, int64_t count, bool scaled)
      : scales(static_cast<const float*>(end_of_q)),
        minus_sums(reinterpret_cast<const int32_t*>(scales + count)),
        scaled_sums(scales + 2 * count),
        starts(minus_sums + (scaled ? 2 : 1) * count) {}

  const float* scales;
  const int32_t* minus_sums;
  const float* scaled_sums;
  const int32_t* starts;
};

// The values that end the groups of a panel. Of(group) loads them as flat structs, register by register, because gcc
// assembles other structs in memory. Always inline: gcc would make a function of it, as many copies of a loop call it
// for each group.
template <typename Simd>
struct GroupScales {
  using Columns = simd::Columns<Simd>;
  using Floats = typename Columns::Floats;

  struct OfGroup {
    Floats scales;
  };

  GroupScales(const GroupWeight& w, int64_t panel, int64_t groups)
      : is_f16(w.view.scale_type == ScaleType::kFloat16),
        scales(w.view.scales + panel * groups * kPanelColumns * Bytes()) {}

  __attribute__((always_inline)) OfGroup Of(int64_t group) const {
    return {Columns::template Of<Floats>([&](int i) { return Load(scales, group, i); })};
  }
  // Always inline, for the reason given at PrefetchLines.
  __attribute__((always_inline)) void Prefetch(int64_t begin, int64_t end) const {
    PrefetchLines(scales + begin * kPanelColumns * Bytes(), (end - begin) * kPanelColumns * Bytes());
  }

  int64_t Bytes() const { return is_f16 ? 2 : 4; }
  // Register i of a row of scales, or of values of their type.
  __attribute__((always_inline)) typename Simd::Float Load(const uint8_t* from, int64_t group, int i) const {
    const int64_t first = group * kPanelColumns + i * Simd::kLanes;
    return is_f16 ? Simd::LoadF16(from + 2 * first) : Simd::Load(reinterpret_cast<const float*>(from + 4 * first));
  }

  bool is_f16;
  const uint8_t* scales;
};

// Rows: how rows of weights are read and multiplied.
template <typename Simd, typename Rows>
struct GroupWeights : Rows {
  using Columns = simd::Columns<Simd>;
  using Weight = GroupWeight;
  using Floats = typename Columns::Floats;
  using Ints = typename Columns::Ints;
  static constexpr bool kDense = true;
  static constexpr bool kHasGroups = true;

  static Ints Widen(const Ints& words) { return AddWide(Columns::SetInt(0), words); }
  static Ints AddWide(const Ints& sums, const Ints& words) {
    const auto ones = Simd::SetInt(0x00010001);
    return Columns::template Of<Ints>([&](int i) { return Simd::DotPair(sums.at[i], words.at[i], ones); });
  }

  // Takes weights without zero points and minimums.
  static bool Takes(const Weight& w) { return w.view.zero_points == nullptr && w.view.minimums == nullptr; }
  static int64_t Group(const Weight& w) { return w.view.group; }
  static int64_t PackedRowBytes(const Weight& w) { return w.PackedRowBytes(); }

  using Scales = GroupScales<Simd>;

  template <int kRows, bool kScaledSums = false>
  struct RowTerms : GroupRowTerms {
    RowTerms(const void* end_of_q, int64_t groups) : GroupRowTerms(end_of_q, groups * kRows, kScaledSums) {}

    Ints Start(int64_t group, int64_t row) const {
      const int64_t at = group * kRows + row;
      constexpr int32_t kBias = Rows::kBias;
      if constexpr (kBias == 0) return Columns::SetInt(0);
      return Columns::SetInt(Rows::kNarrowChunks ? kBias * minus_sums[at] : starts[at]);
    }
    Ints StartChunk(int64_t chunk, int64_t row) const { return Columns::SetInt(starts[chunk * kRows + row]); }
    template <typename OfGroup>
    Floats Add(const Floats& total, const Ints& sums, const OfGroup& of, int64_t group, int64_t row) const {
      const Floats scale = Columns::Multiply(of.scales, Columns::Set(scales[group * kRows + row]));
      return Columns::MultiplyAdd(Columns::ToFloat(sums), scale, total);
    }
    Floats End(const Floats& total, int64_t) const { return total; }
  };

  // The initial words of a chunk.
  static int32_t Words(const InputSums& sums) {
    constexpr uint32_t kBias = Rows::kBias;
    const uint32_t low = 0 - kBias * static_cast<uint32_t>(sums.all - sums.upper);
    const uint32_t high = 0 - kBias * static_cast<uint32_t>(sums.upper);
    return static_cast<int32_t>((low & 0xffff) | high << 16);
  }

  // A block of r rows is
  //
  //     q  i8   in the order of activations.h
  //     GroupRowTerms
  //
  // All kinds of a weight share this order, except for scaled_sums.
  static void PackRows(const Weight& w, const float* x, int64_t x_row_bytes, int64_t m, int64_t row_block,
                       void* packed) {
    const int64_t padded_k = Rows::PaddedK(w);
    const int64_t group = w.view.group;
    const int64_t groups = ScaleRows(w.k, group);
    const bool scaled = w.TakesScaledSums();
    const auto pack = [&](const float* row, char* block, int64_t rows, int64_t i) {
      float* scales = reinterpret_cast<float*>(block + rows * padded_k);
      int32_t* minus_sums = reinterpret_cast<int32_t*>(scales + groups * rows);
      float* scaled_sums = scales + 2 * groups * rows;
      int32_t* starts = minus_sums + (scaled ? 2 : 1) * groups * rows;
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t begin = g * group;
        const int64_t length = w.k - begin < group ? w.k - begin : group;
        const RowScale scale = ScaleOf<Simd>(row + begin, length);
        // The last group includes the padding.
        const int64_t end = g + 1 == groups ? padded_k : begin + group;
        const int64_t part = Rows::kNarrowChunks ? w.ChunkInputs() : end - begin;
        int32_t sum = 0;
        for (int64_t from = begin; from < end; from += part) {
          const int64_t to = end - from < part ? end : from + part;
          const InputSums sums = QuantizeInputs<Simd>(row, w.k, from, to, scale, block, rows, i);
          sum += sums.all;
          const int64_t at = (Rows::kNarrowChunks ? from / part : g) * rows + i;
          starts[at] = Rows::kNarrowChunks ? Words(sums) : -static_cast<int32_t>(Rows::kBias) * sums.all;
        }
        scales[g * rows + i] = scale.scale;
        minus_sums[g * rows + i] = -sum;
        if (scaled) scaled_sums[g * rows + i] = scale.scale * static_cast<float>(sum);
      }
      if constexpr (Rows::kOffsetBlocks) {
        if (rows > 1 && i + 1 == rows) {
          for (int64_t at = 0; at < rows * padded_k; ++at) block[at] = static_cast<char>(block[at] ^ 0x80);
        }
      }
    };
    PackRowBlocks(x, x_row_bytes, m, row_block, packed, PackedRowBytes(w), pack);
  }
};

}  // namespace
}  // namespace ortolan
