// W4A8MatMul on OpenCL, where the environment variable ORTOLAN_OPENCL asks for it: 1, each weight on the faster side
// (matmul/device_choice.h); force, all on the device; 0 or unset, nothing of it is loaded. Read when a kernel is made:
// a custom operator sees nothing of its session's configuration.
//
// What cannot be opened, or fails while it computes, leaves the weight to the CPU; ORT's log says so once.
#pragma once

#include <memory>
#include <string>

#include "matmul/group_weight.h"
#include "matmul/matmul_device.h"
#include "ort/ort_op.h"

namespace ortolan {

// Throws OpError for another value of ORTOLAN_OPENCL.
std::unique_ptr<MatMulDevice> OpenOnOpenCl(const OrtKernelInfo& info, const GroupWeight& w, const std::string& node);

}  // namespace ortolan
