// Weights in 2:4 storage for the loops (formats/two_four.h). Included by the headers beside it; local to each file.
//
// With few rows of x, activations are shuffled instead of weights: the activations of a row of weights are repeated,
// and one shuffle picks those of the weights stored in each column. For one row this takes few enough instructions that
// memory is the limit. For many rows it pays only if a product takes more than one instruction; otherwise stored rows
// are expanded to dense rows, once for all rows of x.
#pragma once

#include <cstdint>

#include "formats/two_four.h"
#include "matmul/activations.h"
#include "matmul/weights/bitmap_stream.h"

namespace ortolan {
namespace {

static_assert(kTwoFourSpanInputs == kSpanInputs);

// The stored weights and positions of a panel, row by row: 64 bytes of weights (or nibbles 0 … 15), and 64 bytes of
// positions, whose lowest two bits belong to the row.
template <typename Simd, const BitmapLayout& kLayout>
class TwoFourRows {
  using Columns = simd::Columns<Simd>;
  using Bytes = typename Columns::Bytes;
  static constexpr bool kNibbles = kLayout.value_bits == 4;

 public:
  TwoFourRows(const BitmapWeight& w, int64_t panel, const PrefetchDistances& ahead)
      : values(w.view.PanelValues(kLayout, panel)),
        masks_(w.view.PanelMasks(kLayout, panel)),
        ahead_(ahead.weights),
        block_ahead_(ahead.weight_blocks) {}

  template <Fetch kFetch>
  void StartSpan() {
    if constexpr (kFetch != Fetch::kNone) __builtin_prefetch(masks_ + Ahead<kFetch>());
    positions_ = Columns::LoadBytes(masks_);
    masks_ += kTwoFourPositionBytes;
  }
  // Return row `row` of the span. If kOddTimes16, odd rows of nibbles are multiplied by 16.
  template <Fetch kFetch, bool kOddTimes16>
  Bytes Weights(int row) {
    if (kNibbles && row % 2 == 1) {
      return Columns::template Of<Bytes>([&](int i) {
        return kOddTimes16 ? Simd::AndBytes(line_.at[i], Simd::SetBytes(0xf0)) : Simd::HighNibbles(line_.at[i]);
      });
    }
    if constexpr (kFetch != Fetch::kNone) __builtin_prefetch(values + Ahead<kFetch>());
    line_ = Columns::LoadBytes(values);
    values += kLineBytes;
    if constexpr (!kNibbles) return line_;
    return Columns::template Of<Bytes>([&](int i) { return Simd::LowNibbles(line_.at[i]); });
  }
  // Return the positions of the next row of the span.
  Bytes Positions() {
    const Bytes positions = positions_;
    positions_ = Columns::template Of<Bytes>([&](int i) { return Simd::template ShiftRightInt<2>(positions.at[i]); });
    return positions;
  }
  // See BitmapStream.
  void PrefetchFirst() const {
    PrefetchLines(values, ahead_);
    PrefetchLines(masks_, kFirstMaskBytes);
  }
  // Move to the position of another stream of the panel.
  void MoveTo(const TwoFourRows& other) {
    values = other.values;
    masks_ = other.masks_;
  }

  const uint8_t* values;

 private:
  template <Fetch kFetch>
  int64_t Ahead() const {
    return kFetch == Fetch::kExpand ? block_ahead_ : ahead_;
  }

  const uint8_t* masks_;
  int64_t ahead_;
  int64_t block_ahead_;
  Bytes positions_;
  Bytes line_;
};

// Expands to the rows of dense storage; int4 as nibbles.
template <typename Simd, const BitmapLayout& kLayout>
class TwoFourStream : public TwoFourRows<Simd, kLayout> {
  using Columns = simd::Columns<Simd>;
  using Bytes = typename Columns::Bytes;
  static constexpr bool kWords = kLayout.value_bits == 16;
  static constexpr bool kNibbles = kLayout.value_bits == 4;

 public:
  using TwoFourRows<Simd, kLayout>::TwoFourRows;

