#include "isa/isa.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace ortolan {
namespace {

struct IsaRow {
  Isa isa;
  const char* name;
};

constexpr IsaRow kIsaRows[] = {
    {Isa::kScalar, "scalar"},         {Isa::kAvx2, "avx2"}, {Isa::kAvx512, "avx512"},
    {Isa::kAvx512Bf16, "avx512bf16"}, {Isa::kAmx, "amx"},
};

#if defined(__x86_64__)

struct CpuidResult {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

CpuidResult Cpuid(uint32_t leaf, uint32_t subleaf) {
  CpuidResult r;
  if (__get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx) == 0) return {};
  return r;
}

// XCR0: the register state that the operating system saves. Call only where OSXSAVE is set.
uint64_t ReadXcr0() {
  uint32_t low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

constexpr bool HasBits(uint64_t value, uint64_t bits) { return (value & bits) == bits; }
constexpr uint32_t Bit(int n) { return uint32_t{1} << n; }

// Linux gives a process AMX tile data only on request, before its threads start.
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

// For tests, which run AMX code under an emulator.
bool AssumeAmx() {
  const char* assume = std::getenv("ORTOLAN_ASSUME_AMX");
  return assume != nullptr && std::strcmp(assume, "1") == 0;
}

Isa Detect() {
  const CpuidResult leaf1 = Cpuid(1, 0);
  const CpuidResult leaf7 = Cpuid(7, 0);
  const CpuidResult leaf7_1 = Cpuid(7, 1);
  const CpuidResult extended1 = Cpuid(0x80000001, 0);

  constexpr uint32_t kOsxsave = Bit(27);
  if (!HasBits(leaf1.ecx, kOsxsave)) return Isa::kScalar;
  const uint64_t xcr0 = ReadXcr0();

  constexpr uint64_t kYmmState = 0x6;
  const bool fma_f16c_popcnt = HasBits(leaf1.ecx, Bit(12) | Bit(29) | Bit(23) | Bit(28));
  const bool bmi_avx2 = HasBits(leaf7.ebx, Bit(3) | Bit(5) | Bit(8));
  const bool lzcnt = HasBits(extended1.ecx, Bit(5));
  if (!HasBits(xcr0, kYmmState) || !fma_f16c_popcnt || !bmi_avx2 || !lzcnt) return Isa::kScalar;

  constexpr uint64_t kZmmState = 0xe6;
  const bool f_dq_bw_vl = HasBits(leaf7.ebx, Bit(16) | Bit(17) | Bit(30) | Bit(31));
  const bool vbmi_vbmi2_vnni_bitalg_popcnt = HasBits(leaf7.ecx, Bit(1) | Bit(6) | Bit(11) | Bit(12) | Bit(14));
  if (!HasBits(xcr0, kZmmState) || !f_dq_bw_vl || !vbmi_vbmi2_vnni_bitalg_popcnt) return Isa::kAvx2;

  constexpr uint32_t kAvx512Bf16Bit = Bit(5);
  if (!HasBits(leaf7_1.eax, kAvx512Bf16Bit)) return Isa::kAvx512;

  constexpr uint64_t kTileState = uint64_t{3} << 17;
  const bool amx_bf16_tile_int8 = HasBits(leaf7.edx, Bit(22) | Bit(24) | Bit(25));
  if (!amx_bf16_tile_int8 || !HasBits(xcr0, kTileState)) return AssumeAmx() ? Isa::kAmx : Isa::kAvx512Bf16;
  return RequestAmxPermission() ? Isa::kAmx : Isa::kAvx512Bf16;
}

#else

Isa Detect() { return Isa::kScalar; }

#endif

struct Choice {
  Isa isa;
  std::string problem;
};

Choice Choose() {
  const Isa detected = DetectedIsa();
  const char* wanted = std::getenv("ORTOLAN_ISA");
  if (wanted == nullptr || *wanted == '\0') return {detected, {}};
  const std::optional<Isa> parsed = ParseIsa(wanted);
  if (!parsed) {
    std::string known;
    for (const IsaRow& row : kIsaRows) known += (known.empty() ? "" : ", ") + std::string(row.name);
    return {detected, "ORTOLAN_ISA is '" + std::string(wanted) + "', expected one of: " + known};
  }
  return {*parsed < detected ? *parsed : detected, {}};
}

const Choice& ChosenOnce() {
  static const Choice choice = Choose();
  return choice;
}

}  // namespace

const char* IsaName(Isa isa) {
  for (const IsaRow& row : kIsaRows) {
    if (row.isa == isa) return row.name;
  }
  return "unknown";
}

std::optional<Isa> ParseIsa(std::string_view name) {
  for (const IsaRow& row : kIsaRows) {
    if (name == row.name) return row.isa;
  }
  return std::nullopt;
}

Isa DetectedIsa() {
  static const Isa isa = Detect();
  return isa;
}

Isa ActiveIsa() { return ChosenOnce().isa; }

const std::string& IsaProblem() { return ChosenOnce().problem; }

std::string CpuName() {
#if defined(__x86_64__)
  if (Cpuid(0x80000000, 0).eax >= 0x80000004) {
    char text[49] = {};
    for (uint32_t i = 0; i < 3; ++i) {
      const CpuidResult r = Cpuid(0x80000002 + i, 0);
      std::memcpy(text + 16 * i, &r, sizeof(r));
    }
    const std::string name(text);
    const size_t first = name.find_first_not_of(' ');
    const size_t last = name.find_last_not_of(' ');
    if (first != std::string::npos) return name.substr(first, last - first + 1);
  }
#endif
  return "unknown";
}

}  // namespace ortolan
