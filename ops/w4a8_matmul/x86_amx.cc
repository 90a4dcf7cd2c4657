// AMX: nibbles less 8 as signed B tiles, times int8.
#include "matmul/amx_int8.h"
#include "w4a8_matmul/group_int4_format.h"

namespace ortolan {

void PackW4A8Amx(const float* x, int64_t x_row_bytes, int64_t m, int64_t k, int64_t group, void* packed) {
  PackGroupQuantizedRows<AmxInt8Simd>(x, x_row_bytes, m, k, group, packed);
  PadAmxRows(packed, m, W4A8MatMulKernel::PackedRowBytes(k, group));
}

void MultiplyW4A8Amx(const W4A8MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
  AmxInt8Loop<GroupInt4Format>::Run(args, panel_begin, panel_end);
}

}  // namespace ortolan
