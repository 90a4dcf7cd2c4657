// int4 weights in groups for the loops: symmetric, with integer zero points, and with minimums or fractions. Each is a
// separate kind, because the ends of short groups leave no time for a branch. Included by group_int4_kernels.cc only;
// local to each.
#pragma once

#include "matmul/weights/group.h"
#include "matmul/weights/int4.h"

namespace ortolan {
namespace {

template <typename Simd>
struct Int4GroupRows : Int4Products<Simd, ByteProducts<Simd, true>> {
  // With few rows of x at once, splitting nibbles costs as much as multiplying some of them.
  static constexpr bool kBuffered = Simd::kRegisters == 16 && Simd::kLanes > 1;
  static constexpr bool kNarrowChunks = Simd::kNarrowNibbleSums;

  struct Stream : Int4Stream<Simd, Storage::kDense> {
    Stream(const GroupWeight& w, int64_t panel, const PrefetchDistances& ahead)
        : Int4Stream<Simd, Storage::kDense>(
              nullptr, w.view.weights + panel * kInt4Bitmap.Tiles(w.k) * kInt4Bitmap.TileEntries(), 0, ahead) {}
  };
};

template <typename Simd>
using GroupInt4Weights = GroupWeights<Simd, Int4GroupRows<Simd>>;

template <typename Simd>
struct GroupInt4ZeroPoints : GroupInt4Weights<Simd> {
  using Base = GroupInt4Weights<Simd>;
  using typename Base::Columns;
  using typename Base::Floats;
  using typename Base::Ints;

  static bool Takes(const GroupWeight& w) { return w.view.zero_points != nullptr && !w.view.HasFractions(); }

  struct Scales : Base::Scales {
    struct OfGroup {
      Floats scales;
      Ints zero_points;  // zero point - 8 in the low half of each, zero in the high one
    };
    Scales(const GroupWeight& w, int64_t panel, int64_t groups)
        : Base::Scales(w, panel, groups), zero_points(w.view.zero_points + panel * groups * kPanelColumns) {}

    __attribute__((always_inline)) OfGroup Of(int64_t group) const {
      const uint8_t* from = zero_points + group * kPanelColumns;
      return {Base::Scales::Of(group).scales, Columns::template Of<Ints>([&](int i) {
                const auto less_8 = Simd::SubtractInt(Simd::LoadUint8(from + i * Simd::kLanes), Simd::SetInt(8));
                return Simd::AndInt(less_8, Simd::SetInt(0xffff));
              })};
    }
    __attribute__((always_inline)) void Prefetch(int64_t begin, int64_t end) const {
      Base::Scales::Prefetch(begin, end);
      PrefetchLines(zero_points + begin * kPanelColumns, (end - begin) * kPanelColumns);
    }

    const uint8_t* zero_points;
  };

  template <int kRows>
  struct RowTerms : Base::template RowTerms<kRows> {
    using Of = typename Base::template RowTerms<kRows>;
    using Of::Of;
    Floats Add(const Floats& total, const Ints& sums, const typename Scales::OfGroup& of, int64_t group,
               int64_t row) const {
      const auto minus_sum = Simd::SetInt(this->minus_sums[group * kRows + row]);
      const Ints exact =
          Columns::template Of<Ints>([&](int i) { return Simd::DotPair(sums.at[i], of.zero_points.at[i], minus_sum); });
      return Of::Add(total, exact, of, group, row);
    }
  };
};

template <typename Simd>
struct GroupInt4Minimums : GroupInt4Weights<Simd> {
  using Base = GroupInt4Weights<Simd>;
  using typename Base::Columns;
  using typename Base::Floats;
  using typename Base::Ints;

  static bool Takes(const GroupWeight& w) { return w.TakesScaledSums(); }

  struct Scales : Base::Scales {
    struct OfGroup {
      Floats scales;
      Floats minimums;  // adjusted to weights of nibble - 8
    };
    Scales(const GroupWeight& w, int64_t panel, int64_t groups)
        : Base::Scales(w, panel, groups),
          fractions(w.view.HasFractions()),
          bytes(fractions ? 1 : this->Bytes()),
          offsets((fractions ? w.view.zero_points : w.view.minimums) + panel * groups * kPanelColumns * bytes) {}

    __attribute__((always_inline)) OfGroup Of(int64_t group) const {
      return {Base::Scales::Of(group).scales, Columns::template Of<Floats>([&](int i) {
                const auto scale = this->Load(this->scales, group, i);
                if (!fractions) return Simd::MultiplyAdd(Simd::Set(8.0f), scale, this->Load(offsets, group, i));
                const auto sixteenths = Simd::LoadUint8(offsets + group * kPanelColumns + i * Simd::kLanes);
                const auto steps = Simd::ToFloat(Simd::SubtractInt(Simd::SetInt(8 * kFractionSteps), sixteenths));
                return Simd::Multiply(Simd::Multiply(steps, Simd::Set(1.0f / kFractionSteps)), scale);
              })};
    }
    __attribute__((always_inline)) void Prefetch(int64_t begin, int64_t end) const {
      Base::Scales::Prefetch(begin, end);
      PrefetchLines(offsets + begin * kPanelColumns * bytes, (end - begin) * kPanelColumns * bytes);
    }

    bool fractions;
    int64_t bytes;
    const uint8_t* offsets;  // minimums, or zero points in units of 1/16
  };

  template <int kRows>
  struct RowTerms : Base::template RowTerms<kRows, true> {
    using Of = typename Base::template RowTerms<kRows, true>;
    using Of::Of;
    Floats Add(const Floats& total, const Ints& sums, const typename Scales::OfGroup& of, int64_t group,
               int64_t row) const {
      const auto scaled_sum = Simd::Set(this->scaled_sums[group * kRows + row]);
      return Of::Add(Columns::MultiplyAdd(scaled_sum, of.minimums, total), sums, of, group, row);
    }
  };
};

}  // namespace
}  // namespace ortolan
