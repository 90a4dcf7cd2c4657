// The kernels (kernels.cl), compiled by the driver, and the cache of what it made.
//
// A file a device, driver, source and options: $ORTOLAN_CACHE/opencl, else opencl in the user's cache folder for
// Ortolan. It is written under another name and renamed. One that is cut off, damaged or made of anything else is
// compiled anew, as is one that the driver refuses. Where no file can be written, programs are compiled in each
// process.
#pragma once

#include <string>

#include "opencl/device.h"

namespace ortolan::opencl {

// kernels.cl, from the build.
extern const char* const kKernelSource;

// Throws ClError with the compiler's words.
Program BuildProgram(const ClApi& api, Context context, const DeviceInfo& device, const std::string& options);

}  // namespace ortolan::opencl
