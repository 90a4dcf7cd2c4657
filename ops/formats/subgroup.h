// Weights of 4, 5 or 6 bits whose groups are divided into subgroups with integer scales and zero points, so that sums
// within a group are exact integers. Reference: QServe (arXiv:2405.04532), section 4; Integer Scale (arXiv:2405.14597).
//
// For bits b, group g = l / G of inputs, and subgroup h = l / S:
//
//     W[l, j] = scales[g, j] v[l, j]
//     v[l, j] = s[h, j] (q[l, j] - z[h, j])       q, z 0 … 2^b - 1;  s 0 … 2^(8-b) - 1;  |v| <= 127
//
//     weights          u8 [panels, tiles * 8, 64]       the low 4 bits of q, in the order of formats/int4_group.h
//     scales           float32 or float16 [panels, ceil(k / G), 16]                     as in formats/group.h
//     subgroup_scales  u8 [panels, 64 tiles / S, 16]    s + 2^(8-b) z
//     high_bits        u8 [panels, tiles, 128 (b - 4)]  5 and 6 bits: the bits of q above the low 4
//
//     tiles = ceil(k / 64);   G is 64, 128 or 256, S is 16 or 32;   outside the k x n matrix: 0
//     bytes = b / 8 a weight + 1 / S + (2 or 4) / G
//
// A row of weights is 4 inputs of 16 columns: 64 bytes once expanded. 64 bytes of high_bits belong to 8 rows (5 bits)
// or 4 rows (6 bits). Their byte i holds the bits of byte i of each row, the first row's in the highest bits. So
// kernels of any vector width shift them instead of looking them up.
//
// Products of s and q fit a byte: expanding a weight is one multiplication and one subtraction of s z, modulo 256. No
// kernel checks |v| <= 127; larger v wrap around on some targets, so their products are unspecified.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "formats/bitmap_int4.h"

namespace ortolan {

inline constexpr int64_t kSubgroupInputs = 16;  // the smaller subgroup size

// The part of a packed matrix that only weights in subgroups have, possibly unaligned.
struct SubgroupView {
  int64_t size = 0;  // inputs of a subgroup; 0: groups have no subgroups
  int64_t bits = 4;
  const uint8_t* scales = nullptr;
  const uint8_t* high_bits = nullptr;  // null with 4 bits
  // K-quants only (formats/k_quant.h); their scales may be null.
  int64_t scale_bits = 0;             // kKQuantScaleBits; 0: scales and zero points share bytes
  int64_t zero_point = 0;             // of all weights
  const uint8_t* minimums = nullptr;  // null: 1

  // Rows of 16 subgroup scales of a panel of k inputs.
  int64_t Rows(int64_t k) const { return kInt4Bitmap.PaddedK(k) / size; }
};

inline constexpr bool IsSubgroupSize(int64_t size) { return size == 16 || size == 32; }
inline constexpr bool IsGroupSizeOfSubgroups(int64_t group) { return group == 64 || group == 128 || group == 256; }

// Bytes of high_bits of a panel.
inline constexpr int64_t PanelHighBytes(int64_t k, int64_t bits) { return kInt4Bitmap.Tiles(k) * 128 * (bits - 4); }

// The counts of the tensors of an untrusted file, 0 for a missing one.
struct SubgroupClaim {
  int64_t size = 0;
  int64_t bits = 4;
  int64_t scale_count = 0;
  int64_t high_bytes = 0;
  int64_t scale_bits = 0;
  int64_t zero_point = 0;
  int64_t minimum_count = 0;
};

// Returns an empty string if the tensors of a valid k and n have the sizes that kernels expect; otherwise one sentence
// that names the tensor, the value found and the value expected. Every byte is a valid scale and zero point.
std::string ValidateSubgroups(const SubgroupClaim& claim, int64_t k, int64_t n);

// Packs the bits of q above the low 4 (bits: 5 or 6), row-major [k, n] with rows `row_stride` bytes apart.
std::vector<uint8_t> PackHighBits(const uint8_t* q, int64_t row_stride, int64_t k, int64_t n, int64_t bits);

}  // namespace ortolan
