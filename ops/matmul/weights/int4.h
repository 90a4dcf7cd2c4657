// int4 weights for the loops: the stream shared with weights in groups (group_int4.h), and the weights of the bitmap
// format. Included by *int4_kernels.cc only; local to each.
#pragma once

#include "formats/bitmap_int4.h"
#include "matmul/weights/quantized.h"
#include "matmul/weights/two_four.h"

namespace ortolan {
namespace {

// Nibbles are weights plus kInt4Bias; they are used as they are, or with the bias removed.
template <typename Simd, Storage kStorage>
class Int4Stream {
  using Columns = simd::Columns<Simd>;
  using Bytes = typename Columns::Bytes;
  static constexpr bool kDense = kStorage == Storage::kDense;
  static_assert(Simd::kNibbleBias == 0 || Simd::kNibbleBias == kInt4Bias);

 public:
  // span_bytes: average size of a bitmap's values per span.
  Int4Stream(const uint8_t* masks, const uint8_t* panel_values, int64_t span_bytes, const PrefetchDistances& ahead)
      : values(panel_values),
        odd_(panel_values),
        masks_(masks),
        values_ahead_(kDense ? ahead.int4 : ahead.int4_bitmap),
        masks_ahead_(ahead.int4_masks),
        many_bytes_(span_bytes > 5 * kLineBytes / 2) {}

  template <Fetch kFetch>
  void StartSpan() const {
    if constexpr (!kDense) __builtin_prefetch(masks_ + masks_ahead_);
  }
  // Return the next row; an odd row may be multiplied by 16, which saves a shift.
  template <Fetch kFetch, bool kOddTimes16>
  Bytes Next(int row) {
    if constexpr (kDense) {
      // The same bytes hold an even and an odd row.
      if (row % 2 == 0) {
        __builtin_prefetch(values + values_ahead_);
        bytes_ = Columns::LoadBytes(values);
        values += kLineBytes;
        return Low(bytes_);
      }
      return kOddTimes16 ? HighTimes16(bytes_) : High(bytes_);
    } else {
      // Prefetch a line every two or four rows, depending on the size of a span.
      if (row % 4 == 0 || (row % 2 == 0 && many_bytes_)) __builtin_prefetch(values + values_ahead_);
      const uint64_t mask = LoadMask<uint64_t>(masks_, row);
      const uint8_t*& next = row % 2 == 1 ? odd_ : values;
      const uint8_t* from = next;
      next += __builtin_popcountll(mask);
      // A weight that is not stored is zero, in either nibble.
      const Bytes bytes = Columns::ExpandBytes(mask, from, [](uint64_t bits, const uint8_t* stored, int first) {
        return Simd::ExpandBytesElse(kInt4Bias | kInt4Bias << 4, bits, stored, first);
      });
      if (row % 2 == 0) return Low(bytes);
      return kOddTimes16 ? HighTimes16(bytes) : High(bytes);
    }
  }
  void EndSpan() {
    if constexpr (!kDense) masks_ += kSpanMaskBytes;
  }
  // Move to the position of another stream of the panel.
  void MoveTo(const Int4Stream& other) {
    values = other.values;
    odd_ = other.odd_;
    masks_ = other.masks_;
  }

  const uint8_t* values;  // of even rows; in dense storage of all rows

 private:
  static Bytes Low(const Bytes& bytes) {
    return Columns::template Of<Bytes>([&](int i) { return Biased(Simd::LowNibbles(bytes.at[i])); });
  }
  static Bytes High(const Bytes& bytes) {
    return Columns::template Of<Bytes>([&](int i) { return Biased(Simd::HighNibbles(bytes.at[i])); });
  }
  static Bytes HighTimes16(const Bytes& bytes) {
    const auto high = Simd::SetBytes(0xf0);
    return Columns::template Of<Bytes>([&](int i) { return Simd::AndBytes(bytes.at[i], high); });
  }
  static typename Simd::Bytes Biased(const typename Simd::Bytes& nibbles) {
    return Simd::kNibbleBias != 0 ? nibbles : Simd::SubtractBytes(nibbles, Simd::SetBytes(kInt4Bias));
  }

  const uint8_t* odd_;  // of odd rows in a bitmap
  const uint8_t* masks_;
  int64_t values_ahead_;
  int64_t masks_ahead_;
  bool many_bytes_;
  Bytes bytes_;
};

// Products: ByteProducts with a type of activations.
template <typename Simd, typename Products>
struct Int4Products : Products {
  using Columns = simd::Columns<Simd>;
  using Sums = typename Columns::Ints;
  static constexpr bool kStoredTiles = false;
  static constexpr bool kHasGroups = true;
  static constexpr Fetch kFetchOneRow = Fetch::kMultiply;
  static constexpr int kOneRowChains = Simd::kNibblesTimes16 ? kMostOneRowChains<Simd> : 1;
  static constexpr int kMostChains = Simd::kNibblesTimes16 ? 2 : 1;

