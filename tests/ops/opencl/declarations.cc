// Compare ops/opencl/cl_api.h with the OpenCL headers, if these are installed.
#define CL_TARGET_OPENCL_VERSION 120
#include <CL/cl.h>

#include <type_traits>

#include "opencl/cl_api.h"

namespace ortolan::opencl {
namespace {

// Handles and callbacks are pointers in both headers, but to types of different names.
template <typename Ours, typename Theirs>
constexpr bool kAlike = std::is_same_v<Ours, Theirs> || (std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>) ||
                        (std::is_integral_v<Ours> && std::is_integral_v<Theirs> && sizeof(Ours) == sizeof(Theirs) &&
                         std::is_signed_v<Ours> == std::is_signed_v<Theirs>);

template <typename Ours, typename Theirs>
struct Same;
template <typename R, typename... A, typename TheirR, typename... TheirA>
struct Same<R(A...), TheirR(TheirA...)> {
  static_assert(sizeof...(A) == sizeof...(TheirA));
  static_assert(kAlike<R, TheirR> && (kAlike<A, TheirA> && ...));
};

#define ORTOLAN_CL(name, ...) template struct Same<ClApi::name##Type, std::remove_pointer_t<decltype(&::name)>>;
#include "opencl/cl_functions.inc"
#undef ORTOLAN_CL

static_assert(kDeviceTypeGpu == CL_DEVICE_TYPE_GPU && kDeviceTypeAll == CL_DEVICE_TYPE_ALL);
static_assert(kPlatformName == CL_PLATFORM_NAME && kDeviceType == CL_DEVICE_TYPE);
static_assert(kDeviceComputeUnits == CL_DEVICE_MAX_COMPUTE_UNITS && kDeviceGlobalBytes == CL_DEVICE_GLOBAL_MEM_SIZE);
static_assert(kDeviceWorkGroupSize == CL_DEVICE_MAX_WORK_GROUP_SIZE && kDeviceName == CL_DEVICE_NAME);
static_assert(kDriverVersion == CL_DRIVER_VERSION && kDeviceVersion == CL_DEVICE_VERSION);
static_assert(kDeviceExtensions == CL_DEVICE_EXTENSIONS && kDeviceSharesMemory == CL_DEVICE_HOST_UNIFIED_MEMORY);
static_assert(kReadWrite == CL_MEM_READ_WRITE && kReadOnly == CL_MEM_READ_ONLY);
static_assert(kUseHostPointer == CL_MEM_USE_HOST_PTR && kAllocateOnHost == CL_MEM_ALLOC_HOST_PTR);
static_assert(kCopyHostPointer == CL_MEM_COPY_HOST_PTR && kBuildLog == CL_PROGRAM_BUILD_LOG);
static_assert(kBinarySizes == CL_PROGRAM_BINARY_SIZES && kBinaries == CL_PROGRAM_BINARIES);

}  // namespace
}  // namespace ortolan::opencl
