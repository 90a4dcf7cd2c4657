// AMX: nibbles less 8 as signed B tiles, times int8.
#include "matmul/amx_int8.h"
#include "w4a8_matmul/group_int4_format.h"

namespace ortolan {

namespace amx {

void PackGroupInt4(const MatMulWeight& w, const float* x, int64_t x_row_bytes, int64_t m, void* packed) {
  PackGroupQuantizedRows<AmxInt8Simd>(w, x, x_row_bytes, m, packed);
  PadAmxRows(packed, m, static_cast<const GroupInt4Weight&>(w).PackedRowBytes());
}

void MultiplyGroupInt4(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
  AmxInt8Loop<GroupInt4Format>::Run(args, panel_begin, panel_end);
}

}  // namespace amx
}  // namespace ortolan
