// AVX2 kernel of decode.h.
#include "attention/decode_loop.h"

namespace ortolan {
namespace {

struct Blocks {
  static int64_t Ahead(const PrefetchDistances& ahead) { return ahead.key_codes_avx2; }
  static constexpr int kVectors = 2;
  static constexpr int kDotHeads = 2;

  // Limit of the 16-bit sums. The indices of a block for this many quads take 8 KB.
  static constexpr int64_t kQuads = 64;

  // Unpacks the table indices of a quad's 64 bytes, two sub-quantizers a vector: for keys 0 … 15, then 16 … 31, each in
  // the order 0 … 3, 8 … 11, 4 … 7, 12 … 15.
  static void Unpack(const uint8_t* codes, __m256i* indices) {
    const __m256i by_sub_quantizer =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    const __m256i a = _mm256_shuffle_epi8(Simd::LoadBytes(codes), by_sub_quantizer);
    const __m256i b = _mm256_shuffle_epi8(Simd::LoadBytes(codes + 32), by_sub_quantizer);
    const __m256i first = _mm256_permute4x64_epi64(_mm256_unpacklo_epi32(a, b), 0xD8);
    const __m256i second = _mm256_permute4x64_epi64(_mm256_unpackhi_epi32(a, b), 0xD8);
    indices[0] = Simd::LowNibbles(first);
    indices[1] = Simd::LowNibbles(second);
    indices[2] = Simd::HighNibbles(first);
    indices[3] = Simd::HighNibbles(second);
  }

  // 16-bit sums for 16 keys, in the order of the indices. `both` sums even bytes plus 256 times odd bytes, `odd` only
  // the odd bytes.
  struct Sums {
    __m256i both = _mm256_setzero_si256();
    __m256i odd = _mm256_setzero_si256();
    void Add(__m256i entries) {
      both = _mm256_add_epi16(both, entries);
      odd = _mm256_add_epi16(odd, _mm256_srli_epi16(entries, 8));
    }
    // Adds step times the sums to the scores, in the original order of keys.
    void AddTo(float* scores, __m256 step) const {
      const __m256i even = _mm256_sub_epi16(both, _mm256_slli_epi16(odd, 8));
      const __m128i evens = _mm_add_epi16(_mm256_castsi256_si128(even), _mm256_extracti128_si256(even, 1));
      const __m128i odds = _mm_add_epi16(_mm256_castsi256_si128(odd), _mm256_extracti128_si256(odd, 1));
      const __m256i a = _mm256_cvtepu16_epi32(_mm_unpacklo_epi16(evens, odds));
      const __m256i b = _mm256_cvtepu16_epi32(_mm_unpackhi_epi16(evens, odds));
      const __m256 first = _mm256_cvtepi32_ps(_mm256_permute2x128_si256(a, b, 0x20));
      const __m256 second = _mm256_cvtepi32_ps(_mm256_permute2x128_si256(a, b, 0x31));
      _mm256_storeu_ps(scores, _mm256_fmadd_ps(first, step, _mm256_loadu_ps(scores)));
      _mm256_storeu_ps(scores + 8, _mm256_fmadd_ps(second, step, _mm256_loadu_ps(scores + 8)));
    }
  };

