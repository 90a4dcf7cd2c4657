#include "matmul/target_functions.h"
#include "matmul/weights/subgroup.h"

namespace ortolan::ORTOLAN_TARGET {

extern const MatMulFunctions kSubgroup;
constexpr MatMulFunctions kSubgroup =
    TargetFunctions<SubgroupWeights<LoopSimd, 4>, SubgroupWeights<LoopSimd, 5>, SubgroupWeights<LoopSimd, 6>>::kAll;

}  // namespace ortolan::ORTOLAN_TARGET
