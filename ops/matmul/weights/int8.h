// int8 weights for the loops. Included by int8_kernels.cc only; local to each.
#pragma once

#include "matmul/weights/quantized.h"
#include "matmul/weights/two_four.h"

namespace ortolan {
namespace {

// Weights as stored, plus the bias that the target's products need.
template <typename Simd, Storage kStorage>
struct Int8Stream : StreamOf<Simd, kStorage, kInt8Bitmap>::Type {
  using Stored = typename StreamOf<Simd, kStorage, kInt8Bitmap>::Type;
  using Columns = simd::Columns<Simd>;
  using Bytes = typename Columns::Bytes;
  using Stored::Stored;

  template <Fetch kFetch, bool kOddTimes16>
  Bytes Next(int row) {
    const Bytes weights = Stored::template Next<kFetch, kOddTimes16>(row);
    if constexpr (Simd::kInt8Bias == 0) return weights;
    const auto bias = Simd::SetBytes(Simd::kInt8Bias);
    return Columns::template Of<Bytes>([&](int i) { return Simd::XorBytes(weights.at[i], bias); });
  }
};

template <typename Simd, Storage kStorage>
struct Int8Weights : RowQuantized<Simd, false> {
  using Columns = simd::Columns<Simd>;
  using Weight = BitmapWeight;
  using Stream = Int8Stream<Simd, kStorage>;
  using Floats = typename Columns::Floats;
  using Ints = typename Columns::Ints;
  static constexpr bool kDense = kStorage == Storage::kDense;
  static constexpr bool kStoredTiles = kDense;
  static constexpr bool kHasGroups = false;
  static constexpr bool kBuffered = !kDense;
  static constexpr Fetch kFetchOneRow = kDense ? Fetch::kNone : Fetch::kMultiply;
  static constexpr int kOneRowChains = kMostOneRowChains<Simd>;
  static constexpr int kMostChains = 2;

  static bool Takes(const Weight& w) { return w.view.StoredAs() == kStorage; }
  static int64_t Group(const Weight&) { return kWholeColumn; }

  struct OfPanel {
    Floats scales;
    const int32_t* column_sums;  // [16], or null
    const int32_t* zero_points;  // [16], or null
  };
  struct Scales {
    Scales(const Weight& w, int64_t panel, int64_t)
        : of{Columns::Load(reinterpret_cast<const float*>(w.Scales(panel, 0))),
             w.column_sums == nullptr ? nullptr : w.column_sums + panel * kPanelColumns,
             w.zero_points == nullptr ? nullptr : w.zero_points + panel * kPanelColumns} {}
    const OfPanel& Of(int64_t) const { return of; }
    OfPanel of;
  };
  template <int kRows>
  struct RowTerms : QuantizedRowTerms<Simd, kRows> {
    using QuantizedRowTerms<Simd, kRows>::QuantizedRowTerms;
    Floats Add(const Floats&, const Ints& sums, const OfPanel& of, int64_t, int row) const {
      const Floats scale = Columns::Multiply(of.scales, Columns::Set(this->scales[row]));
      if (of.column_sums == nullptr) return Columns::Multiply(Columns::ToFloat(sums), scale);
      Ints exact = AddProduct(sums, of.column_sums, this->starts[kRows + row]);
      if (of.zero_points != nullptr) exact = AddProduct(exact, of.zero_points, this->starts[2 * kRows + row]);
      return Columns::Multiply(Columns::ToFloat(exact), scale);
    }
    static Ints AddProduct(const Ints& sums, const int32_t* of_columns, int32_t of_row) {
      const Ints columns = Columns::LoadInt(of_columns);
      const auto factor = Simd::SetInt(of_row);
      return Columns::template Of<Ints>(
          [&](int i) { return Simd::AddInt(sums.at[i], Simd::MultiplyInt(columns.at[i], factor)); });
    }
    Floats End(const Floats& total, int) const { return total; }
  };
};

template <typename Simd>
struct FewRowsKindOf<Int8Weights<Simd, Storage::kTwoFour>> {
  using Type = TwoFourBiasedRow<Simd, Int8Weights<Simd, Storage::kTwoFour>, kInt8Bitmap>;
  static constexpr int64_t kMostRows = 1;
};
// Without a bias, a product of signed bytes takes several instructions, and half of them cost as much as a shuffle.
template <typename Simd>
  requires(Simd::kInt8Bias == 0)
struct FewRowsKindOf<Int8Weights<Simd, Storage::kTwoFour>> {
  using Type = TwoFourByteRow<Simd, Int8Weights<Simd, Storage::kTwoFour>, kInt8Bitmap>;
  static constexpr int64_t kMostRows = Simd::kRowPairs ? 1 : kAnyRows;
};

}  // namespace
}  // namespace ortolan
