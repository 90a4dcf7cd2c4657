// AVX-512 VBMI: a table of 256 bytes is four registers, which two vpermi2b and a blend look up 64 bytes in. Wider
// entries are looked up byte by byte, in a table for each of their bytes, and put together by unpacks.
#include <immintrin.h>

#include "lut_post_op/lut_post_op.h"

namespace ortolan {
namespace {

constexpr int64_t kLanes = 64;

struct ByteTable {
  __m512i entries[4];

  void Load(const uint8_t* table) {
    for (int i = 0; i < 4; ++i) entries[i] = _mm512_loadu_si512(table + 64 * i);
  }
  __m512i operator[](__m512i x) const {
    const __m512i low = _mm512_permutex2var_epi8(entries[0], x, entries[1]);
    const __m512i high = _mm512_permutex2var_epi8(entries[2], x, entries[3]);
    return _mm512_mask_blend_epi8(_mm512_movepi8_mask(x), low, high);
  }
};

// Entries of one byte.
struct Bytes {
  static constexpr int kVectors = 1;  // of y that one of x makes
  ByteTable table;

  explicit Bytes(const uint8_t* entries) { table.Load(entries); }
  void Lookup(__m512i x, __m512i* y) const { y[0] = table[x]; }
};

// Entries of two bytes.
struct Halves {
  static constexpr int kVectors = 2;
  ByteTable low, high;

  explicit Halves(const uint8_t* entries) {
    alignas(64) uint8_t bytes[2][256];
    for (int i = 0; i < 256; i += 16) {
      const __m256i of_16 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(entries + 2 * i));
      _mm_store_si128(reinterpret_cast<__m128i*>(bytes[0] + i), _mm256_cvtepi16_epi8(of_16));
      _mm_store_si128(reinterpret_cast<__m128i*>(bytes[1] + i), _mm256_cvtepi16_epi8(_mm256_srli_epi16(of_16, 8)));
    }
    low.Load(bytes[0]);
    high.Load(bytes[1]);
  }
  void Lookup(__m512i x, __m512i* y) const {
    // Unpacks take 8 bytes of each 128-bit lane: first those of quarters 0 to 3, then 4 to 7.
    const __m512i in_order = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), x);
    const __m512i byte0 = low[in_order];
    const __m512i byte1 = high[in_order];
    y[0] = _mm512_unpacklo_epi8(byte0, byte1);
    y[1] = _mm512_unpackhi_epi8(byte0, byte1);
  }
};

// Entries of four bytes.
struct Words {
  static constexpr int kVectors = 4;
  ByteTable tables[4];

  explicit Words(const uint8_t* entries) {
    alignas(64) uint8_t bytes[4][256];
    for (int i = 0; i < 256; i += 16) {
      const __m512i of_16 = _mm512_loadu_si512(entries + 4 * i);
      for (int b = 0; b < 4; ++b) {
        const __m512i shifted = _mm512_srl_epi32(of_16, _mm_cvtsi32_si128(8 * b));
        _mm_store_si128(reinterpret_cast<__m128i*>(bytes[b] + i), _mm512_cvtepi32_epi8(shifted));
      }
    }
    for (int b = 0; b < 4; ++b) tables[b].Load(bytes[b]);
  }
  void Lookup(__m512i x, __m512i* y) const {
    // Two unpacks leave four bytes of each 128-bit lane together: x is dealt to the lanes four bytes at a time.
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i in_order = _mm512_permutexvar_epi32(order, x);
    const __m512i byte0 = tables[0][in_order];
    const __m512i byte1 = tables[1][in_order];
    const __m512i byte2 = tables[2][in_order];
    const __m512i byte3 = tables[3][in_order];
    const __m512i first01 = _mm512_unpacklo_epi8(byte0, byte1);
    const __m512i last01 = _mm512_unpackhi_epi8(byte0, byte1);
    const __m512i first23 = _mm512_unpacklo_epi8(byte2, byte3);
    const __m512i last23 = _mm512_unpackhi_epi8(byte2, byte3);
    y[0] = _mm512_unpacklo_epi16(first01, first23);
    y[1] = _mm512_unpackhi_epi16(first01, first23);
    y[2] = _mm512_unpacklo_epi16(last01, last23);
    y[3] = _mm512_unpackhi_epi16(last01, last23);
  }
};

__mmask64 FirstBytes(int64_t count) {
  return count >= kLanes ? ~__mmask64{0} : count <= 0 ? __mmask64{0} : (__mmask64{1} << count) - 1;
}

template <typename Entries>
void Run(const LutArgs& args) {
  const char* x = static_cast<const char*>(args.x);
  char* y = static_cast<char*>(args.y);
  const Entries entries(static_cast<const uint8_t*>(args.table));
  __m512i found[Entries::kVectors];
  int64_t i = 0;
  for (; i + kLanes <= args.count; i += kLanes, y += kLanes * Entries::kVectors) {
    entries.Lookup(_mm512_loadu_si512(x + i), found);
    for (int v = 0; v < Entries::kVectors; ++v) _mm512_storeu_si512(y + kLanes * v, found[v]);
  }
  const int64_t left = args.count - i;
  if (left == 0) return;
  entries.Lookup(_mm512_maskz_loadu_epi8(FirstBytes(left), x + i), found);
  for (int v = 0; v < Entries::kVectors; ++v) {
    _mm512_mask_storeu_epi8(y + kLanes * v, FirstBytes(left * Entries::kVectors - kLanes * v), found[v]);
  }
}

}  // namespace

void LutAvx512From8To8(const LutArgs& args) { Run<Bytes>(args); }
void LutAvx512From8To16(const LutArgs& args) { Run<Halves>(args); }
void LutAvx512From8To32(const LutArgs& args) { Run<Words>(args); }

}  // namespace ortolan
