// Temporary flushing of denormal floats to zero. Local to each file that includes it.
#pragma once

#include <cstdint>

namespace ortolan::simd {
namespace {

// Between FlushDenormals and RestoreDenormals (which takes its result), the thread treats denormal inputs and results
// as zeros with their sign, as bf16 instructions always do. Loads and stores do not move across either call. Not RAII:
// kernels throw nothing, and a destructor would add a weak symbol.
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
