#if defined(__aarch64__)

#include "isa/features.h"

#if defined(__linux__)
#include <sys/auxv.h>
#endif

namespace ortolan {

// NEON belongs to armv8-a. The others are read from the kernel's HWCAP words.
Features DetectedFeatures() {
  uint32_t bits = kNeon;
#if defined(__linux__)
  constexpr unsigned long kHwcapDotprod = 1ul << 20;
  constexpr unsigned long kHwcap2I8mm = 1ul << 13;
  constexpr unsigned long kHwcap2Bf16 = 1ul << 14;
  if ((getauxval(AT_HWCAP) & kHwcapDotprod) != 0) bits |= kDotprod;
  if ((getauxval(AT_HWCAP2) & kHwcap2I8mm) != 0) bits |= kI8mm;
  if ((getauxval(AT_HWCAP2) & kHwcap2Bf16) != 0) bits |= kArmBf16;
#endif
  return {bits};
}

std::string CpuName() { return "unknown"; }

CpuModel DetectedModel() { return {}; }

}  // namespace ortolan

#endif
