// Weights in subgroups for the loops: each row is expanded to int8 in registers. Included by subgroup_kernels.cc only;
// local to each.
#pragma once

#include "matmul/weights/few_bits.h"
#include "matmul/weights/int4.h"

namespace ortolan {
namespace {

template <typename Simd, int kBits>
struct SubgroupRows : ByteProducts<Simd, false> {
  using Columns = simd::Columns<Simd>;
  using Bytes = typename Columns::Bytes;
  using Ints = typename Columns::Ints;
  static constexpr bool kStoredTiles = false;
  // As for Int4GroupRows.
  static constexpr bool kBuffered = Simd::kRegisters == 16 && Simd::kLanes > 1;
  static constexpr Fetch kFetchOneRow = Fetch::kMultiply;
  static constexpr int kOneRowChains = kMostOneRowChains<Simd>;
  static constexpr int kMostChains = 2;
  // Rows of weights whose products with x + 128 are summed in 16-bit words; 0: not by subgroup_loop.h.
  static constexpr int kQuadsOfWords = !Simd::kMultipliesPairs ? 0 : kBits == 4 ? 4 : kBits == 5 ? 2 : 1;
  static constexpr bool kOffsetBlocks = kQuadsOfWords > 0;

  static int64_t OneRowAhead(const PrefetchDistances& ahead) { return ahead.int4; }

  // Rows as v (formats/subgroup.h), plus the bias that the target's products need.
  class Stream : public FewBitsStream<Simd, kBits> {
    using FewBits = FewBitsStream<Simd, kBits>;

   public:
    Stream(const GroupWeight& w, int64_t panel, const PrefetchDistances& ahead)
        : FewBits(w, panel, ahead.int4),
          scales_(w.view.subgroups.scales + panel * w.view.subgroups.Rows(w.k) * kPanelColumns),
          half_span_bytes_(w.view.subgroups.size == kSubgroupInputs ? kPanelColumns : 0),
          ahead_(ahead.int4) {}

    template <Fetch kFetch>
    void StartSpan() const {
      // A span has 256 bytes of weights and 16 or 32 bytes of subgroup scales.
      __builtin_prefetch(scales_ + ahead_ / 8);
    }
    template <Fetch kFetch, bool kOddTimes16>
    Bytes Next(int row) {
      if (row % 4 == 0) {
        LoadScales(row);
        const auto bias = Simd::SetBytes(Simd::kInt8Bias);
        offsets_ = Columns::template Of<Bytes>([&](int i) {
          const auto product = Simd::MultiplyBytes(zeros_.at[i], steps_.at[i]);
          if constexpr (Simd::kInt8Bias == 0) return product;
          return Simd::SubtractBytes(product, bias);
        });
      }
      const Bytes q = this->template NextStored<true>(row);
      return Columns::template Of<Bytes>(
          [&](int i) { return Simd::SubtractBytes(Simd::MultiplyBytes(q.at[i], steps_.at[i]), offsets_.at[i]); });
    }
    // Return q - z of the next row, for subgroup_loop.h.
    template <bool kPrefetch>
    Bytes NextCentered(int row) {
      if (row % 4 == 0) LoadScales(row);
      const Bytes q = this->template NextStored<kPrefetch, true>(row);
      return Columns::template Of<Bytes>([&](int i) { return Simd::SubtractBytes(q.at[i], zeros_.at[i]); });
    }
    // Return s of that row as 16-bit words.
    Ints Steps() const {
      return Columns::template Of<Ints>([&](int i) { return Simd::AndInt(steps_.at[i], Simd::SetInt(0x00ff00ff)); });
    }
    void EndSpan() {}
    // Move to the position of another stream of the panel.
    void MoveTo(const Stream& other) {
      FewBits::MoveTo(other);
      scales_ = other.scales_;
    }

   private:
    // Load s and z of the next four rows.
    __attribute__((always_inline)) void LoadScales(int row) {
      const Bytes stored =
          Columns::template Of<Bytes>([&](int i) { return Simd::RepeatEachByte(scales_ + i * Simd::kLanes); });
      // Half a span after its start, a subgroup of 32 inputs continues.
      scales_ += row % 8 == 0 ? half_span_bytes_ : kPanelColumns;
      const auto scale_mask = Simd::SetBytes((1 << (8 - kBits)) - 1);
      const auto zero_mask = Simd::SetBytes((1 << kBits) - 1);
      steps_ = Columns::template Of<Bytes>([&](int i) { return Simd::AndBytes(stored.at[i], scale_mask); });
      zeros_ = Columns::template Of<Bytes>(
          [&](int i) { return Simd::AndBytes(Simd::template ShiftRightInt<8 - kBits>(stored.at[i]), zero_mask); });
    }

    const uint8_t* scales_;
    int64_t half_span_bytes_;
    int64_t ahead_;
    Bytes steps_;
    Bytes zeros_;
    Bytes offsets_;
  };
};

template <typename Simd, int kBits>
struct SubgroupWeights : GroupWeights<Simd, SubgroupRows<Simd, kBits>> {
  static bool Takes(const GroupWeight& w) { return w.view.subgroups.bits == kBits; }
};

}  // namespace
}  // namespace ortolan
