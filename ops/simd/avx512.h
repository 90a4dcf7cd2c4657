// AVX-512 with VNNI and VBMI (Ice Lake, Zen 4 and later): the vectors of avx512vnni.h with byte permutes. Local to each
// file that includes it.
#pragma once

#include "simd/avx512vnni.h"

namespace ortolan::simd {
namespace {

// One byte for each of 64 positions.
struct PositionTable {
  template <typename At>
  constexpr explicit PositionTable(const At& byte_at) {
    for (int i = 0; i < 64; ++i) at[i] = static_cast<uint8_t>(byte_at(i));
  }
  alignas(64) uint8_t at[64] = {};
};
constexpr PositionTable kPositions([](int i) { return i; });
// The low bytes of 64 words in two registers.
constexpr PositionTable kLowBytes([](int i) { return 2 * i; });
// Bytes r of 16 quads: byte 16 r + i is byte r of quad i.
constexpr PositionTable kRowsOfQuads([](int i) { return i % 16 * 4 + i / 16; });
// Quads from four contiguous rows of 16 bytes: byte 4 i + r is byte i of row r. For rows of 32 bytes, two halves.
constexpr PositionTable kQuadsOfRows16([](int i) { return i % 4 * 16 + i / 4; });
constexpr PositionTable kLowQuadsOfRows32([](int i) { return i % 4 * 32 + i / 4; });
constexpr PositionTable kHighQuadsOfRows32([](int i) { return i % 4 * 32 + 16 + i / 4; });

struct avx512 : avx512vnni {
  // Lists of bits.
  static int64_t ListBits(uint64_t bits, uint8_t first, uint8_t* list) {
    const __m512i positions =
        _mm512_add_epi8(_mm512_load_si512(kPositions.at), _mm512_set1_epi8(static_cast<char>(first)));
    _mm512_storeu_si512(list, _mm512_maskz_compress_epi8(bits, positions));
    return __builtin_popcountll(bits);
  }
  static int64_t ListBits(uint64_t bits, uint16_t first, uint16_t* list) {
    const int64_t found = __builtin_popcountll(bits);
    const __m512i base = _mm512_set1_epi16(static_cast<int16_t>(first));
    const __m512i positions = _mm512_maskz_compress_epi8(bits, _mm512_load_si512(kPositions.at));
    const auto store = [base](uint16_t* to, __m256i half) {
      _mm512_storeu_si512(to, _mm512_add_epi16(base, _mm512_cvtepu8_epi16(half)));
    };
    store(list, _mm512_castsi512_si256(positions));
    if (found > 32) store(list + 32, _mm512_extracti64x4_epi64(positions, 1));
    return found;
  }

  // Bytes.
  //
  // Expands in place by inline assembly. On Zen 5, vpexpand waits for the old value of its destination even with {z},
  // and on Zen 4 its memory form is slow. Expanding the register that was just loaded avoids both.
  static __m512i ExpandBytes(uint64_t mask, const uint8_t* stored, int) {
    __m512i row = _mm512_loadu_si512(stored);
    __asm__("vpexpandb %0, %0%{%1%}%{z%}" : "+v"(row) : "Yk"(_cvtu64_mask64(mask)));
    return row;
  }
  static __m512i ExpandWords(uint64_t mask, const uint8_t* stored, int) {
    __m512i row = _mm512_loadu_si512(stored);
    __asm__("vpexpandw %0, %0%{%1%}%{z%}" : "+v"(row) : "Yk"(_cvtu32_mask32(static_cast<uint32_t>(mask))));
    return row;
  }
  // Not in place: the destination provides the fill, so the dependency on it is real.
  static __m512i ExpandBytesElse(int fill, uint64_t mask, const uint8_t* stored, int) {
    __m512i row = SetBytes(fill);
    __asm__("vpexpandb %2, %0%{%1%}" : "+v"(row) : "Yk"(_cvtu64_mask64(mask)), "v"(_mm512_loadu_si512(stored)));
    return row;
  }

  // Rows of bytes.
  template <int kVectors>
  static void InterleaveRows(const uint8_t* const (&rows)[4], __m512i (&quads)[kVectors]) {
    if constexpr (kVectors == 4) {
      avx512vnni::InterleaveRows(rows, quads);
    } else if constexpr (kVectors == 2) {
      const auto two = [&](int i) { return Halves(Load256(rows[i]), Load256(rows[i + 1])); };
      const __m512i a = two(0), b = two(2);
      quads[0] = _mm512_permutex2var_epi8(a, _mm512_load_si512(kLowQuadsOfRows32.at), b);
      quads[1] = _mm512_permutex2var_epi8(a, _mm512_load_si512(kHighQuadsOfRows32.at), b);
    } else {
      const auto two = [&](int i) {
        return _mm256_inserti128_si256(_mm256_castsi128_si256(Load128(rows[i])), Load128(rows[i + 1]), 1);
      };
      const __m512i all = Halves(two(0), two(2));
      quads[0] = _mm512_permutexvar_epi8(_mm512_load_si512(kQuadsOfRows16.at), all);
    }
  }
  template <int kVectors>
  static void DeinterleaveRows(const __m512i (&quads)[kVectors], __m512i (&rows)[kVectors]) {
    if constexpr (kVectors == 4) {
      avx512vnni::DeinterleaveRows(quads, rows);
    } else {
      const __m512i order = _mm512_load_si512(kRowsOfQuads.at);
      const __m512i a = _mm512_permutexvar_epi8(order, quads[0]);
      if constexpr (kVectors == 1) {
        rows[0] = a;
      } else {
        const __m512i b = _mm512_permutexvar_epi8(order, quads[1]);
        rows[0] = _mm512_permutex2var_epi64(a, _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), b);
        rows[1] = _mm512_permutex2var_epi64(a, _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15), b);
      }
    }
  }

