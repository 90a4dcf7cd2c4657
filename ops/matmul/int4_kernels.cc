#include "matmul/panel_loop.h"
#include "matmul/weights/int4.h"
#include "simd/column.h"

namespace ortolan::ORTOLAN_COLUMN {

void PackInt4(const MatMulWeight& w, const float* x, int64_t x_row_bytes, int64_t m, void* packed) {
  PackQuantizedRows<Simd>(w, Simd::kNibbleBias, x, x_row_bytes, m, kRowBlock<Simd>, packed);
}

void MultiplyInt4(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
  RunPanelLoop<Simd, Int4Weights>(args, panel_begin, panel_end);
}

}  // namespace ortolan::ORTOLAN_COLUMN
