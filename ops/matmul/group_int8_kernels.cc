#include "matmul/target_functions.h"
#include "matmul/weights/group_int8.h"

namespace ortolan::ORTOLAN_TARGET {

extern const MatMulFunctions kGroupInt8;
constexpr MatMulFunctions kGroupInt8 = TargetFunctions<GroupInt8Weights<LoopSimd>>::kAll;

}  // namespace ortolan::ORTOLAN_TARGET
