// Turns the kernel tables (kernels.inc) into C++.
#pragma once

#include <cstdint>
#include <span>

#include "isa/features.h"

// ORTOLAN_X86_KERNEL and ORTOLAN_ARM_KERNEL expand to ORTOLAN_KERNEL on their architecture and are empty elsewhere.
// Define ORTOLAN_KERNEL before including a table.
//
// A test build may leave out a target (ORTOLAN_ONLY_TARGETS in CMakeLists.txt). The compiler then gets
// -DORTOLAN_WITHOUT_<target>=,ORTOLAN_NO_KERNEL: the comma makes ORTOLAN_NO_KERNEL the second argument of
// ORTOLAN_SECOND.
#define ORTOLAN_SECOND(...) ORTOLAN_SECOND_OF(__VA_ARGS__, )
#define ORTOLAN_SECOND_OF(first, second, ...) second
#define ORTOLAN_NO_KERNEL(...)
#define ORTOLAN_KERNEL_HERE(target, ...) \
  ORTOLAN_SECOND(ORTOLAN_WITHOUT_##target, ORTOLAN_KERNEL)(target __VA_OPT__(, ) __VA_ARGS__)
#if defined(__x86_64__)
#define ORTOLAN_X86_KERNEL ORTOLAN_KERNEL_HERE
#else
#define ORTOLAN_X86_KERNEL(...)
#endif
#if defined(__aarch64__)
#define ORTOLAN_ARM_KERNEL ORTOLAN_KERNEL_HERE
#else
#define ORTOLAN_ARM_KERNEL(...)
#endif

namespace ortolan {

// The work a kernel is selected for. Each field is checked against a limit of the kernel, if its table has that limit.
struct Work {
  int64_t rows = 0;        // rows of x; at least the kernel's least_rows
  int precision = 0;       // bits of the products; at most the kernel's precision
  bool any_order = false;  // accept a kernel whose sums have an order of their own
};

// Return the first kernel that runs with these features and fits the work. Kernels are sorted best first; the last one
// runs anywhere.
template <typename Kernel>
const Kernel& SelectKernel(std::span<const Kernel> kernels, Features features, [[maybe_unused]] Work work = {}) {
  for (const Kernel& kernel : kernels) {
    if (!features.Has(kernel.needs)) continue;
    if constexpr (requires { kernel.least_rows; }) {
      if (kernel.least_rows > work.rows) continue;
    }
    if constexpr (requires { kernel.precision; }) {
      if (kernel.precision < work.precision) continue;
    }
    if constexpr (requires { kernel.own_order; }) {
      if (kernel.own_order && !work.any_order) continue;
    }
    return kernel;
  }
  return kernels.back();
}

}  // namespace ortolan
