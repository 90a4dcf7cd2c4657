#if defined(__x86_64__)

#include <cpuid.h>

#include <cstdlib>
#include <cstring>

#include "isa/built.h"
#include "isa/features.h"

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace ortolan {
namespace {

struct CpuidResult {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

CpuidResult Cpuid(uint32_t leaf, uint32_t subleaf) {
  CpuidResult r;
  if (__get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx) == 0) return {};
  return r;
}

// Read XCR0, the register state that the operating system saves. Requires OSXSAVE.
uint64_t ReadXcr0() {
  uint32_t low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

constexpr bool HasBits(uint64_t value, uint64_t bits) { return (value & bits) == bits; }
constexpr uint32_t Bit(int n) { return uint32_t{1} << n; }

// Linux grants AMX tile data to a process on request only, and before it starts threads.
bool RequestAmxPermission() {
#if defined(__linux__)
  constexpr long kGetPermission = 0x1022;      // ARCH_GET_XCOMP_PERM
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) return false;
  uint64_t granted = 0;
  if (syscall(SYS_arch_prctl, kGetPermission, &granted) != 0) return false;
  return HasBits(granted, uint64_t{1} << kTileData);
#else
  return false;
#endif
}

// Return whether a test run sets this environment variable to 1: it then emulates what the CPU lacks.
bool Assumed([[maybe_unused]] const char* variable) {
#if defined(ORTOLAN_TESTING)
  const char* assume = std::getenv(variable);
  return assume != nullptr && std::strcmp(assume, "1") == 0;
#else
  return false;
#endif
}

bool HasAmx(const CpuidResult& leaf7, uint64_t xcr0) {
  constexpr uint64_t kTileState = uint64_t{3} << 17;
  constexpr uint32_t kBf16TileInt8 = Bit(22) | Bit(24) | Bit(25);
  if (HasBits(leaf7.edx, kBf16TileInt8) && HasBits(xcr0, kTileState)) return RequestAmxPermission();
  return Assumed("ORTOLAN_ASSUME_AMX");
}

Features Detect() {
  const CpuidResult leaf1 = Cpuid(1, 0);
  const CpuidResult leaf7 = Cpuid(7, 0);
  const CpuidResult leaf7_1 = Cpuid(7, 1);
  const CpuidResult extended1 = Cpuid(0x80000001, 0);

  constexpr uint32_t kOsxsave = Bit(27);
  if (!HasBits(leaf1.ecx, kOsxsave)) return {};
  const uint64_t xcr0 = ReadXcr0();

  constexpr uint64_t kYmmState = 0x6;
  const bool fma_f16c_popcnt = HasBits(leaf1.ecx, Bit(12) | Bit(29) | Bit(23) | Bit(28));
  const bool bmi_avx2 = HasBits(leaf7.ebx, Bit(3) | Bit(5) | Bit(8));
  const bool lzcnt = HasBits(extended1.ecx, Bit(5));
  if (!HasBits(xcr0, kYmmState) || !fma_f16c_popcnt || !bmi_avx2 || !lzcnt) return {};
  uint32_t bits = kAvx2;
#ifdef ORTOLAN_AMX_ON_AVX2
  if (HasAmx(leaf7, xcr0)) bits |= kAmx;
#endif
  if (HasBits(leaf7_1.eax, Bit(4)) || Assumed("ORTOLAN_ASSUME_AVXVNNI")) bits |= kAvxVnni;

  constexpr uint64_t kZmmState = 0xe6;
  constexpr uint32_t kFDqBwVl = Bit(16) | Bit(17) | Bit(30) | Bit(31);
  if (!HasBits(xcr0, kZmmState) || !HasBits(leaf7.ebx, kFDqBwVl)) return {bits};
  bits |= kAvx512;
  if (HasBits(leaf7.ecx, Bit(11))) bits |= kAvx512Vnni;
  if (HasBits(leaf7.ecx, Bit(1) | Bit(6) | Bit(12) | Bit(14))) bits |= kAvx512Vbmi;
  if (HasBits(leaf7_1.eax, Bit(5))) bits |= kAvx512Bf16;
  if (Features{bits}.Has(feature_set::avx512bf16) && HasAmx(leaf7, xcr0)) bits |= kAmx;
  return {bits};
}

}  // namespace

Features DetectedFeatures() {
  static const Features features = Detect() & BuiltFeatures();
  return features;
}

std::string CpuName() {
  if (Cpuid(0x80000000, 0).eax < 0x80000004) return "unknown";
  char text[49] = {};
  for (uint32_t i = 0; i < 3; ++i) {
    const CpuidResult r = Cpuid(0x80000002 + i, 0);
    std::memcpy(text + 16 * i, &r, sizeof(r));
  }
  const std::string name(text);
  const size_t first = name.find_first_not_of(' ');
  return first == std::string::npos ? "unknown" : name.substr(first, name.find_last_not_of(' ') - first + 1);
}

CpuModel DetectedModel() {
  CpuModel cpu;
  const CpuidResult leaf0 = Cpuid(0, 0);
  const uint32_t letters[] = {leaf0.ebx, leaf0.edx, leaf0.ecx};
  std::memcpy(cpu.vendor, letters, sizeof(letters));
  const uint32_t version = Cpuid(1, 0).eax;
  const uint32_t family = version >> 8 & 0xf;
  cpu.family = family == 0xf ? family + (version >> 20 & 0xff) : family;
  cpu.model = (version >> 4 & 0xf) | (version >> 16 & 0xf) << 4;
  return cpu;
}

}  // namespace ortolan

#endif
