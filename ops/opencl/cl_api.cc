#include "opencl/cl_api.h"

#include <dlfcn.h>

#include "host/error_text.h"

namespace ortolan::opencl {
namespace {

constexpr const char* kLoader = "libOpenCL.so.1";

const char* Meaning(Status status) {
  switch (status) {
    case -4:
      return "memory cannot be allocated";
    case -5:
      return "out of resources";
    case -6:
      return "out of host memory";
    case -11:
      return "a program cannot be built";
    case -36:
      return "the command queue is lost";
    case -54:
      return "the device has no work groups of this size";
    case -61:
      return "a buffer is larger than the device allows";
    default:
      return "see CL/cl.h";
  }
}

}  // namespace

ClApi LoadClApi() {
  void* const loader = dlopen(kLoader, RTLD_NOW | RTLD_LOCAL);
  if (loader == nullptr) {
    throw ClError(ErrorText("OpenCL is not available: ", dlerror(),
                            ". Install the loader (Debian: ocl-icd-libopencl1) and a driver for the device."));
  }
  ClApi api;
#define ORTOLAN_CL(name, ...)                                            \
  api.name = reinterpret_cast<ClApi::name##Type*>(dlsym(loader, #name)); \
  if (api.name == nullptr) throw ClError(ErrorText(kLoader, " has no ", #name, ": OpenCL 1.2 or later is expected"));
#include "opencl/cl_functions.inc"
#undef ORTOLAN_CL
  return api;
}

void Check(Status status, const char* function) {
  if (status != 0) throw ClError(ErrorText(function, " failed with ", status, " (", Meaning(status), ")"));
}

}  // namespace ortolan::opencl
