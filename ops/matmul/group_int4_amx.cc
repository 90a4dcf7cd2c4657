#include "matmul/amx_loop.h"
#include "matmul/weights/group_int4.h"
#include "simd/column.h"

namespace ortolan::amx {

void PackGroupInt4(const MatMulWeight& w, const float* x, int64_t x_row_bytes, int64_t m, void* packed) {
  PackGroupQuantizedRows<WithTiles<Simd>>(w, x, x_row_bytes, m, 1, packed);
  PadAmxRows(packed, m, static_cast<const GroupInt4Weight&>(w).PackedRowBytes());
}

void MultiplyGroupInt4(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
  AmxLoop<WithTiles<Simd>, GroupInt4Weights<WithTiles<Simd>>>::Run(args, panel_begin, panel_end);
}

}  // namespace ortolan::amx
