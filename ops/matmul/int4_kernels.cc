#include "matmul/target_functions.h"
#include "matmul/weights/int4.h"

namespace ortolan::ORTOLAN_TARGET {

extern const MatMulFunctions kInt4;
constexpr MatMulFunctions kInt4 = kBitmapFunctions<Int4Weights>;

}  // namespace ortolan::ORTOLAN_TARGET
