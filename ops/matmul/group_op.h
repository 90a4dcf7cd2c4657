// What the adapters of W4A8MatMul and W8A8MatMul share: the weight in groups, read and checked once.
#pragma once

#include "matmul/group_layer.h"
#include "matmul/linear_op.h"

namespace ortolan {

class GroupOp : public LinearOp {
 protected:
  // inputs: weights and scales; perhaps zero_points and minimums.
  GroupOp(const OrtKernelInfo& info, const char* op_type, int64_t format_version, LinearInputs inputs,
          const GroupKind& kind);

 private:
  GroupWeight w_;
};

}  // namespace ortolan