  static void ScoreBlocks(const CodeBlocks& at, int64_t heads) {
    alignas(32) __m256i indices[4 * kQuads];
    for (int64_t block = 0; block < at.blocks; ++block) {
      for (int64_t first = 0; first < at.quads; first += kQuads) {
        const int64_t quads = at.quads - first < kQuads ? at.quads - first : kQuads;
        const uint8_t* codes = at.codes + (block * at.quads + first) * 64;
        for (int64_t quad = 0; quad < quads; ++quad) {
          _mm_prefetch(reinterpret_cast<const char*>(codes + 64 * quad + at.ahead), _MM_HINT_T0);
          Unpack(codes + 64 * quad, indices + 4 * quad);
        }
        for (int64_t h = 0; h < heads; ++h) {
          Sums low;
          Sums high;
          const uint8_t* table = at.tables + (h * at.quads + first) * 64;
          for (int64_t quad = 0; quad < quads; ++quad, table += 64) {
            const __m256i a = Simd::LoadBytes(table);
            const __m256i b = Simd::LoadBytes(table + 32);
            low.Add(_mm256_shuffle_epi8(a, indices[4 * quad]));
            low.Add(_mm256_shuffle_epi8(b, indices[4 * quad + 1]));
            high.Add(_mm256_shuffle_epi8(a, indices[4 * quad + 2]));
            high.Add(_mm256_shuffle_epi8(b, indices[4 * quad + 3]));
          }
          float* scores = at.scores + h * at.stride + block * kKeyBlock;
          if (first == 0) {
            for (int64_t i = 0; i < kKeyBlock; i += 8) _mm256_storeu_ps(scores + i, _mm256_set1_ps(at.biases[h]));
          }
          const __m256 step = _mm256_set1_ps(at.steps[h]);
          low.AddTo(scores, step);
          high.AddTo(scores + 16, step);
        }
      }
    }
  }

  // Loads the scales of a tile's tokens as multiples of a unit, the largest / 32767; 0 for tokens outside the range.
  // Returns the unit.
  static float UnitScales(const Int8Blocks& at, __m256* scales) {
    const int64_t block_bytes = kValueBlock * ValueRowBytes(at.head_dim);
    const __m256i from = Simd::SetInt(static_cast<int>(at.from) - 1), to = Simd::SetInt(static_cast<int>(at.to));
    __m256i token = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256i most = _mm256_setzero_si256();  // compared as integers, so that NaN is the largest
    for (int64_t i = 0; i < kBlockVectors * at.blocks; ++i, token = Simd::AddInt(token, Simd::SetInt(8))) {
      const uint8_t* stored = at.values + i / kBlockVectors * block_bytes + i % kBlockVectors * 8 * kValueScaleBytes;
      const __m256i counts = _mm256_and_si256(_mm256_cmpgt_epi32(token, from), _mm256_cmpgt_epi32(to, token));
      const __m256i scale = _mm256_and_si256(counts, Simd::BitsOf(Simd::LoadBf16(stored)));
      most = Simd::MaxInt(most, scale);
      scales[i] = Simd::FloatOf(scale);
    }
    const float largest = __builtin_bit_cast(float, Simd::MaxOfIntLanes(most));
    const __m256 inverse = Simd::Set(largest > kLeastScale ? 32767 / largest : 0.0f);
    for (int64_t i = 0; i < kBlockVectors * at.blocks; ++i) scales[i] = Simd::Multiply(scales[i], inverse);
    return largest * (1.0f / 32767);
  }

