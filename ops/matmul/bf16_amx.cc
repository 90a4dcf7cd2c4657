#include "matmul/amx_loop.h"
#include "matmul/weights/bf16.h"
#include "simd/column.h"

namespace ortolan::amx {

void PackBf16(const MatMulWeight& w, const float* x, int64_t x_row_bytes, int64_t m, void* packed) {
  PackBf16Rows<Simd>(w, x, x_row_bytes, m, 1, packed);
  PadAmxRows(packed, m, Bf16Weights<Simd, Storage::kDense>::PackedRowBytes(static_cast<const BitmapWeight&>(w)));
}

void MultiplyBf16(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
  RunAmxLoop<Simd, Bf16Weights>(args, panel_begin, panel_end);
}

}  // namespace ortolan::amx
