// The tables of kernels, kernels.inc, as C++: what each room's table does with its rows.
#pragma once

#include <cstdint>
#include <span>

#include "isa/features.h"

// Rows of a set of x86 or Arm features: only this kind of CPU has them. A room defines ORTOLAN_KERNEL before it
// includes its table. A build for tests may lack a target (CMakeLists.txt, ORTOLAN_ONLY_TARGETS): the compiler is told
// -DORTOLAN_WITHOUT_<target>=,ORTOLAN_NO_KERNEL, whose comma makes ORTOLAN_NO_KERNEL the second of three.
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

// The work that a kernel is looked for: a table's kernels may have limits that it must keep.
struct Work {
  int64_t rows = 0;        // of x; a kernel's least_rows
  int64_t inputs = 0;      // of a row of x; a kernel's most_inputs
  int precision = 0;       // of the products, in bits; a kernel's precision is at least this
  bool any_order = false;  // of sums; else a kernel has no order of its own
};

// The first of the kernels, best first, for this work with these features; the last one runs anywhere.
template <typename Kernel>
const Kernel& SelectKernel(std::span<const Kernel> kernels, Features features, [[maybe_unused]] Work work = {}) {
  for (const Kernel& kernel : kernels) {
    if (!features.Has(kernel.needs)) continue;
    if constexpr (requires { kernel.least_rows; }) {
      if (kernel.least_rows > work.rows) continue;
    }
    if constexpr (requires { kernel.most_inputs; }) {
      if (kernel.most_inputs < work.inputs) continue;
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
