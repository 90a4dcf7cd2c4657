// The tables of kernels, kernels.inc, as C++: what each room's table does with its rows.
#pragma once

#include <cstdint>
#include <span>

#include "isa/isa.h"

// Rows of an ISA tier: only this kind of CPU has them. A room defines ORTOLAN_KERNEL before it includes its table.
#if defined(__x86_64__)
#define ORTOLAN_X86_KERNEL ORTOLAN_KERNEL
#else
#define ORTOLAN_X86_KERNEL(...)
#endif

namespace ortolan {

// The first of the kernels, best first, for `rows` rows of x on a CPU of this tier; the last one runs anywhere.
template <typename Kernel>
const Kernel& SelectKernel(std::span<const Kernel> kernels, Isa isa, [[maybe_unused]] int64_t rows = 0) {
  for (const Kernel& kernel : kernels) {
    if (kernel.isa > isa) continue;
    if constexpr (requires { kernel.least_rows; }) {
      if (kernel.least_rows > rows) continue;
    }
    return kernel;
  }
  return kernels.back();
}

}  // namespace ortolan