  // Computes a head's weights times the scales as 15-bit integers, each four tokens in the order 0, 2, 1, 3. Returns
  // their unit.
  static float PairWeights(const TileHead& head, int64_t blocks, const __m256* scales, float unit, uint8_t* parts) {
    const __m256i pairs = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 8, 9, 4, 5, 12, 13, -128, -128, -128, -128, -128, -128, -128, -128));
    const __m256 most = Simd::Set(head.most);
    __m256 sum = Simd::Set(0.0f);
    for (int64_t i = 0; i < kBlockVectors * blocks; ++i) {
      const __m256 weight = Simd::Exp2(Simd::Subtract(Simd::Load(head.scores + 8 * i), most));
      sum = Simd::Add(sum, weight);
      const __m256i words = _mm256_shuffle_epi8(Simd::RoundToInt(Simd::Multiply(weight, scales[i])), pairs);
      const __m256i in_order = _mm256_permute4x64_epi64(words, 0xD8);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(parts + 16 * i), _mm256_castsi256_si128(in_order));
    }
    const __m256 factor = Simd::Exp2(Simd::Set(head.most - head.maximum));
    Simd::Store(head.sums, Simd::MultiplyAdd(sum, factor, Simd::Load(head.sums)));
    return _mm256_cvtss_f32(factor) * unit;
  }

  // sums += a b for pairs of 16-bit values. Inline assembly, because gcc 12 turns the additions into a tree and spills.
  static void AddPairs(__m256i& sums, __m256i a, __m256i b) {
    __asm__("vpaddd %1, %0, %0" : "+x"(sums) : "x"(_mm256_madd_epi16(a, b)));
  }

  // y += weights values, for kVectors vectors from dimension d on.
  template <int kHeads, int kVectors>
  static void AddInt8Tile(const Int8Blocks& at, int64_t head, int64_t d, const float* steps) {
    const int64_t block_bytes = kValueBlock * ValueRowBytes(at.head_dim);
    const int64_t ahead = kDecodeTile / kValueBlock * block_bytes;  // bytes to the next tile
    const uint8_t* weights = at.parts + head * kPartBytes;
    __m256i sum[kHeads][kVectors] = {};
    const uint8_t* from = at.values + kValueBlock * kValueScaleBytes + 4 * d;
    for (int64_t quad = 0; quad < kValueBlock / 4; ++quad, from += 4 * at.head_dim, weights += 8) {
      // All blocks at once: the hardware prefetcher follows several streams better than one.
      for (int64_t block = 0; block < at.blocks; ++block) {
        const uint8_t* values = from + block * block_bytes;
        if (head == 0) _mm_prefetch(reinterpret_cast<const char*>(values + ahead), _MM_HINT_T0);
        // Tokens 0 and 2, and tokens 1 and 3, as 16-bit pairs.
        __m256i even[kVectors], odd[kVectors];
#pragma GCC unroll 4
        for (int i = 0; i < kVectors; ++i) {
          const __m256i four = Simd::LoadBytes(values + 32 * i);
          even[i] = _mm256_srai_epi16(_mm256_slli_epi16(four, 8), 8);
          odd[i] = _mm256_srai_epi16(four, 8);
        }
#pragma GCC unroll 4
        for (int h = 0; h < kHeads; ++h) {
          const uint8_t* weight = weights + h * kPartBytes + block * 2 * kValueBlock;
          const __m256i first = Simd::RepeatQuad(weight), second = Simd::RepeatQuad(weight + 4);
#pragma GCC unroll 4
          for (int i = 0; i < kVectors; ++i) {
            AddPairs(sum[h][i], even[i], first);
            AddPairs(sum[h][i], odd[i], second);
          }
        }
      }
    }
    for (int h = 0; h < kHeads; ++h) {
      const __m256 step = Simd::Set(steps[h]);
      float* y = at.heads[head + h].y + d;
      for (int i = 0; i < kVectors; ++i) {
        Simd::Store(y + 8 * i, Simd::MultiplyAdd(Simd::ToFloat(sum[h][i]), step, Simd::Load(y + 8 * i)));
      }
    }
  }

  template <int kHeads>
  static void AddInt8Heads(const Int8Blocks& at, int64_t head, const __m256* scales, float unit) {
    float steps[kHeads];
    for (int h = 0; h < kHeads; ++h) {
      steps[h] = PairWeights(at.heads[head + h], at.blocks, scales, unit, at.parts + (head + h) * kPartBytes);
    }
    for (int64_t d = 0; d < at.head_dim; d += 16) AddInt8Tile<kHeads, 2>(at, head, d, steps);
  }

  static void AddInt8Blocks(const Int8Blocks& at, int64_t heads) {
    __m256 scales[kDecodeTile / 8];
    const float unit = UnitScales(at, scales);
    int64_t head = 0;
    for (; head + 4 <= heads; head += 4) AddInt8Heads<4>(at, head, scales, unit);
    if (heads - head == 3) return AddInt8Heads<3>(at, head, scales, unit);
    if (heads - head == 2) return AddInt8Heads<2>(at, head, scales, unit);
    if (heads - head == 1) return AddInt8Heads<1>(at, head, scales, unit);
  }

 private:
  static constexpr int64_t kBlockVectors = kValueBlock / 8;
  static constexpr int64_t kPartBytes = 2 * kDecodeTile;
  static constexpr float kLeastScale = 0x1p-100f;
};

}  // namespace
}  // namespace ortolan

namespace ortolan::avx2 {

extern const DecodeFunctions kDecode;
constexpr DecodeFunctions kDecode = kDecodeFunctions<Blocks>;

}  // namespace ortolan::avx2
