// Reads weights of 4, 5 or 6 bits whose high bits are stored apart (formats/subgroup.h). Local to each file that
// includes it.
#pragma once

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

  // Return q of the next row. row: its index within a span. kPrefetch: prefetch later weights.
  template <bool kPrefetch>
  __attribute__((always_inline)) Bytes NextStored(int row) {
    if (row % 2 == 0) {
      if constexpr (kPrefetch) __builtin_prefetch(values + ahead_);
      bytes_ = Columns::LoadBytes(values);
      values += kLineBytes;
    }
    if constexpr (kHighBits > 0) {
      if (row % kRowsOfHighBits == 0) {
        __builtin_prefetch(high_ + ahead_ * kHighBits / 4);
        high_bytes_ = Columns::LoadBytes(high_);
        high_ += kLineBytes;
      }
    }
    const Bytes stored = Columns::template Of<Bytes>([&](int i) {
      auto q = row % 2 == 0 ? Simd::LowNibbles(bytes_.at[i]) : Simd::HighNibbles(bytes_.at[i]);
      if constexpr (kHighBits > 0) {
        const auto mask = Simd::SetBytes(kBits == 5 ? 0x10 : 0x30);
        q = Simd::OrInt(q, Simd::AndBytes(Simd::template ShiftRightInt<4 - kHighBits>(high_bytes_.at[i]), mask));
      }
      return q;
    });
    if constexpr (kHighBits > 0) {
      // Bits that enter a byte from its neighbour never reach the bits that are read.
      high_bytes_ =
          Columns::template Of<Bytes>([&](int i) { return Simd::template ShiftLeftInt<kHighBits>(high_bytes_.at[i]); });
    }
    return stored;
  }
  // Move to the position of another stream of the panel.
  void MoveTo(const FewBitsStream& other) {
    values = other.values;
    high_ = other.high_;
  }

  const uint8_t* values;

 private:
  const uint8_t* high_;
  int64_t ahead_;
  Bytes bytes_;
  Bytes high_bytes_;
};

}  // namespace
}  // namespace ortolan