  template <Fetch kFetch, bool kOddTimes16>
  Bytes Next(int row) {
    static_assert(!kOddTimes16);
    if (row % 2 == 1) return Spread<1>();
    stored_ = this->template Weights<kFetch, false>(row / 2);
    // A zero nibble is kInt4Bias, so the bias is removed before and added back after, also where no weight is stored.
    if constexpr (kNibbles) stored_ = WithoutBias(stored_);
    const auto mask = Simd::SetInt(kWords ? 0x00030003 : 0x03030303);
    const Bytes positions = this->Positions();
    row_positions_ = Columns::template Of<Bytes>([&](int i) { return Simd::AndInt(positions.at[i], mask); });
    return Spread<0>();
  }
  void EndSpan() {}

 private:
  template <int kHalf>
  Bytes Spread() const {
    const Bytes spread = Columns::template Of<Bytes>([&](int i) {
      return kWords ? Simd::template SpreadWords<kHalf>(stored_.at[i], row_positions_.at[i])
                    : Simd::template SpreadBytes<kHalf>(stored_.at[i], row_positions_.at[i]);
    });
    return kNibbles ? WithoutBias(spread) : spread;
  }
  static Bytes WithoutBias(const Bytes& nibbles) {
    const auto bias = Simd::SetBytes(kInt4Bias);
    return Columns::template Of<Bytes>([&](int i) { return Simd::XorBytes(nibbles.at[i], bias); });
  }

  Bytes stored_;
  Bytes row_positions_;
};

// The stream of a storage.
template <typename Simd, Storage kStorage, const BitmapLayout& kLayout>
struct StreamOf {
  using Type = BitmapStream<Simd, kStorage, kLayout>;
};
template <typename Simd, const BitmapLayout& kLayout>
struct StreamOf<Simd, Storage::kTwoFour, kLayout> {
  using Type = TwoFourStream<Simd, kLayout>;
};

// Rows of 2:4 storage without expansion, for shuffled activations. Kind: the kind for expanded rows, which have half
// the inputs.
template <typename Simd, typename Kind>
struct TwoFourRow : Kind {
  using Columns = simd::Columns<Simd>;
  using Bytes = typename Columns::Bytes;
  static constexpr int kRowInputs = 2 * Kind::kRowInputs;
  static constexpr Fetch kFetchOneRow = Fetch::kMultiply;
  static constexpr bool kHoldsAll = false;
  static constexpr int kMostHeld = 0;
  struct Held {};

  struct Row {
    Bytes weights, positions;
  };
  static constexpr int64_t kStoredBytes = 2 * kLineBytes;
  static Row FromBytes(const Row& row) { return row; }
  static void StoreRow(const Row& row, uint8_t* to) {
    Columns::StoreBytes(to, row.weights);
    Columns::StoreBytes(to + kLineBytes, row.positions);
  }
  static constexpr int kParts = 1;
  template <int kPart, typename AnyRow>
  static const AnyRow& Part(const AnyRow& row) {
    return row;
  }
  static Row LoadRow(const uint8_t* from) { return {Columns::LoadBytes(from), Columns::LoadBytes(from + kLineBytes)}; }
};

// int8 and int4.
template <typename Simd, typename Kind, const BitmapLayout& kLayout>
struct TwoFourByteRow : TwoFourRow<Simd, Kind> {
  using Columns = simd::Columns<Simd>;
  using Bytes = typename Columns::Bytes;
  using Ints = typename Columns::Ints;
  using Row = typename TwoFourRow<Simd, Kind>::Row;
  static constexpr bool kNibbles = kLayout.value_bits == 4;
  static constexpr int kBias = kNibbles ? kInt4Bias : static_cast<int>(Simd::kInt8Bias);  // of the weights
  static constexpr bool kOneChain = kNibbles && !Simd::kNibblesTimes16;
  static constexpr int kOneRowChains = kOneChain ? 1 : kMostOneRowChains<Simd>;
  static constexpr int kMostChains = kOneChain ? 1 : 2;

  struct Stream : TwoFourRows<Simd, kLayout> {
    using TwoFourRows<Simd, kLayout>::TwoFourRows;

    template <Fetch kFetch, bool kOddTimes16>
    Row Next(int row) {
      Row next{this->template Weights<kFetch, kOddTimes16>(row), this->Positions()};
      if constexpr (!kNibbles && kBias != 0) {
        const auto bias = Simd::SetBytes(kBias);
        next.weights = Columns::template Of<Bytes>([&](int i) { return Simd::XorBytes(next.weights.at[i], bias); });
      }
      // Slots 2 and 3 belong to the second quad.
      const auto mask = Simd::SetInt(0x03030303);
      const auto quad = Simd::SetInt(0x04040000);
      next.positions =
          Columns::template Of<Bytes>([&](int i) { return Simd::SelectBits(mask, next.positions.at[i], quad); });
      return next;
    }
    void EndSpan() {}
  };

