#include "matmul/amx_loop.h"
#include "matmul/weights/int4.h"
#include "simd/column.h"

namespace ortolan::amx {

void PackInt4(const MatMulWeight& w, const float* x, int64_t x_row_bytes, int64_t m, void* packed) {
  PackQuantizedRows<Simd>(w, WithTiles<Simd>::kNibbleBias, x, x_row_bytes, m, 1, packed);
  PadAmxRows(packed, m, static_cast<const BitmapWeight&>(w).QuantizedRowBytes());
}

void MultiplyInt4(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
  RunAmxLoop<Simd, Int4Weights>(args, panel_begin, panel_end);
}

}  // namespace ortolan::amx
