// Reads the stored rows of bf16 and int8 weights of a panel, each expanded to 64 bytes with its zeros. Included by the
// headers beside it.
#pragma once

#include <cstdint>
#include <cstring>

#include "isa/tuning.h"
#include "matmul/bitmap_weight.h"
#include "matmul/panel.h"
#include "simd/columns.h"
#include "simd/prefetch.h"

namespace ortolan {
namespace {

template <typename Mask>
Mask LoadMask(const uint8_t* masks, int row) {
  Mask mask;
  std::memcpy(&mask, masks + row * static_cast<int>(sizeof(mask)), sizeof(mask));
  return mask;
}

constexpr int64_t kSpanMaskBytes = kSpanInputs * kPanelColumns / 8;
// Bytes of a panel's masks to prefetch first: enough to cover the memory latency.
constexpr int64_t kFirstMaskBytes = 8 * kSpanMaskBytes;

// Average bytes of a panel's int8 or int4 values per span.
inline int64_t SpanBytes(const BitmapWeight& w, int64_t panel) {
  return w.view.IsDense()
             ? 0
             : (w.view.offsets[panel + 1] - w.view.offsets[panel]) / (kInt8Bitmap.PaddedK(w.k) / kSpanInputs);
}

template <typename Simd, Storage kStorage, const BitmapLayout& kLayout>
class BitmapStream {
  using Columns = simd::Columns<Simd>;
  static constexpr bool kDense = kStorage == Storage::kDense;
  static constexpr bool kWords = kLayout.EntryBytes() == 2;

 public:
  BitmapStream(const BitmapWeight& w, int64_t panel, const PrefetchDistances& ahead)
      : values(w.view.PanelValues(kLayout, panel)),
        masks_(w.view.PanelMasks(kLayout, panel)),
        ahead_(ahead.weights),
        block_ahead_(ahead.weight_blocks),
        burst_bytes_(kWords ? 0 : SpanBytes(w, panel) * 5 / 4 + kLineBytes) {}

  // For bytes, prefetch all lines of a span at once, which keeps memory busier than one at a time. The count covers
  // spans with more values than average.
  template <Fetch kFetch>
  void StartSpan() const {
    if constexpr (!kDense) {
      __builtin_prefetch(masks_ + Ahead<kFetch>());
      if constexpr (!kWords && kFetch == Fetch::kMultiply) PrefetchLines(values + Ahead<kFetch>(), burst_bytes_);
    }
  }
  template <Fetch kFetch, bool kOddTimes16>
  typename Columns::Bytes Next([[maybe_unused]] int row) {
    const uint8_t* from = values;
    if constexpr (kDense || kWords ? kFetch != Fetch::kNone : kFetch == Fetch::kExpand) {
      __builtin_prefetch(from + Ahead<kFetch>());
    }
    if constexpr (kDense) {
      values += kLineBytes;
      return Columns::LoadBytes(from);
    } else if constexpr (kWords) {
      const uint32_t mask = LoadMask<uint32_t>(masks_, row);
      values += __builtin_popcount(mask) * kValueBytes;
      return Columns::ExpandWords(mask, from);
    } else {
      const uint64_t mask = LoadMask<uint64_t>(masks_, row);
      values += __builtin_popcountll(mask);
      return Columns::ExpandBytes(mask, from, Simd::ExpandBytes);
    }
  }
  void EndSpan() {
    if constexpr (!kDense) masks_ += kSpanMaskBytes;
  }
  // Prefetch what StartSpan and Next do not, before the first spans are read.
  void PrefetchFirst() const {
    PrefetchLines(values, ahead_);
    if constexpr (!kDense) PrefetchLines(masks_, kFirstMaskBytes);
  }
  // Move to the position of another stream of the panel.
  void MoveTo(const BitmapStream& other) {
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
  int64_t burst_bytes_;
};

}  // namespace
}  // namespace ortolan
