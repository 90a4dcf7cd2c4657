// AMX: weights are expanded to AMX's B tiles in a buffer, then multiplied tile by tile (SparAMX, sections 4.1 and 4.3).
// In dense storage of bf16 and int8 they are B tiles already, and are loaded from where they are stored.
//
// Two tiles of 16 rows of x times two panels make four tiles of sums, so that each loaded tile is used twice. A block
// of weights is expanded as a whole before the first of its tiles is loaded: there is no store forwarding into a tile
// load, so a tile loaded right after its rows were stored would wait for them to reach the cache.
#include <immintrin.h>

#include "matmul/amx_int8.h"
#include "simd/amx_tiles.h"
#include "sparse_amx_matmul/avx512_bf16.h"
#include "sparse_amx_matmul/sparse_int8_format.h"

namespace ortolan {
namespace {

constexpr int kPanelBlock = 2;
constexpr int64_t kRowTile = kAmxRowTile;
// 16 tiles of two panels: 32 KB.
constexpr int64_t kBlockTiles = 16;
constexpr int64_t kSumsStride = kPanelColumns * sizeof(float);
constexpr int64_t kPrefetchBytes = 12288;

// Tiles 0 to 3 sums [row tile][panel], 4 and 5 rows of x, 6 and 7 weights: all of full size.
constexpr TileConfig kConfig = [] {
  TileConfig config;
  for (int tile = 0; tile < kTiles; ++tile) config.Set(tile, kMaxTileRows, kMaxTileColsb);
  return config;
}();

struct alignas(64) Sums {
  float at[kRowTile][kPanelColumns];
};

// The panels that are multiplied together, a block of their tiles, and where y takes their sums.
struct PanelPair {
  PanelPair(const MatMulArgs& a, int64_t first, int count_)
      : args(a), first_panel(first), count(count_), tiles(BitmapTiles(a.w->k)), padded_k(BitmapPaddedK(a.w->k)) {
    const BitmapView& view = WeightOf<BitmapWeight>(a).view;
    for (int p = 0; p < count; ++p) {
      masks[p] = view.PanelMasks(kBf16Bitmap, first + p);
      values[p] = view.PanelValues(kBf16Bitmap, first + p);
      columns[p] = static_cast<int>(
          a.w->n - (first + p) * kPanelColumns < kPanelColumns ? a.w->n - (first + p) * kPanelColumns : kPanelColumns);
      const float* from = a.bias == nullptr ? nullptr : a.bias + (first + p) * kPanelColumns;
      for (int c = 0; c < kPanelColumns; ++c) bias[p][c] = from != nullptr && c < columns[p] ? from[c] : 0.0f;
    }
  }

  float* Y(int64_t row, int p) const { return args.Y(row, first_panel + p); }
  // Whether the sums of this tile may be loaded from and stored to y as they are.
  bool IsWhole(int64_t row, int p) const { return columns[p] == kPanelColumns && args.m - row >= kRowTile; }

