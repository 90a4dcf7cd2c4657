// int8 weights in groups for the loops. Included by group_int8_kernels.cc only; local to each.
#pragma once

#include "matmul/weights/group.h"

namespace ortolan {
namespace {

template <typename Simd>
struct Int8GroupRows : ByteProducts<Simd, false> {
  using Columns = simd::Columns<Simd>;
  using Bytes = typename Columns::Bytes;
  static constexpr bool kStoredTiles = true;
  static constexpr bool kBuffered = false;
  static constexpr Fetch kFetchOneRow = Fetch::kMultiply;
  static constexpr int kOneRowChains = kMostOneRowChains<Simd>;
  static constexpr int kMostChains = 2;

  static int64_t OneRowAhead(const PrefetchDistances& ahead) { return ahead.int4; }

  // Rows as stored, plus the bias that the target's products need.
  class Stream {
   public:
    Stream(const GroupWeight& w, int64_t panel, const PrefetchDistances& ahead)
        : values(w.view.weights + panel * kInt8Bitmap.Tiles(w.k) * kInt8Bitmap.TileEntries()),
          ahead_(ahead.int4),
          block_ahead_(ahead.weight_blocks) {}

    template <Fetch kFetch>
    void StartSpan() const {}
    template <Fetch kFetch, bool kOddTimes16>
    Bytes Next(int) {
      if constexpr (kFetch != Fetch::kNone) {
        __builtin_prefetch(values + (kFetch == Fetch::kExpand ? block_ahead_ : ahead_));
      }
      const Bytes weights = Columns::LoadBytes(values);
      values += kLineBytes;
      if constexpr (Simd::kInt8Bias == 0) return weights;
      const auto bias = Simd::SetBytes(Simd::kInt8Bias);
      return Columns::template Of<Bytes>([&](int i) { return Simd::XorBytes(weights.at[i], bias); });
    }
    void EndSpan() {}

    const uint8_t* values;

   private:
    int64_t ahead_;
    int64_t block_ahead_;
  };
};

template <typename Simd>
using GroupInt8Weights = GroupWeights<Simd, Int8GroupRows<Simd>>;

}  // namespace
}  // namespace ortolan
