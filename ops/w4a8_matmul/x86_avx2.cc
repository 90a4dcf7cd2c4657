// AVX2: nibbles times int8 by vpmaddubsw.
#include "matmul/avx2_int8.h"
#include "w4a8_matmul/group_int4_format.h"
#include "w4a8_matmul/one_row.h"

namespace ortolan {
namespace {

// Nibbles are unsigned, which vpmaddubsw wants, and small: the sums of a span fit 16 bits (8 x 2 x 15 x 127 = 30480).
struct Avx2NibbleSimd : Avx2Int8Simd {
  struct SpanSums {
    __m256i low, high;
  };
  static constexpr uint32_t kInt4Bias = kMiddleZeroPoint;
  static constexpr int kMostChains = 1;

  static Weights Low(const Bytes& bytes) { return {LowNibbles(bytes.low), LowNibbles(bytes.high)}; }
  static Weights High(const Bytes& bytes) {
    return {LowNibbles(_mm256_srli_epi16(bytes.low, 4)), LowNibbles(_mm256_srli_epi16(bytes.high, 4))};
  }
  static __m256i LowNibbles(__m256i bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi8(0x0f)); }

  static SpanSums StartSpan(const Sums&) { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  using Avx2Int8Simd::MultiplyAdd;
  static SpanSums MultiplyAdd(const SpanSums& sums, const Weights& weights, const int8_t* quad) {
    int32_t bits;
    __builtin_memcpy(&bits, quad, sizeof(bits));
    const __m256i x = _mm256_set1_epi32(bits);
    return {MultiplyAdd(sums.low, weights.low, x), MultiplyAdd(sums.high, weights.high, x)};
  }
  // By hand: gcc 12 makes a tree of the sums, whose products then spill.
  static __m256i MultiplyAdd(__m256i sums, __m256i weights, __m256i x) {
    __asm__("vpaddw %1, %0, %0" : "+x"(sums) : "x"(_mm256_maddubs_epi16(weights, x)));
    return sums;
  }
  static Sums EndSpan(const Sums& sums, const SpanSums& span_sums) {
    const __m256i ones = _mm256_set1_epi16(1);
    return {_mm256_add_epi32(sums.low, _mm256_madd_epi16(span_sums.low, ones)),
            _mm256_add_epi32(sums.high, _mm256_madd_epi16(span_sums.high, ones))};
  }

  class GroupSums {
   public:
    explicit GroupSums(const Sums& start) : sums_(start) {}
    void Add(const uint8_t* weights, const int8_t* q) {
      SpanSums span = StartSpan(sums_);
#pragma GCC unroll 4
      for (int line = 0; line < 4; ++line) {
        const Bytes bytes = LoadBytes(weights + 64 * line);
        span = MultiplyAdd(span, Low(bytes), q + 8 * line);
        span = MultiplyAdd(span, High(bytes), q + 8 * line + 4);
      }
      sums_ = EndSpan(sums_, span);
    }
    Sums Total() const { return sums_; }

   private:
    Sums sums_;
  };
};

}  // namespace

namespace avx2 {

void PackGroupInt4(const MatMulWeight& w, const float* x, int64_t x_row_bytes, int64_t m, void* packed) {
  PackGroupQuantizedRows<Avx2NibbleSimd>(w, x, x_row_bytes, m, packed);
}

void MultiplyGroupInt4(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
  if (args.m == 1) return MultiplyOneRow<Avx2NibbleSimd>(args, panel_begin, panel_end);
  Int8PanelLoop<Avx2NibbleSimd, GroupInt4Format>::Run(args, panel_begin, panel_end);
}

}  // namespace avx2
}  // namespace ortolan
