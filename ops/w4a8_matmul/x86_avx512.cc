// AVX-512 VNNI: nibbles times int8 by vpdpbusd.
#include "panels/avx512_int8.h"
#include "w4a8_matmul/group_int4_format.h"

namespace ortolan {

void PackW4A8Avx512(const float* x, int64_t x_row_bytes, int64_t m, int64_t k, int64_t group, void* packed) {
  PackGroupQuantizedRows<Avx512Int8Simd>(x, x_row_bytes, m, k, group, packed);
}

void MultiplyW4A8Avx512(const W4A8MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
  Int8PanelLoop<Avx512Int8Simd, GroupInt4Format>::Run(args, panel_begin, panel_end);
}

}  // namespace ortolan