  // Prefetch distance of one row of x for dense weights.
  static int64_t OneRowAhead(const PrefetchDistances& ahead) { return ahead.int4; }

  // Chains of odd rows hold 16 times their sums.
  static Sums DivideBy16(const Sums& sums) {
    return Columns::template Of<Sums>([&](int i) { return Simd::template ShiftRightSigned<4>(sums.at[i]); });
  }
};

// The stream of a bitmap weight.
template <typename Simd, Storage kStorage>
struct StoredInt4 : Int4Stream<Simd, kStorage> {
  StoredInt4(const BitmapWeight& w, int64_t panel, const PrefetchDistances& ahead)
      : Int4Stream<Simd, kStorage>(w.view.PanelMasks(kInt4Bitmap, panel), w.view.PanelValues(kInt4Bitmap, panel),
                                   SpanBytes(w, panel), ahead) {}
};
template <typename Simd>
struct StoredInt4<Simd, Storage::kTwoFour> : TwoFourStream<Simd, kInt4Bitmap> {
  using Columns = simd::Columns<Simd>;
  using Bytes = typename Columns::Bytes;
  using TwoFourStream<Simd, kInt4Bitmap>::TwoFourStream;

  template <Fetch kFetch, bool kOddTimes16>
  Bytes Next(int row) {
    const Bytes nibbles = TwoFourStream<Simd, kInt4Bitmap>::template Next<kFetch, kOddTimes16>(row);
    if constexpr (Simd::kNibbleBias != 0) return nibbles;
    const auto bias = Simd::SetBytes(kInt4Bias);
    return Columns::template Of<Bytes>([&](int i) { return Simd::SubtractBytes(nibbles.at[i], bias); });
  }
};

template <typename Simd, Storage kStorage>
struct Int4Weights : Int4Products<Simd, RowQuantized<Simd, true>> {
  using Columns = simd::Columns<Simd>;
  using Weight = BitmapWeight;
  using Floats = typename Columns::Floats;
  static constexpr bool kDense = kStorage == Storage::kDense;
  static constexpr bool kBuffered = !kDense;
  // Chains would hold odd rows times 16, which 2:4 storage provides for one row of x only.
  static constexpr bool kOneChain = !Simd::kNibblesTimes16 || kStorage == Storage::kTwoFour;
  static constexpr int kOneRowChains = kOneChain ? 1 : kMostOneRowChains<Simd>;
  static constexpr int kMostChains = kOneChain ? 1 : 2;
  using Stream = StoredInt4<Simd, kStorage>;

  static bool Takes(const Weight& w) { return w.view.StoredAs() == kStorage; }
  static int64_t Group(const Weight& w) { return w.group; }

  struct Scales {
    Scales(const Weight& w, int64_t panel, int64_t groups)
        : from(static_cast<const uint8_t*>(w.scales) + panel * groups * kGroupBytes) {}
    // Always inline: gcc would make a function of it, as many copies of a loop call it for each group.
    __attribute__((always_inline)) Floats Of(int64_t group) const {
      return Columns::LoadBf16(from + group * kGroupBytes);
    }
    // Always inline, for the reason given at PrefetchLines.
    __attribute__((always_inline)) void Prefetch(int64_t begin, int64_t end) const {
      PrefetchLines(from + begin * kGroupBytes, (end - begin) * kGroupBytes);
    }

    static constexpr int64_t kGroupBytes = 2 * kPanelColumns;
    const uint8_t* from;
  };
  template <int kRows>
  struct RowTerms : QuantizedRowTerms<Simd, kRows> {
    using QuantizedRowTerms<Simd, kRows>::QuantizedRowTerms;
    Floats Add(const Floats& total, const typename Columns::Ints& sums, const Floats& weight_scales, int64_t,
               int64_t) const {
      return Columns::MultiplyAdd(Columns::ToFloat(sums), weight_scales, total);
    }
    Floats End(const Floats& total, int64_t row) const {
      return Columns::Multiply(total, Columns::Set(this->scales[row]));
    }
  };
};

template <typename Simd>
struct FewRowsKindOf<Int4Weights<Simd, Storage::kTwoFour>> {
  using Type = TwoFourBiasedRow<Simd, Int4Weights<Simd, Storage::kTwoFour>, kInt4Bitmap>;
  static constexpr int64_t kMostRows = Simd::kNarrowNibbleSums ? 4 : 1;
};

}  // namespace
}  // namespace ortolan
