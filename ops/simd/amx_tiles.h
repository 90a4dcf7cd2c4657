// AMX tile instructions as inline assembly. Included by files of the target amx only; everything is local to each.
//
// The compiler's intrinsics are not used: gcc's do not declare that they read and write memory, so it deletes stores
// that only a tile load or a tile configuration reads (12.2; fewer in 14 and 15). These wrappers write all memory
// before an instruction that reads it and reload it after one that writes it. They need no compiler flag, only an
// assembler that knows AMX (binutils 2.36).
//
// A thread has eight tiles of up to 16 rows of 64 bytes. TileConfig sets `rows` and `colsb` of each (bytes per row: at
// most 64, a multiple of 4). A load or store moves `rows` rows of `colsb` bytes, `stride` bytes apart, and touches no
// other byte.
//
// Products: C += A B, where B has K rows of pairs (bf16) or quads (int8) of inputs:
//
//     C  m x n   float or int32     rows m,  colsb 4 n
//     A  m x K   pairs or quads     rows m,  colsb 4 K
//     B  K x n   pairs or quads     rows K,  colsb 4 n     element n of row k: B[2k][n], B[2k+1][n] (bf16)
//
// C, A and B must be three different tiles, with m, n and K at most 16. Other shapes, unconfigured tiles and invalid
// configurations raise a CPU fault, which ends the process.
//
// Usage: call LoadTileConfig once per kernel call (it zeroes all tiles and is slow), do the work, and call TileRelease
// on every path out. Nothing here is RAII. A thread that leaves tiles configured makes every switch to it slower.
#pragma once

#include <cstdint>

namespace ortolan {
namespace {

constexpr int kTiles = 8;
constexpr int kMaxTileRows = 16;
constexpr int kMaxTileColsb = 64;

// The operand of LDTILECFG. A tile that was not Set cannot be used.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t colsb[16] = {};  // tiles 0 … 7, then zeros
  uint8_t rows[16] = {};    // tiles 0 … 7, then zeros

  // Requires 1 to 16 rows of 4 to 64 bytes.
  constexpr TileConfig& Set(int tile, int tile_rows, int tile_colsb) {
    rows[tile] = static_cast<uint8_t>(tile_rows);
    colsb[tile] = static_cast<uint16_t>(tile_colsb);
    return *this;
  }
};
static_assert(sizeof(TileConfig) == 64);

inline void LoadTileConfig(const TileConfig& config) { __asm__ volatile("ldtilecfg %0" : : "m"(config) : "memory"); }

// Return to the state before LoadTileConfig. Harmless if no tile is configured.
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

// Prefetch the lines of a full tile with contiguous rows.
inline void PrefetchTile(const void* base) {
  for (int row = 0; row < kMaxTileRows; ++row) {
    __builtin_prefetch(static_cast<const char*>(base) + row * kMaxTileColsb);
  }
}

// float C += bf16 A x bf16 B. Each element is C + (even + odd), where `even` is a chain of fused multiply-adds over
// even k from +0, and `odd` one over odd k. Rounds to nearest even; denormal inputs and results are zero regardless of
// MXCSR.
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

// int32 C += int8 A x uint8 B, modulo 2^32.
template <int kC, int kA, int kB>
inline void TileDpBsud() {
  static_assert(AreProductTiles<kC, kA, kB>());
  __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}

}  // namespace
}  // namespace ortolan
