#include "matmul/panel_loop.h"
#include "matmul/weights/bf16.h"
#include "simd/column.h"

namespace ortolan::ORTOLAN_COLUMN {

void PackBf16(const MatMulWeight& w, const float* x, int64_t x_row_bytes, int64_t m, void* packed) {
  PackBf16Rows<Simd>(w, x, x_row_bytes, m, kRowBlock<Simd>, packed);
}

void MultiplyBf16(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
  RunPanelLoop<Simd, Bf16Weights>(args, panel_begin, panel_end);
}

}  // namespace ortolan::ORTOLAN_COLUMN
