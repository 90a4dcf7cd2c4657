// W4A8MatMul on OpenCL, controlled by the environment variable ORTOLAN_OPENCL: 1 runs each weight on the faster side
// (matmul/device_choice.h), force runs all on the device; with 0 or unset, OpenCL is never loaded. The variable is read
// when a kernel is created, because a custom operator cannot see its session's configuration.
//
// If OpenCL fails, the CPU computes the weight. ORT's log reports that once.
#pragma once

#include <memory>
#include <string>

#include "matmul/group_weight.h"
#include "matmul/matmul_device.h"
#include "ort/ort_op.h"

namespace ortolan {

// Returns null if the CPU computes the weight. Throws OpError if ORTOLAN_OPENCL has an invalid value.
std::unique_ptr<MatMulDevice> OpenOnOpenCl(const OrtKernelInfo& info, const GroupWeight& w, const std::string& node);

}  // namespace ortolan
