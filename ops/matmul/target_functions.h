// The functions of a kernel for packed panels: those of the target's loop, on AMX tiles where it has them, else on
// vectors. Included by *kernels.cc only; local to each.
#pragma once

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
  // Rows of x in a block, and those whose activations lie together.
  template <typename Weights>
  static constexpr int64_t kBlockRows = Weights::kRowBlock;
  template <typename Weights>
  static constexpr int64_t kPackedRows = kBlockRows<Weights>;
  static constexpr int64_t kSpeed = 1;
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
  static void Pad(void* packed, int64_t m, int64_t row_bytes) { PadAmxRows(packed, m, row_bytes); }
};

using LoopSimd = LoopOf<Simd>::Simd;

// Kind, Others: the kinds of weight (panel_loop.h); the first that takes a weight multiplies it, the last one any that
// is left. All take the same packed x. Beside what the loops ask for, a kind gives Takes(w), kMostInputs, and PackRows,
// which packs rows of x in blocks of some (the last one may have fewer).
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
  static constexpr MatMulFunctions kAll{.row_block = kBlockRows,
                                        .most_inputs = Kind::kMostInputs,
                                        .packed_row_bytes = &PackedRowBytes,
                                        .pack = &Pack,
                                        .multiply = &Multiply,
                                        .panels_together = LoopOf<Simd>::template Loop<Kind>::kPanelsTogether,
                                        .speed = LoopOf<Simd>::kSpeed};
};

// Those for a weight in any storage of the bitmap formats.
template <template <typename, Storage> typename Weights>
constexpr MatMulFunctions kBitmapFunctions =
    TargetFunctions<Weights<LoopSimd, Storage::kDense>, Weights<LoopSimd, Storage::kBitmap>,
                    Weights<LoopSimd, Storage::kTwoFour>>::kAll;

}  // namespace
}  // namespace ortolan
