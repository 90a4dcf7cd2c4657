// The common base of the adapters of W4A8MatMul and W8A8MatMul: reads and checks the weight in groups once.
#pragma once

#include <memory>

#include "matmul/group_layer.h"
#include "matmul/linear_op.h"

namespace ortolan {

// Read a weight [k, n] in groups, and check it. Its inputs and attributes are named <prefix>weights, <prefix>scales and
// so on. node: for messages.
GroupWeight ReadGroupWeight(const OrtKernelInfo& info, LinearInputs inputs, const std::string& prefix,
                            const GroupKind& kind, int64_t k, int64_t n, const std::string& node);

class GroupOp : public LinearOp {
 protected:
  // Open a device that multiplies with the weight, which must outlive it; null if none was requested or found. node:
  // for messages.
  using OpenDevice = std::unique_ptr<MatMulDevice>(const OrtKernelInfo& info, const GroupWeight& w,
                                                   const std::string& node);

  // inputs: weights and scales, optionally zero_points, minimums, subgroup_scales, high_bits and
  // subgroup_minimums.
  GroupOp(const OrtKernelInfo& info, const char* op_type, int64_t format_version, LinearInputs inputs,
          const GroupKind& kind, OpenDevice* open_device = nullptr);

  // Return the attribute subgroup_size; 0: groups have no subgroups.
  static int64_t SubgroupSize(const OrtKernelInfo& info) { return IntAttributeOr(info, "subgroup_size", 0); }
  // Return kKQuantScaleBits for weights of formats/k_quant.h, otherwise 0.
  static int64_t KQuantScaleBits(const OrtKernelInfo& info);

 private:
  GroupWeight w_;
  std::unique_ptr<MatMulDevice> device_;
};

}  // namespace ortolan
