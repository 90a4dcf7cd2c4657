// CPU parameters beyond features: cache sizes, prefetch distances and costs. isa/tuning.inc has one row per
// microarchitecture. An unknown CPU gets the cache sizes its system reports and conservative values for the rest.
#pragma once

#include <cstdint>

#include "isa/features.h"

namespace ortolan {

// Prefetch distances in bytes. A prefetch may point past the end of a tensor: that is not an access.
struct PrefetchDistances {
  int64_t weights;         // bf16 and int8 weights, dense or bitmap, with their masks, multiplied while they are read
  int64_t weight_blocks;   // the same weights, read in blocks or stored as AMX tiles
  int64_t int4;            // dense int4, and int8 in groups
  int64_t int4_bitmap;     // values of an int4 bitmap
  int64_t int4_masks;      // masks of an int4 bitmap
  int64_t sparse4x1;       // values of 4x1 blocks; half of it for their indices
  int64_t key_codes;       // key codes in a decode step with 512-bit vectors
  int64_t key_codes_avx2;  // key codes with 256-bit vectors, which spend longer on a cache line
};

// Costs of MaskedMatMul's algorithms, relative to the dense product's time (masked_matmul/plan.cc).
struct MaskedMatMulCosts {
  double blocks;            // a product in the blocks kernels
  double blocks_pattern;    // finding the nonzero blocks
  double pack_columns;      // packing A, in columns of B
  double two_sided;         // a product that also skips inputs of A's tiles
  double two_sided_pack;    // packing B's blocks for that product
  double pattern;           // finding A's pattern
  double list;              // listing the inputs of a tile
  double copy;              // copying one element of A or B, in multiply-adds
  double values;            // one nonzero value of A when zeros are skipped one by one
  double values_list;       // each row of a panel in that product, regardless of its nonzero values
  double values_pack;       // packing B for that product, in rows of A
  double least_gain;        // an algorithm that skips zeros must cost less than this
  int64_t most_panel_rows;  // up to this many rows of A, a dense product by panels beats packing B; 0: never
};

// Limits below which ONNX Runtime's own operators are faster, so that the execution provider leaves nodes to them
// (provider/claim_policy.h). Where nothing was measured there is no limit.
struct ClaimLimits {
  int64_t float_weights = 0;      // weights of a float layer that would become bf16 or int8
  double int8_zero_blocks = 0.0;  // fraction of zero blocks of an int8 layer; above 1: ONNX Runtime is always faster
  bool cached_attention = true;   // attention with a KV cache is faster
};

struct Tuning {
  const char* microarchitecture;
  int64_t l1_bytes;  // level-1 data cache per core
  int64_t l2_bytes;  // level-2 cache per core
  PrefetchDistances ahead;
  MaskedMatMulCosts masked;
  int64_t piece_macs;  // multiply-adds below which handing work to another thread does not pay
  ClaimLimits claims;
  bool fast_dot_bf16 = true;  // vdpbf16ps, if present, beats two fused multiply-adds, which give the same bits
};

// The parameters of this CPU, looked up once.
const Tuning& ActiveTuning();

}  // namespace ortolan
