#if defined(__aarch64__)

#include <cstdio>
#include <cstring>

#include "isa/built.h"
#include "isa/features.h"

#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace ortolan {
#if defined(__APPLE__)
namespace {

// Return whether macOS reports this CPU feature; false if the system does not know the name.
bool HasFeature(const char* name) {
  int value = 0;
  size_t size = sizeof(value);
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}

}  // namespace
#endif

// NEON is part of armv8-a. The other features come from the kernel's HWCAP words or, on macOS, from sysctl.
Features DetectedFeatures() {
  uint32_t bits = kNeon;
#if defined(__linux__)
  constexpr unsigned long kHwcapDotprod = 1ul << 20;
  constexpr unsigned long kHwcap2I8mm = 1ul << 13;
  constexpr unsigned long kHwcap2Bf16 = 1ul << 14;
  if ((getauxval(AT_HWCAP) & kHwcapDotprod) != 0) bits |= kDotprod;
  if ((getauxval(AT_HWCAP2) & kHwcap2I8mm) != 0) bits |= kI8mm;
  if ((getauxval(AT_HWCAP2) & kHwcap2Bf16) != 0) bits |= kArmBf16;
#elif defined(__APPLE__)
  if (HasFeature("hw.optional.arm.FEAT_DotProd")) bits |= kDotprod;
  if (HasFeature("hw.optional.arm.FEAT_I8MM")) bits |= kI8mm;
  if (HasFeature("hw.optional.arm.FEAT_BF16")) bits |= kArmBf16;
#endif
  return Features{bits} & BuiltFeatures();
}

std::string CpuName() {
#if defined(__APPLE__)
  char name[128] = {};
  size_t size = sizeof(name) - 1;
  if (sysctlbyname("machdep.cpu.brand_string", name, &size, nullptr, 0) == 0) return name;
#endif
  return "unknown";
}

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
