#include "matmul/column_functions.h"
#include "matmul/weights/group_int8.h"

namespace ortolan::ORTOLAN_COLUMN {

extern const MatMulFunctions kGroupInt8;
constexpr MatMulFunctions kGroupInt8 = ColumnFunctions<GroupInt8Weights<LoopSimd>>::kAll;

}  // namespace ortolan::ORTOLAN_COLUMN
