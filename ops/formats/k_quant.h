// Weights in subgroups whose scales, and optionally minimums, are integers of 8 bits: GGUF's Q4_K, Q5_K and Q6_K, and
// with one scale a group Q5_0 and Q5_1, all kept exactly. An extension of formats/subgroup.h.
//
// For group g = l / G of inputs, and subgroup h = l / S:
//
//     W[l, j] = scales[g, j] s[h, j] (q[l, j] - zero_point)  + minimums[g, j] t[h, j]
//
//     weights, scales, high_bits   as in formats/subgroup.h
//     zero_point                   0 or 2^(bits - 1), one for all weights; 0 with minimums, which 6 bits cannot have
//     subgroup_scales              int8 [panels, 64 tiles / S, 16]   s; missing: 1
//     minimums                     [panels, groups, 16] of the type of scales; missing: 0
//     subgroup_minimums            u8 [panels, 64 tiles / S, 16]     t; missing: 1
//
//     G is 32, 64, 128 or 256, S is 16 or 32
//
// | GGUF | bits | G   | S  | zero_point | s            | minimums                | bits a weight (GGUF) |
// | ---- | ---- | --- | -- | ---------- | ------------ | ----------------------- | -------------------- |
// | Q4_K | 4    | 256 | 32 | 0          | 0 … 63       | -(float16), t of 6 bits | 4.625 (4.5)          |
// | Q5_K | 5    | 256 | 32 | 0          | 0 … 63       | the same                | 5.625 (5.5)          |
// | Q6_K | 6    | 256 | 16 | 32         | -128 … 127   | none                    | 6.5625 (6.5625)      |
// | Q5_0 | 5    | 32  | 32 | 16         | missing      | none                    | 5.5 (5.5)            |
// | Q5_1 | 5    | 32  | 32 | 0          | missing      | float16, t missing      | 6.0 (6.0)            |
//
// Kernels cannot expand these weights to int8, because s (q - zero_point) may have 13 bits.
#pragma once

#include <string>

#include "formats/group.h"

namespace ortolan {

// Bits of s in this format, the attribute subgroup_scale_bits; in formats/subgroup.h s has 8 - bits.
inline constexpr int64_t kKQuantScaleBits = 8;

inline constexpr bool IsGroupSizeOfKQuants(int64_t group) {
  return group == 32 || group == 64 || group == 128 || group == 256;
}

// Returns an empty string if the subgroups of a claim whose weights and scales are valid have the sizes that kernels
// expect; otherwise one sentence that names the tensor, the value found and the value expected.
std::string ValidateKQuants(const GroupClaim& claim);

}  // namespace ortolan
