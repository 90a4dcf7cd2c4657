// The matrix products of attention with AMX tiles. Included only by attention_tiles_kernels.cc.
//
//     scores   [keys][rows]  = bias + K [keys][units of head_dim]  Q [units of head_dim][rows]
//     out      [d][rows]     = out + V^T [d][units of keys]        P [units of keys][rows]
//
// Queries, weights and keys are already in tile order, because a unit is a pair of bf16 and the lanes are rows. Only
// values must be transposed to become A tiles, so out is transposed too.
#pragma once

#include <cstdint>

#include "attention/attention_units.h"
#include "simd/amx_tiles.h"

namespace ortolan {
namespace {

// A tile of sums is kTileUnits x kTileUnits floats; one tile instruction consumes kTileUnits pairs of bf16.
static_assert(kTileUnits == kMaxTileRows && kTileUnits * static_cast<int64_t>(sizeof(float)) == kMaxTileColsb);

// Tiles 0 to 3 hold sums [tile of A][tile of B], 4 and 5 tiles of A, 6 and 7 tiles of B.
inline void ConfigureAttentionTiles() {
  TileConfig config;
  for (int tile = 0; tile < kTiles; ++tile) config.Set(tile, kMaxTileRows, kMaxTileColsb);
  LoadTileConfig(config);
}

// A matrix of 32-bit elements (floats or bf16 pairs); the stride counts elements.
struct TileMatrix {
  float* data;
  int64_t stride;

  template <int kTile>
  void Load(int64_t row, int64_t column) const {
    TileLoad<kTile>(data + row * stride + column, stride * static_cast<int64_t>(sizeof(float)));
  }
  template <int kTile>
  void Store(int64_t row, int64_t column) const {
    TileStore<kTile>(data + row * stride + column, stride * static_cast<int64_t>(sizeof(float)));
  }
};

// Computes kA x kB tiles of C = A B (kFirst) or C += A B.
template <bool kFirst, int kA, int kB>
void MultiplyTile(const TileMatrix& a, const TileMatrix& b, const TileMatrix& c, int64_t row, int64_t column,
                  int64_t units) {
  const auto begin = [&]<int kTile>(int64_t down, int64_t right) {
    if constexpr (kFirst) {
      TileZero<kTile>();
    } else {
      c.template Load<kTile>(row + down, column + right);
    }
  };
  begin.template operator()<0>(0, 0);
  if constexpr (kB > 1) begin.template operator()<1>(0, kTileUnits);
  if constexpr (kA > 1) begin.template operator()<2>(kTileUnits, 0);
  if constexpr (kA > 1 && kB > 1) begin.template operator()<3>(kTileUnits, kTileUnits);
  for (int64_t unit = 0; unit < units; unit += kTileUnits) {
    a.Load<4>(row, unit);
    b.Load<6>(unit, column);
    TileDpBf16<0, 4, 6>();
    if constexpr (kB > 1) {
      b.Load<7>(unit, column + kTileUnits);
      TileDpBf16<1, 4, 7>();
    }
    if constexpr (kA > 1) {
      a.Load<5>(row + kTileUnits, unit);
      TileDpBf16<2, 5, 6>();
      if constexpr (kB > 1) TileDpBf16<3, 5, 7>();
    }
  }
  c.Store<0>(row, column);
  if constexpr (kB > 1) c.Store<1>(row, column + kTileUnits);
  if constexpr (kA > 1) c.Store<2>(row + kTileUnits, column);
  if constexpr (kA > 1 && kB > 1) c.Store<3>(row + kTileUnits, column + kTileUnits);
}

// Units multiplied with AMX tiles. Order of sums: attention.h.
template <typename Simd>
struct TileUnits : Bf16Units<Simd> {
  static constexpr bool kInTiles = true;

  // Called around all products.
  static void StartTiles() { ConfigureAttentionTiles(); }
  static void EndTiles() { TileRelease(); }

  // C [rows][columns] = A B (kFirst) or C += A B. rows, columns and units are rounded up to full tiles.
  template <bool kFirst>
  static void MultiplyTiles(const TileMatrix& a, const TileMatrix& b, const TileMatrix& c, int64_t rows,
                            int64_t columns, int64_t units) {
    for (int64_t row = 0; row < rows; row += 2 * kTileUnits) {
      for (int64_t column = 0; column < columns; column += 2 * kTileUnits) {
        const bool two_down = row + kTileUnits < rows, two_right = column + kTileUnits < columns;
        if (two_down && two_right) {
          MultiplyTile<kFirst, 2, 2>(a, b, c, row, column, units);
        } else if (two_down) {
          MultiplyTile<kFirst, 2, 1>(a, b, c, row, column, units);
        } else if (two_right) {
          MultiplyTile<kFirst, 1, 2>(a, b, c, row, column, units);
        } else {
          MultiplyTile<kFirst, 1, 1>(a, b, c, row, column, units);
        }
      }
    }
  }
};

}  // namespace
}  // namespace ortolan
