#if defined(__aarch64__)

#include <cstdio>
#include <cstring>

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

CpuModel DetectedModel() {
  CpuModel cpu;
  std::strcpy(cpu.vendor, "ARM");
#if defined(__APPLE__)
  cpu.family = 0x61;
#else
  std::FILE* const file = std::fopen("/sys/devices/system/cpu/cpu0/regs/identification/midr_el1", "r");
  if (file == nullptr) return cpu;
  unsigned long long midr = 0;
  if (std::fscanf(file, "%llx", &midr) == 1) {
    cpu.family = static_cast<uint32_t>(midr >> 24 & 0xff);
    cpu.model = static_cast<uint32_t>(midr >> 4 & 0xfff);
  }
  std::fclose(file);
#endif
  return cpu;
}

}  // namespace ortolan

#endif
