#include "matmul/panel_loop.h"
#include "matmul/weights/int8.h"
#include "simd/column.h"

namespace ortolan::ORTOLAN_COLUMN {

void PackInt8(const MatMulWeight& w, const float* x, int64_t x_row_bytes, int64_t m, void* packed) {
  PackQuantizedRows<Simd>(w, Simd::kInt8Bias, x, x_row_bytes, m, kRowBlock<Simd>, packed);
}

void MultiplyInt8(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
  RunPanelLoop<Simd, Int8Weights>(args, panel_begin, panel_end);
}

}  // namespace ortolan::ORTOLAN_COLUMN
