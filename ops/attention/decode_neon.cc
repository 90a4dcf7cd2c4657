// NEON kernel of decode.h.
#include "attention/decode_loop.h"

namespace ortolan {
namespace {

struct Blocks {
  static int64_t Ahead(const PrefetchDistances& ahead) { return ahead.key_codes_avx2; }
  static constexpr int kVectors = 2;
  static constexpr int kDotHeads = 4;

  // Limit of the 16-bit sums. The indices of a block for this many quads take 8 KB.
  static constexpr int64_t kQuads = 64;

  // 16-bit sums for 16 keys.
  struct Sums {
    uint16x8_t low = vdupq_n_u16(0);
    uint16x8_t high = vdupq_n_u16(0);
    void Add(uint8x16_t entries) {
      low = vaddw_u8(low, vget_low_u8(entries));
      high = vaddw_high_u8(high, entries);
    }
    void AddTo(float* scores, Float step) const {
      const uint32x4_t sums[] = {vmovl_u16(vget_low_u16(low)), vmovl_high_u16(low), vmovl_u16(vget_low_u16(high)),
                                 vmovl_high_u16(high)};
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        Simd::Store(scores + 4 * i, Simd::MultiplyAdd(vcvtq_f32_u32(sums[i]), step, Simd::Load(scores + 4 * i)));
      }
    }
  };

  static void ScoreBlocks(const CodeBlocks& at, int64_t heads) {
    uint8x16_t indices[kQuads][8];  // per sub-quantizer: keys 0 … 15, then 16 … 31
    for (int64_t block = 0; block < at.blocks; ++block) {
      for (int64_t first = 0; first < at.quads; first += kQuads) {
        const int64_t quads = at.quads - first < kQuads ? at.quads - first : kQuads;
        const uint8_t* codes = at.codes + (block * at.quads + first) * 64;
        for (int64_t quad = 0; quad < quads; ++quad) {
          __builtin_prefetch(codes + 64 * quad + at.ahead);
          const uint8x16x4_t bytes = vld4q_u8(codes + 64 * quad);
#pragma GCC unroll 4
          for (int s = 0; s < 4; ++s) {
            indices[quad][2 * s] = vandq_u8(bytes.val[s], vdupq_n_u8(15));
            indices[quad][2 * s + 1] = vshrq_n_u8(bytes.val[s], 4);
          }
        }
        for (int64_t h = 0; h < heads; ++h) {
          Sums low;
          Sums high;
          const uint8_t* table = at.tables + (h * at.quads + first) * 64;
          for (int64_t quad = 0; quad < quads; ++quad, table += 64) {
#pragma GCC unroll 4
            for (int s = 0; s < 4; ++s) {
              const uint8x16_t entries = vld1q_u8(table + 16 * s);
              low.Add(vqtbl1q_u8(entries, indices[quad][2 * s]));
              high.Add(vqtbl1q_u8(entries, indices[quad][2 * s + 1]));
            }
          }
          float* scores = at.scores + h * at.stride + block * kKeyBlock;
          if (first == 0) {
            for (int64_t i = 0; i < kKeyBlock; i += kLanes) Simd::Store(scores + i, Simd::Set(at.biases[h]));
          }
          const Float step = Simd::Set(at.steps[h]);
          low.AddTo(scores, step);
          high.AddTo(scores + 16, step);
        }
      }
    }
  }
};

}  // namespace
}  // namespace ortolan

namespace ortolan::neon {

extern const DecodeFunctions kDecode;
constexpr DecodeFunctions kDecode = kDecodeFunctions<Blocks>;

}  // namespace ortolan::neon
