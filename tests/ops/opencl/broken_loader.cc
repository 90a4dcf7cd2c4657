// A replacement of libOpenCL.so.1 that fails in a chosen function and forwards all other calls to the real loader.
//
//     REAL_OPENCL     the path of the real loader
//     BROKEN_OPENCL   function:status:calls, the failing function, its status, and the number of calls that succeed
//     first
//
// live_objects() counts the objects that were created and not released.
#include <dlfcn.h>

#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <type_traits>

#include "opencl/cl_api.h"

namespace ortolan::opencl {
namespace {

int64_t live = 0;

// Return the error status for this call, or 0 to forward the call.
Status StatusOf(const char* name) {
  static int calls = 0;
  const std::string broken = std::getenv("BROKEN_OPENCL");
  const size_t first = broken.find(':'), second = broken.find(':', first + 1);
  if (broken.substr(0, first) != name) return 0;
  return calls++ < std::stoi(broken.substr(second + 1)) ? 0 : std::stoi(broken.substr(first + 1, second - first - 1));
}

void* Real(const char* name) {
  static void* const loader = dlopen(std::getenv("REAL_OPENCL"), RTLD_NOW | RTLD_LOCAL);
  return dlsym(loader, name);
}

template <typename Type, const char* kName>
struct Forward;
template <typename Result, typename... Arguments, const char* kName>
struct Forward<Result(Arguments...), kName> {
  static Result Call(Arguments... arguments) {
    if (const Status status = StatusOf(kName); status != 0) {
      if constexpr (std::is_same_v<Result, Status>) {
        return status;
      } else {
        Status* const to = (arguments, ...);  // the last argument
        *to = status;
        return nullptr;
      }
    }
    const Result result = reinterpret_cast<Result (*)(Arguments...)>(Real(kName))(arguments...);
    const std::string_view name = kName;
    if (name.starts_with("clCreate") && result != Result{}) ++live;
    if (name.starts_with("clRelease") && result == Result{}) --live;
    return result;
  }
};

#define ORTOLAN_CL(name, ...) constexpr char k_##name[] = #name;
#include "opencl/cl_functions.inc"
#undef ORTOLAN_CL

}  // namespace
}  // namespace ortolan::opencl

extern "C" __attribute__((visibility("default"))) int64_t live_objects() { return ortolan::opencl::live; }

#define ORTOLAN_CL(name, ...)                                              \
  extern "C" void* resolve_##name() {                                      \
    using namespace ortolan::opencl;                                       \
    return reinterpret_cast<void*>(&Forward<__VA_ARGS__, k_##name>::Call); \
  }                                                                        \
  extern "C" __attribute__((visibility("default"), ifunc("resolve_" #name))) void name();
#include "opencl/cl_functions.inc"
#undef ORTOLAN_CL
