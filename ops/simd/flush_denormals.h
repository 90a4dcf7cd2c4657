// Denormal floats as zero, for a while. Local to each file that includes it.
#pragma once

#include <cstdint>

namespace ortolan::simd {
namespace {

// From FlushDenormals to RestoreDenormals of what it gave, the thread takes and gives zeros, with their sign, for
// denormal floats: as instructions for bf16 do whatever the thread's rule is. Loads and stores do not move across
// either. Nothing here is RAII: kernels throw nothing, and a destructor would bring a weak symbol for it.
#if defined(__x86_64__)
using DenormalRule = uint32_t;  // MXCSR
inline void RestoreDenormals(DenormalRule rule) { __asm__ volatile("ldmxcsr %0" : : "m"(rule) : "memory"); }
inline DenormalRule FlushDenormals() {
  constexpr DenormalRule kFlush = 0x8040;  // flush to zero, denormals are zeros
  DenormalRule rule;
  __asm__ volatile("stmxcsr %0" : "=m"(rule) : : "memory");
  RestoreDenormals(rule | kFlush);
  return rule;
}
#elif defined(__aarch64__)
using DenormalRule = uint64_t;  // FPCR
inline void RestoreDenormals(DenormalRule rule) { __asm__ volatile("msr fpcr, %0" : : "r"(rule) : "memory"); }
inline DenormalRule FlushDenormals() {
  constexpr DenormalRule kFlush = 1 << 24;  // FZ
  DenormalRule rule;
  __asm__ volatile("mrs %0, fpcr" : "=r"(rule) : : "memory");
  RestoreDenormals(rule | kFlush);
  return rule;
}
#endif

}  // namespace
}  // namespace ortolan::simd