  static Bytes Picked(const Row& row, const int8_t* eight) {
    const auto x = Simd::RepeatEight(eight);
    return Columns::template Of<Bytes>([&](int i) { return Simd::PickBytes(x, row.positions.at[i]); });
  }
  static Ints Dot(const Ints& sums, const Bytes& weights, const Bytes& x) {
    return Columns::template Of<Ints>([&](int i) {
      return kNibbles ? Simd::DotNibbles(sums.at[i], weights.at[i], x.at[i])
                      : Simd::DotInt8(sums.at[i], weights.at[i], x.at[i]);
    });
  }
  static Ints MultiplyAdd(const Ints& sums, const Row& row, const int8_t* eight) {
    return Dot(sums, row.weights, Picked(row, eight));
  }
  template <int kPart>
  static Ints MultiplyAddPart(const Ints& sums, const Row& row, const int8_t* eight) {
    return MultiplyAdd(sums, row, eight);
  }
};

// The same for weights with a bias, which needs a second sum: each column has its own activations.
template <typename Simd, typename Kind, const BitmapLayout& kLayout>
struct TwoFourBiasedRow : TwoFourByteRow<Simd, Kind, kLayout> {
  using Rows = TwoFourByteRow<Simd, Kind, kLayout>;
  using Columns = simd::Columns<Simd>;
  using Bytes = typename Columns::Bytes;
  using Ints = typename Columns::Ints;
  static constexpr bool kBuffered = false;

  struct Row : Rows::Row {
    Bytes bias;
  };
  static Row FromBytes(const Row& row) { return row; }

  struct Stream : Rows::Stream {
    using Rows::Stream::Stream;

    template <Fetch kFetch, bool kOddTimes16>
    Row Next(int row) {
      const auto bias = Simd::SetBytes(kOddTimes16 && row % 2 == 1 ? 16 * Rows::kBias : Rows::kBias);
      return {Rows::Stream::template Next<kFetch, kOddTimes16>(row),
              Columns::template Of<Bytes>([&](int) { return bias; })};
    }
  };

  struct Sums {
    Ints of_weights, of_bias;
  };
  static Sums Zero() { return {Columns::SetInt(0), Columns::SetInt(0)}; }
  static Sums AddChains(const Sums& a, const Sums& b) {
    return {Columns::AddInt(a.of_weights, b.of_weights), Columns::AddInt(a.of_bias, b.of_bias)};
  }
  static Sums DivideBy16(const Sums& a) { return {Kind::DivideBy16(a.of_weights), Kind::DivideBy16(a.of_bias)}; }
  static Sums StartSpan(const Sums& a) { return {Kind::StartSpan(a.of_weights), Kind::StartSpan(a.of_bias)}; }
  static Sums EndSpan(const Sums& a, const Sums& span) {
    return {Kind::EndSpan(a.of_weights, span.of_weights), Kind::EndSpan(a.of_bias, span.of_bias)};
  }
  static Sums MultiplyAdd(const Sums& sums, const Row& row, const int8_t* eight) {
    const Bytes picked = Rows::Picked(row, eight);
    return {Rows::Dot(sums.of_weights, row.weights, picked), Rows::Dot(sums.of_bias, row.bias, picked)};
  }
  template <int kPart>
  static Sums MultiplyAddPart(const Sums& sums, const Row& row, const int8_t* eight) {
    return MultiplyAdd(sums, row, eight);
  }

  template <int kRows>
  struct RowTerms : Kind::template RowTerms<kRows> {
    using OfKind = typename Kind::template RowTerms<kRows>;
    using OfKind::OfKind;

    Sums Start(int64_t, int) const { return Zero(); }
    template <typename Floats, typename Scales>
    Floats Add(const Floats& total, const Sums& sums, const Scales& scales, int64_t group, int row) const {
      const Ints without = Columns::template Of<Ints>(
          [&](int i) { return Simd::SubtractInt(sums.of_weights.at[i], sums.of_bias.at[i]); });
      return OfKind::Add(total, without, scales, group, row);
    }
  };
};

}  // namespace
}  // namespace ortolan
