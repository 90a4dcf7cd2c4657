#include "matmul/k_quant_loop.h"
#include "matmul/k_quant_tiles.h"
#include "matmul/target_functions.h"

namespace ortolan::ORTOLAN_TARGET {

namespace {

template <typename Target>
struct LoopOfKQuants {
  using Type = KQuantLoop<Target>;
};
template <typename Target>
  requires Target::kHasTiles
struct LoopOfKQuants<Target> {
  using Type = KQuantTiles<Target>;
};
using Loop = LoopOfKQuants<Simd>::Type;

}  // namespace

extern const MatMulFunctions kKQuant;
constexpr MatMulFunctions kKQuant{.row_block = Loop::kRowBlock,
                                  .most_inputs = kInt4Bitmap.max_k,
                                  .packed_row_bytes = &KQuantRows<Simd>::PackedRowBytes,
                                  .pack = &Loop::Pack,
                                  .multiply = &Loop::Multiply,
                                  .panels_together = Loop::kPanelsTogether,
                                  .speed = Loop::kSpeed,
                                  .takes = LoopOf<Simd>::kTakesGroups};

}  // namespace ortolan::ORTOLAN_TARGET
