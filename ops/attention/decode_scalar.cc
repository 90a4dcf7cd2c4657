// Portable kernel of decode.h.
#include "attention/decode_loop.h"

namespace ortolan {
namespace {

struct Blocks {
  static int64_t Ahead(const PrefetchDistances&) { return 0; }
  static constexpr int kVectors = 2;
  static constexpr int kDotHeads = 1;

  static void ScoreBlocks(const CodeBlocks& at, int64_t heads) {
    const int64_t block_bytes = at.quads * 64;
    for (int64_t h = 0; h < heads; ++h) {
      const uint8_t* table = at.tables + h * block_bytes;
      for (int64_t block = 0; block < at.blocks; ++block) {
        float* scores = at.scores + h * at.stride + block * kKeyBlock;
        for (int64_t k = 0; k < 16; ++k) {
          const uint8_t* codes = at.codes + block * block_bytes + 4 * k;
          int low = 0;
          int high = 0;
          for (int64_t s = 0; s < 4 * at.quads; ++s) {
            const int both = codes[s / 4 * 64 + s % 4];
            low += table[s * kCentroids + (both & 0xf)];
            high += table[s * kCentroids + (both >> 4)];
          }
          scores[k] = at.biases[h] + at.steps[h] * static_cast<float>(low);
          scores[16 + k] = at.biases[h] + at.steps[h] * static_cast<float>(high);
        }
      }
    }
  }
};

}  // namespace
}  // namespace ortolan

namespace ortolan::scalar {

extern const DecodeFunctions kDecode;
constexpr DecodeFunctions kDecode = kDecodeFunctions<Blocks>;

}  // namespace ortolan::scalar
