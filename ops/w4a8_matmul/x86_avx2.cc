// AVX2: nibbles times int8 by pmaddubsw.
#include "panels/avx2_int8.h"
#include "w4a8_matmul/group_int4_format.h"

namespace ortolan {

void PackW4A8Avx2(const float* x, int64_t x_row_bytes, int64_t m, int64_t k, int64_t group, void* packed) {
  PackGroupQuantizedRows<Avx2Int8Simd>(x, x_row_bytes, m, k, group, packed);
}

void MultiplyW4A8Avx2(const W4A8MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
  Int8PanelLoop<Avx2Int8Simd, GroupInt4Format>::Run(args, panel_begin, panel_end);
}

}  // namespace ortolan
