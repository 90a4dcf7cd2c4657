#include "matmul/target_functions.h"
#include "matmul/weights/int8.h"

namespace ortolan::ORTOLAN_TARGET {

extern const MatMulFunctions kInt8;
constexpr MatMulFunctions kInt8 = kBitmapFunctions<Int8Weights>;

}  // namespace ortolan::ORTOLAN_TARGET
