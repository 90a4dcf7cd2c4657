#include "matmul/target_functions.h"
#include "matmul/weights/bf16_pairs.h"

namespace ortolan::ORTOLAN_TARGET {

extern const MatMulFunctions kBf16;
constexpr MatMulFunctions kBf16 = kBitmapFunctions<Bf16Weights>;

}  // namespace ortolan::ORTOLAN_TARGET