  const MatMulArgs& args;
  int64_t first_panel;
  int count;
  int64_t tiles;
  int64_t padded_k;
  const uint8_t* masks[kPanelBlock] = {};
  const uint8_t* values[kPanelBlock] = {};  // move along from block to block
  const uint8_t* block[kPanelBlock] = {};   // the tiles to multiply: in expanded, or where they are stored
  int columns[kPanelBlock] = {};
  alignas(64) float bias[kPanelBlock][kPanelColumns] = {};
  alignas(64) uint8_t expanded[kPanelBlock][kBlockTiles][kTileBytes];
};

void ExpandBlock(PanelPair& pair, int64_t first_tile, int64_t tiles) {
  for (int p = 0; p < pair.count; ++p) {
    const uint8_t* values = pair.values[p];
    for (int64_t t = 0; t < tiles; ++t) {
      const uint8_t* masks = pair.masks[p] + (first_tile + t) * kTileMaskBytes;
      uint8_t* to = pair.expanded[p][t];
      __builtin_prefetch(masks + kPrefetchBytes);
      for (int row = 0; row < kTileRows; ++row) {
        uint32_t mask;
        __builtin_memcpy(&mask, masks + row * static_cast<int>(sizeof(mask)), sizeof(mask));
        __builtin_prefetch(values + kPrefetchBytes);
        _mm512_store_si512(to + row * kMaxTileColsb, ExpandBf16(mask, values));
        values += __builtin_popcount(mask) * kValueBytes;
      }
    }
    pair.values[p] = values;
    pair.block[p] = pair.expanded[p][0];
  }
}

void FindDenseBlock(PanelPair& pair, int64_t tiles) {
  for (int p = 0; p < pair.count; ++p) {
    pair.block[p] = pair.values[p];
    pair.values[p] += tiles * kTileBytes;
  }
}

template <int kTile>
void LoadSums(const PanelPair& pair, int64_t row, int p, bool first) {
  if (first) {
    TileLoad<kTile>(pair.bias[p], 0);  // the same 16 floats for every row
  } else if (pair.IsWhole(row, p)) {
    TileLoad<kTile>(pair.Y(row, p), pair.args.y_row_bytes);
  } else {
    Sums sums = {};
    const __mmask16 columns = FirstLanes(pair.columns[p]);
    for (int64_t r = 0; r < kRowTile && row + r < pair.args.m; ++r) {
      _mm512_store_ps(sums.at[r], _mm512_maskz_loadu_ps(columns, pair.Y(row + r, p)));
    }
    TileLoad<kTile>(&sums, kSumsStride);
  }
}

template <int kTile>
void StoreSums(const PanelPair& pair, int64_t row, int p) {
  if (pair.IsWhole(row, p)) {
    TileStore<kTile>(pair.Y(row, p), pair.args.y_row_bytes);
    return;
  }
  Sums sums;
  TileStore<kTile>(&sums, kSumsStride);
  const __mmask16 columns = FirstLanes(pair.columns[p]);
  for (int64_t r = 0; r < kRowTile && row + r < pair.args.m; ++r) {
    _mm512_mask_storeu_ps(pair.Y(row + r, p), columns, _mm512_load_ps(sums.at[r]));
  }
}

// All the tiles of the block times kRowTiles x 16 rows of x.
template <int kRowTiles, int kPanels>
void MultiplyBlock(const PanelPair& pair, int64_t row, int64_t first_tile, int64_t tiles) {
  const bool first = first_tile == 0;
  LoadSums<0>(pair, row, 0, first);
  if constexpr (kPanels > 1) LoadSums<1>(pair, row, 1, first);
  if constexpr (kRowTiles > 1) LoadSums<2>(pair, row + kRowTile, 0, first);
  if constexpr (kRowTiles > 1 && kPanels > 1) LoadSums<3>(pair, row + kRowTile, 1, first);

  const int64_t x_row_bytes = pair.padded_k * static_cast<int64_t>(sizeof(uint16_t));
  const char* x = static_cast<const char*>(pair.args.x) + row * x_row_bytes + first_tile * kMaxTileColsb;
  // Expanded tiles are in the cache; stored ones are fetched while the first rows pass.
  const bool fetch = WeightOf<BitmapWeight>(pair.args).view.IsDense() && row == 0;
  for (int64_t t = 0; t < tiles; ++t, x += kMaxTileColsb) {
    if (fetch) {
      for (int p = 0; p < kPanels; ++p) PrefetchTile(pair.block[p] + t * kTileBytes + kPrefetchBytes);
    }
    TileLoad<4>(x, x_row_bytes);
    TileLoad<6>(pair.block[0] + t * kTileBytes, kMaxTileColsb);
    TileDpBf16<0, 4, 6>();
    if constexpr (kPanels > 1) {
      TileLoad<7>(pair.block[1] + t * kTileBytes, kMaxTileColsb);
      TileDpBf16<1, 4, 7>();
    }
    if constexpr (kRowTiles > 1) {
      TileLoad<5>(x + kRowTile * x_row_bytes, x_row_bytes);
      TileDpBf16<2, 5, 6>();
      if constexpr (kPanels > 1) TileDpBf16<3, 5, 7>();
    }
  }

  StoreSums<0>(pair, row, 0);
  if constexpr (kPanels > 1) StoreSums<1>(pair, row, 1);
  if constexpr (kRowTiles > 1) StoreSums<2>(pair, row + kRowTile, 0);
  if constexpr (kRowTiles > 1 && kPanels > 1) StoreSums<3>(pair, row + kRowTile, 1);
}

template <int kPanels>
void MultiplyPanels(const MatMulArgs& args, int64_t panel) {
  PanelPair pair(args, panel, kPanels);
  for (int64_t tile = 0; tile < pair.tiles; tile += kBlockTiles) {
    const int64_t tiles = pair.tiles - tile < kBlockTiles ? pair.tiles - tile : kBlockTiles;
    if (WeightOf<BitmapWeight>(args).view.IsDense()) {
      FindDenseBlock(pair, tiles);
    } else {
      ExpandBlock(pair, tile, tiles);
    }
    int64_t row = 0;
    for (; row + kRowTile < args.m; row += 2 * kRowTile) MultiplyBlock<2, kPanels>(pair, row, tile, tiles);
    if (row < args.m) MultiplyBlock<1, kPanels>(pair, row, tile, tiles);
  }
}

}  // namespace

namespace amx {

// Row after row; the rows that are missing in the last block of 16 are zero.
void PackBf16(const MatMulWeight& w, const float* x, int64_t x_row_bytes, int64_t m, void* packed) {
  uint8_t* out = static_cast<uint8_t*>(packed);
  const int64_t padded_k = BitmapPaddedK(w.k);
  for (int64_t i = 0; i < m; ++i) {
    const float* row = reinterpret_cast<const float*>(reinterpret_cast<const char*>(x) + i * x_row_bytes);
    for (int64_t l = 0; l < padded_k; l += kTileInputs, out += kMaxTileColsb) {
      _mm512_storeu_si512(out, RoundToBf16(row + l, w.k - l));
    }
  }
  PadAmxRows(packed, m, padded_k * static_cast<int64_t>(sizeof(uint16_t)));
}

void MultiplyBf16(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
  LoadTileConfig(kConfig);
  int64_t panel = panel_begin;
  for (; panel + kPanelBlock <= panel_end; panel += kPanelBlock) MultiplyPanels<kPanelBlock>(args, panel);
  if (panel < panel_end) MultiplyPanels<1>(args, panel);
  TileRelease();
}

void PackInt8(const MatMulWeight& w, const float* x, int64_t x_row_bytes, int64_t m, void* packed) {
  PackQuantizedRows<AmxInt8Simd>(w, x, x_row_bytes, m, packed);
  PadAmxRows(packed, m, static_cast<const BitmapWeight&>(w).QuantizedRowBytes());
}

void PackInt4(const MatMulWeight& w, const float* x, int64_t x_row_bytes, int64_t m, void* packed) {
  PackInt8(w, x, x_row_bytes, m, packed);
}

void MultiplyInt8(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
  WithFormat<8>(args, [&]<typename Format>() { AmxInt8Loop<Format>::Run(args, panel_begin, panel_end); });
}

void MultiplyInt4(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
  WithFormat<4>(args, [&]<typename Format>() { AmxInt8Loop<Format>::Run(args, panel_begin, panel_end); });
}

}  // namespace amx
}  // namespace ortolan
