// The CPU's features as a bit set. Every kernel names the features it needs and runs where the CPU has all of them
// (isa/kernel_table.h).
//
// Features are a set, not a scale: Alder Lake has AVX-VNNI without AVX-512, Zen 4 the reverse.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace ortolan {

enum Feature : uint32_t {
  kAvx2 = 1u << 0,        // AVX2, FMA, F16C, BMI1/2, POPCNT, LZCNT
  kAvxVnni = 1u << 1,     // vpdpbusd on 32 bytes, VEX encoding
  kAvx512 = 1u << 2,      // AVX-512 F, BW, DQ, VL
  kAvx512Vnni = 1u << 3,  // vpdpbusd on 64 bytes
  kAvx512Vbmi = 1u << 4,  // VBMI, VBMI2, BITALG, VPOPCNTDQ: Ice Lake, Zen 4 and later
  kAvx512Bf16 = 1u << 5,
  kAmx = 1u << 6,  // AMX TILE, BF16 and INT8, with the operating system's permission
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

// The sets of isa/feature_sets.inc by name, for example feature_set::avx512.
namespace feature_set {
#define ORTOLAN_FEATURE_SET(name, bits) inline constexpr Features name{bits};
#include "isa/feature_sets.inc"
#undef ORTOLAN_FEATURE_SET
}  // namespace feature_set

struct NamedFeatureSet {
  const char* name;
  Features features;
};

// All rows of feature_sets.inc, in file order.
std::span<const NamedFeatureSet> FeatureSets();

// The features of this CPU that the operating system allows (CPUID, XGETBV, getauxval; arch_prctl for AMX). Detected
// once.
//
// In test builds only (ORTOLAN_TESTING), ORTOLAN_ASSUME_AMX=1 adds kAmx on a CPU with AVX512-BF16, and
// ORTOLAN_ASSUME_AVXVNNI=1 adds kAvxVnni on a CPU with AVX2. The process must then run under the emulator of tests/amx:
// without it, the first unsupported instruction ends the process.
Features DetectedFeatures();

// The features that kernels may use: DetectedFeatures() restricted to the set named by the environment variable
// ORTOLAN_ISA, which is read once.
Features ActiveFeatures();

// Why the value of ORTOLAN_ISA cannot be used (an unknown name, or a set this CPU lacks); empty if it can.
const std::string& IsaProblem();

// The names of all sets contained in `features`, in the order of feature_sets.inc.
std::vector<std::string> NamesOf(Features features);

// The CPU's model name ("AMD EPYC …"), or "unknown".
std::string CpuName();

// Vendor and model for isa/tuning.inc, as CPUID reports them. For "ARM", family is the implementer and model the part
// number of MIDR_EL1.
struct CpuModel {
  char vendor[13] = {};
  uint32_t family = 0;
  uint32_t model = 0;
};
CpuModel DetectedModel();

}  // namespace ortolan
