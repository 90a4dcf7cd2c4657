#include "matmul/k_quant_loop.h"
#include "simd/target.h"

namespace ortolan::ORTOLAN_TARGET {

extern const MatMulFunctions kKQuant;
constexpr MatMulFunctions kKQuant{.row_block = KQuantLoop<Simd>::kBlock,
                                  .most_inputs = kInt4Bitmap.max_k,
                                  .packed_row_bytes = &KQuantRows<Simd>::PackedRowBytes,
                                  .pack = &KQuantRows<Simd>::Pack,
                                  .multiply = &KQuantLoop<Simd>::Multiply};

}  // namespace ortolan::ORTOLAN_TARGET
