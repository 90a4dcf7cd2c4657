// What this CPU can do, as a set of features. One mechanism for every room: a kernel names the features that it needs,
// and runs where the CPU has them (isa/kernel_table.h).
//
// Features are bits, not an order: Alder Lake has AVX-VNNI without AVX-512, Zen 4 the reverse.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace ortolan {

enum Feature : uint32_t {
  kAvx2 = 1u << 0,        // AVX2, FMA, F16C, BMI1/2, POPCNT, LZCNT
  kAvxVnni = 1u << 1,     // vpdpbusd of 32 bytes in VEX form
  kAvx512 = 1u << 2,      // AVX-512 F, BW, DQ, VL
  kAvx512Vnni = 1u << 3,  // vpdpbusd of 64 bytes
  kAvx512Vbmi = 1u << 4,  // VBMI, VBMI2, BITALG, VPOPCNTDQ: Ice Lake and Zen 4 on
  kAvx512Bf16 = 1u << 5,
  kAmx = 1u << 6,  // AMX TILE, BF16, INT8, and the operating system's permission
  kNeon = 1u << 7,
  kDotprod = 1u << 8,
  kI8mm = 1u << 9,
  kArmBf16 = 1u << 10,
};

struct Features {
  uint32_t bits = 0;

  constexpr bool Has(Features all) const { return (bits & all.bits) == all.bits; }
  friend constexpr Features operator&(Features a, Features b) { return {a.bits & b.bits}; }
  friend constexpr bool operator==(Features, Features) = default;
};

// The sets of isa/feature_sets.inc by name: feature_set::avx512.
namespace feature_set {
#define ORTOLAN_FEATURE_SET(name, bits) inline constexpr Features name{bits};
#include "isa/feature_sets.inc"
#undef ORTOLAN_FEATURE_SET
}  // namespace feature_set

struct NamedFeatureSet {
  const char* name;
  Features features;
};

// All rows of feature_sets.inc, in that order.
std::span<const NamedFeatureSet> FeatureSets();

// What this CPU and operating system allow (CPUID, XGETBV, getauxval; for AMX also arch_prctl). Asked once.
// In test builds alone (ORTOLAN_TESTING), ORTOLAN_ASSUME_AMX=1 adds kAmx on a CPU with AVX512-BF16, and
// ORTOLAN_ASSUME_AVXVNNI=1 kAvxVnni on one with AVX2. Their code then needs the emulator of tests/amx in the process:
// without it the first instruction that the CPU lacks ends the process.
Features DetectedFeatures();

// What kernels may use: DetectedFeatures(), but none outside of the set that the environment variable ORTOLAN_ISA
// names, which is read once.
Features ActiveFeatures();

// Empty, or why the value of ORTOLAN_ISA cannot be used: the name is unknown, or this CPU lacks the set.
const std::string& IsaProblem();

// The names of the sets that `features` contains, in the order of feature_sets.inc.
std::vector<std::string> NamesOf(Features features);

// The CPU's own name for itself ("AMD EPYC …"), or "unknown".
std::string CpuName();

// Who made the CPU and which it is, for isa/tuning.inc: as CPUID says, or for "ARM" implementer and part of MIDR_EL1.
struct CpuModel {
  char vendor[13] = {};
  uint32_t family = 0;
  uint32_t model = 0;
};
CpuModel DetectedModel();

}  // namespace ortolan
