// Reads weights of 4, 5 or 6 bits whose high bits are stored apart (formats/subgroup.h). Local to each file that
// includes it.
#pragma once

#include <utility>

#include "matmul/weights/group.h"

namespace ortolan {
namespace {

// q of the rows of weights of a panel, one row of 4 inputs after another.
template <typename Simd, int kBits>
class FewBitsStream {
  using Columns = simd::Columns<Simd>;
  using Bytes = typename Columns::Bytes;
  static constexpr int kHighBits = kBits - 4;
  static constexpr int kRowsOfHighBits = kHighBits > 0 ? 8 / kHighBits : 1;

 public:
  FewBitsStream(const GroupWeight& w, int64_t panel, int64_t ahead)
      : values(w.view.weights + panel * kInt4Bitmap.Tiles(w.k) * kInt4Bitmap.TileEntries()),
        high_(w.view.subgroups.high_bits + panel * PanelHighBytes(w.k, kBits)),
        ahead_(ahead) {}

  // Return q of the next row. row: its index within a span. kPrefetch: prefetch later weights. kPrefetchHigh: prefetch
  // later high bits.
  template <bool kPrefetch, bool kPrefetchHigh = kPrefetch>
  __attribute__((always_inline)) Bytes NextStored(int row) {
    if (row % 2 == 0) {
      if constexpr (kPrefetch) __builtin_prefetch(values + ahead_);
      bytes_ = Columns::LoadBytes(values);
      values += kLineBytes;
    }
    if constexpr (kHighBits > 0) {
      if (row % kRowsOfHighBits == 0) {
        if constexpr (kPrefetchHigh) __builtin_prefetch(high_ + ahead_ * kHighBits / 4);
        high_bytes_ = Columns::LoadBytes(high_);
        high_ += kLineBytes;
      }
    }
    const Bytes stored = Columns::template Of<Bytes>([&](int i) {
      auto q = row % 2 == 0 ? Simd::LowNibbles(bytes_.at[i]) : Simd::HighNibbles(bytes_.at[i]);
      if constexpr (kHighBits > 0) {
        const auto mask = Simd::SetBytes(kBits == 5 ? 0x10 : 0x30);
        q = Simd::OrInt(q, Simd::AndBytes(AboveNibble(high_bytes_.at[i], row % kRowsOfHighBits), mask));
      }
      return q;
    });
    return stored;
  }
  // Prefetch some of the next weights: `share` bytes of their low nibbles from byte `from` on, and their high bits.
  __attribute__((always_inline)) void PrefetchNext(int64_t from, int64_t share) const {
    PrefetchForLater(values + from, share);
    if constexpr (kHighBits > 0) PrefetchForLater(high_ + from * kHighBits / 4, share * kHighBits / 4);
  }
  // Move to the position of another stream of the panel.
  void MoveTo(const FewBitsStream& other) {
    values = other.values;
    high_ = other.high_;
  }

  const uint8_t* values;

 private:
  // Move the high bits of a row from their place in a byte, where those of row 0 are the highest, to bits 4 and 5. row:
  // a constant after inlining, so that one shift is left. The caller clears bits of other rows and bytes.
  __attribute__((always_inline)) static typename Simd::Bytes AboveNibble(typename Simd::Bytes high, int row) {
    typename Simd::Bytes shifted = high;
    [&]<int... kRow>(std::integer_sequence<int, kRow...>) {
      ((kRow == row ? void(shifted = ShiftRight<4 - kHighBits*(kRow + 1)>(high)) : void()), ...);
    }(std::make_integer_sequence<int, kRowsOfHighBits>());
    return shifted;
  }
  template <int kCount>
  static typename Simd::Bytes ShiftRight(typename Simd::Bytes a) {
    if constexpr (kCount > 0) return Simd::template ShiftRightInt<kCount>(a);
    if constexpr (kCount < 0) return Simd::template ShiftLeftInt<-kCount>(a);
    return a;
  }

  const uint8_t* high_;
  int64_t ahead_;
  Bytes bytes_;
  Bytes high_bytes_;
};

}  // namespace
}  // namespace ortolan
