// The part of OpenCL's C interface that is used, declared here so that neither the build nor the machine needs OpenCL's
// headers. The driver loader, libOpenCL.so.1, is opened at run time. tests/ops/opencl/declarations.cc checks these
// declarations against OpenCL's headers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace ortolan::opencl {

using Status = int32_t;
using Platform = struct PlatformObject*;
using DeviceId = struct DeviceObject*;
using Context = struct ContextObject*;
using Queue = struct QueueObject*;
using Memory = struct MemoryObject*;
using Program = struct ProgramObject*;
using Kernel = struct KernelObject*;
using Event = struct EventObject*;

inline constexpr uint64_t kDeviceTypeGpu = 1 << 2;
inline constexpr uint64_t kDeviceTypeAll = 0xffffffff;
inline constexpr uint32_t kPlatformName = 0x0902;
inline constexpr uint32_t kDeviceType = 0x1000;
inline constexpr uint32_t kDeviceComputeUnits = 0x1002;
inline constexpr uint32_t kDeviceWorkGroupSize = 0x1004;
inline constexpr uint32_t kDeviceGlobalBytes = 0x101f;
inline constexpr uint32_t kDeviceName = 0x102b;
inline constexpr uint32_t kDriverVersion = 0x102d;
inline constexpr uint32_t kDeviceVersion = 0x102f;
inline constexpr uint32_t kDeviceExtensions = 0x1030;
inline constexpr uint32_t kDeviceSharesMemory = 0x1035;  // CL_DEVICE_HOST_UNIFIED_MEMORY
inline constexpr uint64_t kReadWrite = 1 << 0;
inline constexpr uint64_t kReadOnly = 1 << 2;
inline constexpr uint64_t kUseHostPointer = 1 << 3;
inline constexpr uint64_t kAllocateOnHost = 1 << 4;
inline constexpr uint64_t kCopyHostPointer = 1 << 5;
inline constexpr uint32_t kBinarySizes = 0x1165;
inline constexpr uint32_t kBinaries = 0x1166;
inline constexpr uint32_t kBuildLog = 0x1183;

// An OpenCL call failed, or OpenCL is missing.
struct ClError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct ClApi {
#define ORTOLAN_CL(name, ...)     \
  using name##Type = __VA_ARGS__; \
  name##Type* name = nullptr;
#include "opencl/cl_functions.inc"
#undef ORTOLAN_CL
};

// Open the loader. Throws ClError. It is never closed, because drivers do not support unloading.
ClApi LoadClApi();

// Throw ClError unless the status is success. function: the name of the function that returned it.
void Check(Status status, const char* function);

}  // namespace ortolan::opencl
