// CPU tiers: which instruction sets this process may use. One mechanism for every room.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace ortolan {

// Ordered: a CPU of one tier runs the kernels of every lower tier.
enum class Isa : int {
  kScalar,      // any CPU
  kAvx2,        // AVX2, FMA, F16C, BMI1/2, POPCNT
  kAvx512,      // AVX-512 F/BW/DQ/VL/VBMI/VBMI2/VNNI/BITALG/VPOPCNTDQ: Ice Lake, Zen 4
  kAvx512Bf16,  // the above and AVX512_BF16: Zen 4, Sapphire Rapids
  kAmx,         // the above and AMX TILE/BF16/INT8, with the kernel's permission: Sapphire Rapids
};

// The name used in ORTOLAN_ISA, in tests and in reports: "scalar", "avx2", "avx512", "avx512bf16", "amx".
const char* IsaName(Isa isa);
std::optional<Isa> ParseIsa(std::string_view name);

// The highest tier that this CPU and operating system allow (CPUID, XGETBV; for AMX also arch_prctl). Asked once.
// For tests only: ORTOLAN_ASSUME_AMX=1 makes it kAmx on an AVX512-BF16 CPU without AMX. AMX code then needs the
// emulator of tests/amx in the process: without it the first tile instruction ends the process.
Isa DetectedIsa();

// The tier that dispatch uses: DetectedIsa(), lowered by the environment variable ORTOLAN_ISA, which is read once.
Isa ActiveIsa();

// Empty, or why the value of ORTOLAN_ISA cannot be used.
const std::string& IsaProblem();

// The CPU's own name for itself ("AMD EPYC …"), or "unknown".
std::string CpuName();

}  // namespace ortolan
