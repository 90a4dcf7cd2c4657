// AMX tile instructions as inline assembly. Included by files of the target amx only: local to each.
//
// Not the compiler's intrinsics, because gcc's do not say that they read and write memory, and it deletes stores that
// only a tile load or a tile configuration reads (12.2; fewer in 14 and 15). Here all of memory is up to date before an
// instruction that reads it, and is read again after one that writes it. No compiler flag is needed, the assembler must
// know AMX (binutils 2.36).
//
// Tiles. A thread has eight, of up to 16 rows of 64 bytes. TileConfig gives each its rows and its colsb (bytes in a
// row: at most 64, a multiple of 4). A loaded or stored tile is `rows` rows of `colsb` bytes, `stride` bytes from one
// to the next; the wrappers touch no byte outside them.
//
// Products: C += A B, with a K of as many pairs (bf16) or quads (int8) as B has rows:
//
//     C  m x n   float or int32     rows m,  colsb 4 n
//     A  m x K   pairs or quads     rows m,  colsb 4 K
//     B  K x n   pairs or quads     rows K,  colsb 4 n     element n of row k: B[2k][n], B[2k+1][n] (bf16)
//
// C, A and B must be three different tiles, and m, n, K at most 16. Other shapes, unconfigured tiles and invalid
// configurations are faults of the CPU: they end the process.
//
// Usage: once per call of a kernel, LoadTileConfig (it zeroes all tiles and takes long), then the work, and TileRelease
// on every way out: nothing here is RAII. A thread that keeps tiles configured makes every switch to it slower.
#pragma once

#include <cstdint>

namespace ortolan {
namespace {

constexpr int kTiles = 8;
constexpr int kMaxTileRows = 16;
constexpr int kMaxTileColsb = 64;

// What LDTILECFG reads. A tile that is not Set stays unusable.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t colsb[16] = {};  // of tiles 0 … 7, then zeros
  uint8_t rows[16] = {};    // likewise

  // 1 to 16 rows of 4 to 64 bytes.
  constexpr TileConfig& Set(int tile, int tile_rows, int tile_colsb) {
    rows[tile] = static_cast<uint8_t>(tile_rows);
    colsb[tile] = static_cast<uint16_t>(tile_colsb);
    return *this;
  }
};
static_assert(sizeof(TileConfig) == 64);

inline void LoadTileConfig(const TileConfig& config) { __asm__ volatile("ldtilecfg %0" : : "m"(config) : "memory"); }

// Back to the state before LoadTileConfig. Harmless when nothing is configured.
inline void TileRelease() { __asm__ volatile("tilerelease" : : : "memory"); }

template <int kTile>
inline void TileZero() {
  static_assert(0 <= kTile && kTile < kTiles);
  __asm__ volatile("tilezero %%tmm%c0" : : "i"(kTile));
}

template <int kTile>
inline void TileLoad(const void* base, int64_t stride) {
  static_assert(0 <= kTile && kTile < kTiles);
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(base), "r"(stride), "i"(kTile) : "memory");
}

template <int kTile>
inline void TileStore(void* base, int64_t stride) {
  static_assert(0 <= kTile && kTile < kTiles);
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(base), "r"(stride), "i"(kTile) : "memory");
}

template <int kC, int kA, int kB>
constexpr bool AreProductTiles() {
  return 0 <= kC && kC < kTiles && 0 <= kA && kA < kTiles && 0 <= kB && kB < kTiles && kC != kA && kC != kB && kA != kB;
}

// Asks for the lines of a full tile whose rows lie one behind the other.
inline void PrefetchTile(const void* base) {
  for (int row = 0; row < kMaxTileRows; ++row) {
    __builtin_prefetch(static_cast<const char*>(base) + row * kMaxTileColsb);
  }
}

// float C += bf16 A x bf16 B. For each element, one chain of fused multiply-adds over the even k and one over the odd
// k, both from +0; C + (even + odd). Rounded to nearest even; denormals are zero, read and written, whatever MXCSR
// says.
template <int kC, int kA, int kB>
inline void TileDpBf16() {
  static_assert(AreProductTiles<kC, kA, kB>());
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}

// int32 C += int8 A x int8 B, modulo 2^32.
template <int kC, int kA, int kB>
inline void TileDpBssd() {
  static_assert(AreProductTiles<kC, kA, kB>());
  __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}

}  // namespace
}  // namespace ortolan
