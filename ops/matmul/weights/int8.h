// int8 weights as the loops read them. Included by int8_kernels.cc only; local to each.
#pragma once

#include "matmul/weights/quantized.h"

namespace ortolan {
namespace {

template <typename Simd, Storage kStorage>
class Int8Stream {
  using Columns = simd::Columns<Simd>;
  static constexpr bool kDense = kStorage == Storage::kDense;

 public:
  Int8Stream(const BitmapWeight& w, int64_t panel, const PrefetchDistances& ahead)
      : values(w.view.PanelValues(kInt8Bitmap, panel)),
        masks_(w.view.PanelMasks(kInt8Bitmap, panel)),
        ahead_(ahead.weights),
        burst_bytes_(SpanBytes(w, panel) * 5 / 4 + kLineBytes) {}

  // All lines of a span at once, which keeps memory busier than one at a time, and enough of them that a span with more
  // values than others leaves no line out.
  template <Fetch kFetch>
  void StartSpan() const {
    if constexpr (!kDense) {
      __builtin_prefetch(masks_ + ahead_);
      if constexpr (kFetch == Fetch::kMultiply) PrefetchLines(values + ahead_, burst_bytes_);
    }
  }
  template <Fetch kFetch, bool kOddTimes16>
  typename Columns::Bytes Next([[maybe_unused]] int row) {
    const uint8_t* from = values;
    if constexpr (kDense) {
      if constexpr (kFetch != Fetch::kNone) __builtin_prefetch(from + ahead_);
      values += kLineBytes;
      return Biased(Columns::LoadBytes(from));
    } else {
      if constexpr (kFetch == Fetch::kExpand) __builtin_prefetch(from + ahead_);
      const uint64_t mask = LoadMask(masks_, row);
      values += __builtin_popcountll(mask);
      return Biased(Columns::ExpandBytes(mask, from, Simd::ExpandBytes));
    }
  }
  void EndSpan() {
    if constexpr (!kDense) masks_ += kSpanMaskBytes;
  }

  const uint8_t* values;

 private:
  using Bytes = typename Columns::Bytes;
  static Bytes Biased(const Bytes& weights) {
    if constexpr (Simd::kInt8Bias == 0) return weights;
    const auto bias = Simd::SetBytes(Simd::kInt8Bias);
    return Columns::template Of<Bytes>([&](int i) { return Simd::XorBytes(weights.at[i], bias); });
  }

  const uint8_t* masks_;
  int64_t ahead_;
  int64_t burst_bytes_;
};

template <typename Simd, Storage kStorage>
struct Int8Weights : RowQuantized<Simd, false> {
  using Columns = simd::Columns<Simd>;
  using Weight = BitmapWeight;
  using Stream = Int8Stream<Simd, kStorage>;
  using Floats = typename Columns::Floats;
  static constexpr bool kDense = kStorage == Storage::kDense;
  static constexpr bool kStoredTiles = kDense;
  static constexpr bool kHasGroups = false;
  static constexpr bool kBuffered = !kDense;
  static constexpr Fetch kFetchOneRow = kDense ? Fetch::kNone : Fetch::kMultiply;
  static constexpr int kOneRowChains = kMostOneRowChains<Simd>;
  static constexpr int kMostChains = 2;

  static int64_t Group(const Weight&) { return kWholeColumn; }

  struct Scales {
    Scales(const Weight& w, int64_t panel, int64_t)
        : scales(Columns::Load(reinterpret_cast<const float*>(w.Scales(panel, 0)))) {}
    Floats Of(int64_t) const { return scales; }
    Floats scales;
  };
  template <int kRows>
  struct Numbers : RowNumbers<Simd, kRows> {
    using RowNumbers<Simd, kRows>::RowNumbers;
    Floats Add(const Floats&, const typename Columns::Ints& sums, const Floats& weight_scales, int64_t, int row) const {
      return Columns::Multiply(Columns::ToFloat(sums),
                               Columns::Multiply(weight_scales, Columns::Set(this->scales[row])));
    }
    Floats End(const Floats& total, int) const { return total; }
  };
};

}  // namespace
}  // namespace ortolan