  // Registers of quads.
  static __m512i LoadSomeQuads(const int8_t* from, int64_t left) {
    return left >= 16 ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi32(SomeLanes(left), from);
  }
  static __m512i PermuteQuads(__m512i quads, __m512i order) { return _mm512_permutexvar_epi32(order, quads); }
  static __m512i SumsOfQuarters(__m512i a, __m512i b, __m512i c, __m512i d) {
    const auto halves = [](__m512i one, __m512i other) {
      return _mm512_add_epi32(_mm512_shuffle_i32x4(one, other, 0x44), _mm512_shuffle_i32x4(one, other, 0xee));
    };
    const __m512i ab = halves(a, b), cd = halves(c, d);
    return _mm512_add_epi32(_mm512_shuffle_i32x4(ab, cd, 0x88), _mm512_shuffle_i32x4(ab, cd, 0xdd));
  }

  // Tables.
  struct ByteTable {
    __m512i parts[4];
    explicit ByteTable(const uint8_t* entries) {
      for (int i = 0; i < 4; ++i) parts[i] = _mm512_loadu_si512(entries + 64 * i);
    }
  };
  static __m512i Lookup256(const ByteTable& table, __m512i bytes) {
    return _mm512_mask_blend_epi8(_mm512_movepi8_mask(bytes),
                                  _mm512_permutex2var_epi8(table.parts[0], bytes, table.parts[1]),
                                  _mm512_permutex2var_epi8(table.parts[2], bytes, table.parts[3]));
  }

  // Bytes are gathered from registers of 128 bytes, from the first index to the last.
  static constexpr bool kGathersBytes = true;
  template <int kRows>
  [[gnu::always_inline]] static void GatherBytes(const uint8_t* x, int64_t row_bytes, const uint8_t* indices,
                                                 int64_t quads, __m512i (&found)[kRows]) {
    __m512i words[2];
    if (quads == 16) {
      words[0] = _mm512_loadu_si512(indices);
      words[1] = _mm512_loadu_si512(indices + 64);
    } else {
      const uint64_t some = (uint64_t{1} << (4 * quads)) - 1;
      words[0] = _mm512_maskz_loadu_epi16(static_cast<__mmask32>(some), indices);
      words[1] = _mm512_maskz_loadu_epi16(static_cast<__mmask32>(some >> 32), indices + 64);
    }
    const __m512i low_bytes = _mm512_load_si512(kLowBytes.at);
    const __m512i index = _mm512_permutex2var_epi8(words[0], low_bytes, words[1]);  // the lowest 7 bits select the byte
    const __m512i register_of =  // the lowest 8 bits hold the number of its register
        _mm512_permutex2var_epi8(_mm512_srli_epi16(words[0], 7), low_bytes, _mm512_srli_epi16(words[1], 7));
    for (int i = 0; i < kRows; ++i) found[i] = index;
    const auto register_at = [&](int64_t i) {
      uint16_t at;
      __builtin_memcpy(&at, indices + 2 * i, sizeof(at));
      return static_cast<int64_t>(at) >> 7;
    };
    int64_t at = register_at(0);
    const int64_t last = register_at(4 * quads - 1);
    __m512i here_of = _mm512_set1_epi8(static_cast<char>(at));
    const auto look_up = [&](int64_t end, __mmask64 among) __attribute__((always_inline)) {
      for (; at <= end; ++at, here_of = _mm512_add_epi8(here_of, _mm512_set1_epi8(1))) {
        const __mmask64 here = _mm512_mask_cmpeq_epi8_mask(among, register_of, here_of);
#pragma GCC unroll 4
        for (int i = 0; i < kRows; ++i) {
          const uint8_t* from = x + i * row_bytes + at * 128;
          found[i] = _mm512_mask2_permutex2var_epi8(LoadBytes(from), found[i], here, LoadBytes(from + 64));
        }
      }
    };
    if (__builtin_expect(last < 256, 1)) return look_up(last, ~__mmask64{0});
    const __mmask64 upper = _mm512_kunpackd(_mm512_movepi16_mask(words[1]), _mm512_movepi16_mask(words[0]));
    look_up(255, ~upper);
    look_up(last, upper);
  }
};

}  // namespace
}  // namespace ortolan::simd
