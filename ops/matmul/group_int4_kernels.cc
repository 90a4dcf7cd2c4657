#include "matmul/panel_loop.h"
#include "matmul/weights/group_int4.h"
#include "simd/column.h"

namespace ortolan::ORTOLAN_COLUMN {

void PackGroupInt4(const MatMulWeight& w, const float* x, int64_t x_row_bytes, int64_t m, void* packed) {
  PackGroupQuantizedRows<Simd>(w, x, x_row_bytes, m, kRowBlock<Simd>, packed);
}

void MultiplyGroupInt4(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
  PanelLoop<Simd, GroupInt4Weights<Simd>>::Run(args, panel_begin, panel_end);
}

}  // namespace ortolan::ORTOLAN_COLUMN
