// What a kernel or a plan must know of a CPU beyond its features: cache sizes, how far ahead to ask for memory, costs.
// One row a microarchitecture in isa/tuning.inc; an unknown CPU gets the cache sizes that its system tells, and for the
// rest what rows borrow that were not timed.
#pragma once

#include <cstdint>

#include "isa/features.h"

namespace ortolan {

// Bytes from what is read to what is asked for. Lines behind the end of a tensor may be asked for: it is no access.
struct PrefetchDistances {
  int64_t weights;         // bf16 and int8, dense or in a bitmap, and their masks, multiplied as they are read
  int64_t weight_blocks;   // the same, read a block at a time, or stored as tiles
  int64_t int4;            // dense int4, and int8 in groups
  int64_t int4_bitmap;     // the values of an int4 bitmap
  int64_t int4_masks;      // its masks
  int64_t sparse4x1;       // values of 4x1 blocks; indices half as far
  int64_t key_codes;       // of a decode step with vectors of 512 bits
  int64_t key_codes_avx2;  // with vectors of 256 bits, which take each line longer
};

// MaskedMatMul: what a way of multiplying costs, as a share of the dense product's time (masked_matmul/plan.cc).
struct MaskedMatMulCosts {
  double blocks;            // a product in the blocks kernels
  double blocks_pattern;    // finding which blocks there are
  double pack_columns;      // packing A, in columns of B
  double two_sided;         // a product where inputs of a tile of A are skipped too
  double two_sided_pack;    // packing B's blocks for it
  double pattern;           // finding A's pattern
  double list;              // listing the inputs of a tile
  double copy;              // a number of A or B copied, in multiply-adds
  double values;            // a number of A that is not zero, skipping the others one by one
  double values_list;       // its row of a panel, however many numbers it has
  double values_pack;       // packing B for it, in rows of A
  double least_gain;        // a way that skips must cost less than this
  int64_t most_panel_rows;  // rows of A up to which a dense product by panels beats one that packs B; 0: none
};

struct Tuning {
  const char* microarchitecture;
  int64_t l1_bytes;  // data, a core
  int64_t l2_bytes;  // a core
  PrefetchDistances ahead;
  MaskedMatMulCosts masked;
  int64_t piece_macs;         // multiply-adds below which work is not worth handing to another thread
  bool fast_dot_bf16 = true;  // vdpbf16ps, where there is one, beats two fused multiply-adds, which make the same bits
};

// The row of this CPU. Found once.
const Tuning& ActiveTuning();

}  // namespace ortolan
