// The functions of a kernel for packed panels: the target's loop, on AMX tiles if it has them, otherwise on vectors.
// Included by *kernels.cc only; local to each.
#pragma once

#include <type_traits>

#include "matmul/amx_loop.h"
#include "matmul/panel_loop.h"
#include "simd/target.h"

namespace ortolan {
namespace {

template <typename Column>
struct LoopOf {
  using Simd = Column;
  template <typename Weights>
  using Loop = PanelLoop<Simd, Weights>;
  // Rows of x in a block, and inputs whose activations are contiguous.
  template <typename Weights>
  static constexpr int64_t kBlockRows = Weights::kRowBlock;
  template <typename Weights>
  static constexpr int64_t kPackedRows = kBlockRows<Weights>;
  static constexpr int64_t kSpeed = 1;
  static constexpr TakesFn* kTakesGroups = nullptr;
  static void Pad(void*, int64_t, int64_t) {}
};

template <typename Column>
  requires Column::kHasTiles
struct LoopOf<Column> {
  using Simd = WithTiles<Column>;
  template <typename Weights>
  using Loop = AmxLoop<Simd, Weights>;
  template <typename>
  static constexpr int64_t kBlockRows = kAmxRowTile;
  template <typename>
  static constexpr int64_t kPackedRows = 1;
  static constexpr int64_t kSpeed = 8;
  static constexpr TakesFn* kTakesGroups = &GroupFillsTile;
  static void Pad(void* packed, int64_t m, int64_t row_bytes) { PadAmxRows(packed, m, row_bytes); }
};

using LoopSimd = LoopOf<Simd>::Simd;

// Kind, Others: kinds of weight (panel_loop.h). The first that takes a weight multiplies it; the last one takes any.
// All use the same packed x. Besides the requirements of the loops, a kind provides Takes(w), kMostInputs, and
// PackRows, which packs rows of x in blocks (the last one may have fewer rows).
template <typename Kind, typename... Others>
struct TargetFunctions {
  using Weight = typename Kind::Weight;

  static int64_t PackedRowBytes(const MatMulWeight& w) { return Kind::PackedRowBytes(static_cast<const Weight&>(w)); }
  static void Pack(const MatMulWeight& w, const float* x, int64_t x_row_bytes, int64_t m, void* packed) {
    Kind::PackRows(static_cast<const Weight&>(w), x, x_row_bytes, m, LoopOf<Simd>::template kPackedRows<Kind>, packed);
    LoopOf<Simd>::Pad(packed, m, PackedRowBytes(w));
  }
  static void Multiply(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
    if constexpr (sizeof...(Others) > 0) {
      if (!Kind::Takes(WeightOf<Weight>(args))) {
        return TargetFunctions<Others...>::Multiply(args, panel_begin, panel_end);
      }
    }
    LoopOf<Simd>::template Loop<Kind>::Run(args, panel_begin, panel_end);
  }

  static constexpr int64_t kBlockRows = LoopOf<Simd>::template kBlockRows<Kind>;
  static_assert(kBlockRows <= kMostRowBlock);
  static constexpr MatMulFunctions kAll{
      .row_block = kBlockRows,
      .most_inputs = Kind::kMostInputs,
      .packed_row_bytes = &PackedRowBytes,
      .pack = &Pack,
      .multiply = &Multiply,
      .panels_together = LoopOf<Simd>::template Loop<Kind>::kPanelsTogether,
      .speed = LoopOf<Simd>::kSpeed,
      .takes = std::is_same_v<Weight, GroupWeight> ? LoopOf<Simd>::kTakesGroups : nullptr};
};

// The functions for a weight in any storage of a bitmap format.
template <template <typename, Storage> typename Weights>
constexpr MatMulFunctions kBitmapFunctions =
    TargetFunctions<Weights<LoopSimd, Storage::kDense>, Weights<LoopSimd, Storage::kBitmap>,
                    Weights<LoopSimd, Storage::kTwoFour>>::kAll;

}  // namespace
}  // namespace ortolan
