// AVX2: 16 vpshufb over rows of 16 entries, all with the low four bits of x, and a tree of blends by the high four.
#include <immintrin.h>

#include <cstring>

#include "lut_post_op/lut_post_op.h"

namespace ortolan {
namespace {

constexpr int64_t kLanes = 32;
constexpr int64_t kRows = 16;

// Row r of the table in both halves.
void LoadRows(const void* table, __m256i rows[kRows]) {
  for (int64_t r = 0; r < kRows; ++r) {
    rows[r] = _mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(table) + r));
  }
}

__m256i Lookup(const __m256i rows[kRows], __m256i x) {
  const __m256i low = _mm256_and_si256(x, _mm256_set1_epi8(0xf));
  // vpblendvb looks at bit 7 of each byte: bits 4, 5 and 6 of x are shifted there.
  const __m256i bit4 = _mm256_slli_epi16(x, 3);
  const __m256i bit5 = _mm256_slli_epi16(x, 2);
  const __m256i bit6 = _mm256_slli_epi16(x, 1);
  __m256i found[kRows / 2];
  for (int r = 0; r < 8; ++r) {
    found[r] =
        _mm256_blendv_epi8(_mm256_shuffle_epi8(rows[2 * r], low), _mm256_shuffle_epi8(rows[2 * r + 1], low), bit4);
  }
  for (int r = 0; r < 4; ++r) found[r] = _mm256_blendv_epi8(found[2 * r], found[2 * r + 1], bit5);
  for (int r = 0; r < 2; ++r) found[r] = _mm256_blendv_epi8(found[2 * r], found[2 * r + 1], bit6);
  return _mm256_blendv_epi8(found[0], found[1], x);
}

}  // namespace

void LutAvx2From8To8(const LutArgs& args) {
  const char* x = static_cast<const char*>(args.x);
  char* y = static_cast<char*>(args.y);
  __m256i rows[kRows];
  LoadRows(args.table, rows);
  int64_t i = 0;
  for (; i + kLanes <= args.count; i += kLanes) {
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(y + i), Lookup(rows, codes));
  }
  if (i < args.count) {
    alignas(kLanes) char tail[kLanes] = {};
    const size_t left = static_cast<size_t>(args.count - i);
    std::memcpy(tail, x + i, left);
    __m256i* const both = reinterpret_cast<__m256i*>(tail);
    _mm256_store_si256(both, Lookup(rows, _mm256_load_si256(both)));
    std::memcpy(y + i, tail, left);
  }
}

}  // namespace ortolan
