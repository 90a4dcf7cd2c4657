#include "matmul/target_functions.h"
#include "matmul/weights/group_int4.h"

namespace ortolan::ORTOLAN_TARGET {

extern const MatMulFunctions kGroupInt4;
constexpr MatMulFunctions kGroupInt4 =
    TargetFunctions<GroupInt4Weights<LoopSimd>, GroupInt4ZeroPoints<LoopSimd>, GroupInt4Minimums<LoopSimd>>::kAll;

}  // namespace ortolan::ORTOLAN_TARGET
