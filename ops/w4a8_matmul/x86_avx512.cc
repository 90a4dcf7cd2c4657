// AVX-512 VNNI: nibbles times int8 by vpdpbusd.
#include "matmul/avx512_int8.h"
#include "w4a8_matmul/group_int4_format.h"
#include "w4a8_matmul/one_row.h"

namespace ortolan {
namespace {

struct Avx512NibbleSimd : Avx512Int8Simd {
  // Four chains of sums, so that none waits for itself; those of high nibbles hold 16 times their sums.
  class GroupSums {
   public:
    explicit GroupSums(__m512i start) : low_{start, _mm512_setzero_si512()}, high_{} {}
    void Add(const uint8_t* weights, const int8_t* q) {
#pragma GCC unroll 4
      for (int line = 0; line < 4; ++line) {
        const __m512i bytes = LoadBytes(weights + 64 * line);
        low_[line % 2] = MultiplyAdd(low_[line % 2], Low(bytes), q + 8 * line);
        high_[line % 2] = MultiplyAdd(high_[line % 2], HighTimes16(bytes), q + 8 * line + 4);
      }
    }
    __m512i Total() const {
      const __m512i high = DivideBy16(_mm512_add_epi32(high_[0], high_[1]));
      return _mm512_add_epi32(_mm512_add_epi32(low_[0], low_[1]), high);
    }

   private:
    __m512i low_[2], high_[2];
  };
};

}  // namespace

namespace avx512 {

void PackGroupInt4(const MatMulWeight& w, const float* x, int64_t x_row_bytes, int64_t m, void* packed) {
  PackGroupQuantizedRows<Avx512NibbleSimd>(w, x, x_row_bytes, m, packed);
}

void MultiplyGroupInt4(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
  if (args.m == 1) return MultiplyOneRow<Avx512NibbleSimd>(args, panel_begin, panel_end);
  Int8PanelLoop<Avx512NibbleSimd, GroupInt4Format>::Run(args, panel_begin, panel_end);
}

}  // namespace avx512
}  // namespace ortolan
