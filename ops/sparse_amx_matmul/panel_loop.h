// The loop that the x86 kernels for bf16 share: walk the tiles of a panel, expand (dense storage: load) each row of 32
// weights to a register, multiply it with a pair of activations of every row of x. Included by x86_*.cc only;
// everything is local to the including file (an inline function compiled for one ISA tier must never be linked in place
// of another's).
//
// A tier gives a struct Simd with
//     Activation, kRowBlock (rows of x whose accumulators fit the registers)
//     void Round(const float* x, int64_t left, Activation* to)  32 activations, of which `left` or more are x's
//     Weights                                       32 expanded weights, ready to multiply
//     Weights Expand(uint32_t mask, const uint8_t* values)     may load 64 bytes from values
//     Weights Expand(const uint8_t* values)         all 32 are stored, in 64 bytes at any address
//     void Store(Weights, uint8_t*), Weights Load(const uint8_t*), kStoredBytes
//     Accumulator                                   16 columns of sums
//     Accumulator Zero(), Add(Accumulator, Accumulator), LoadColumns(const float*, int columns)
//     void StoreColumns(float*, int columns, Accumulator)
//     Accumulator MultiplyAdd(Accumulator, Weights, const Activation* pair), kMostHeld, Held, …     see activations.h
#pragma once

#include <cstdint>
#include <cstring>

#include "matmul/activations.h"
#include "matmul/bitmap_weight.h"
#include "matmul/panel_output.h"

namespace ortolan {
namespace {

// Packed activations: blocks of kRowBlock rows (the last one may have fewer), in a block of r rows [k-pair /
// 4][r][4][2]: the order of activations.h.
template <typename Simd>
void PackPairs(const float* x, int64_t x_row_bytes, int64_t m, int64_t k, void* packed) {
  using Activation = typename Simd::Activation;
  constexpr int64_t kFourPairs = 8;
  Activation* out = static_cast<Activation*>(packed);
  const int64_t padded_k = BitmapPaddedK(k);
  for (int64_t first = 0; first < m; first += Simd::kRowBlock) {
    const int64_t rows = m - first < Simd::kRowBlock ? m - first : Simd::kRowBlock;
    for (int64_t l = 0; l < padded_k; l += kTileInputs, out += kTileInputs * rows) {
      for (int64_t i = 0; i < rows; ++i) {
        const char* row = reinterpret_cast<const char*>(x) + (first + i) * x_row_bytes;
        alignas(64) Activation rounded[kTileInputs];
        Simd::Round(reinterpret_cast<const float*>(row) + l, k - l, rounded);
        for (int64_t four = 0; four < kTileInputs; four += kFourPairs) {
          std::memcpy(out + four * rows + kFourPairs * i, rounded + four, kFourPairs * sizeof(Activation));
        }
      }
    }
  }
}

template <typename Simd, Storage kStorage>
class PanelLoop {
  using Activation = typename Simd::Activation;
  using Accumulator = typename Simd::Accumulator;
  using Weights = typename Simd::Weights;
  template <int kRows>
  using Pairs = Activations<Simd, Activation, 2, kRows>;
  static constexpr bool kDense = kStorage == Storage::kDense;

 public:
  static void Run(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
    const int64_t row_bytes = BitmapPaddedK(args.w->k) * static_cast<int64_t>(sizeof(Activation));
    for (int64_t row = 0; row < args.m; row += kMostRows) {
      const MatMulArgs part = RowsOf(args, row, kMostRows, row_bytes);
      for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
        Panel p(part, panel);
        if (part.m <= Simd::kRowBlock) {
          WithRowCount<Simd::kRowBlock>(part.m, [&]<int kRows>() { Fused<kRows>(p); });
        } else {
          Buffered(p);
        }
      }
    }
  }

 private:
  // Expanded tiles kept while all rows of x pass over them: half of a 32 KB L1 cache or less.
  static constexpr int64_t kBufferTiles = 16;
  // Rows of x that pass over a panel while their sums wait on the stack (16 KB). More rows expand the panel again.
  static constexpr int64_t kMostRows = 256;
  // How far ahead of the loads the streams are prefetched. Measured: README.md of this room.
  static constexpr int64_t kPrefetchBytes = 12288;
  // Of masks, from one tile to the next.
  static constexpr int64_t kMaskStep = kDense ? 0 : kTileMaskBytes;

  struct Panel {
    Panel(const MatMulArgs& a, int64_t panel)
        : args(a),
          tiles(BitmapTiles(a.w->k)),
          padded_k(BitmapPaddedK(a.w->k)),
          masks(WeightOf<BitmapWeight>(a).view.PanelMasks(kBf16Bitmap, panel)),
          values(WeightOf<BitmapWeight>(a).view.PanelValues(kBf16Bitmap, panel)),
          x(static_cast<const Activation*>(a.x)),
          output(a, panel) {}

    const MatMulArgs& args;
    int64_t tiles;
    int64_t padded_k;
    const uint8_t* masks;
    const uint8_t* values;  // moves along as tiles are expanded
    const Activation* x;
    PanelOutput output;
  };

  // Row `row` of the tile whose masks are given; moves values on to the next row.
  template <bool kPrefetch>
  static Weights NextRow([[maybe_unused]] const uint8_t* masks, [[maybe_unused]] int row, const uint8_t*& values) {
    const uint8_t* from = values;
    if constexpr (kPrefetch) __builtin_prefetch(from + kPrefetchBytes);
    if constexpr (kDense) {
      values += kRowValues * kValueBytes;
      return Simd::Expand(from);
    } else {
      uint32_t mask;
      std::memcpy(&mask, masks + row * static_cast<int>(sizeof(mask)), sizeof(mask));
      values += __builtin_popcount(mask) * kValueBytes;
      return Simd::Expand(mask, from);
    }
  }

  // Few rows of x: each row of weights is expanded into a register and used at once.
  template <int kRows>
  static void Fused(Panel& p) {
    // With few rows, one sum a row would wait for itself: several chains, added at the end.
    constexpr int kChains = kRows == 1 ? 4 : kRows <= 3 ? 2 : 1;
    // Where nothing but one stream without gaps is read, the hardware's own prefetch is better.
    constexpr bool kPrefetch = !kDense || kRows > 1;
    Accumulator sums[kRows][kChains];
    for (int i = 0; i < kRows; ++i) {
      for (int c = 0; c < kChains; ++c) sums[i][c] = Simd::Zero();
    }
    const uint8_t* values = p.values;
    const uint8_t* masks = p.masks;
    const Activation* x = p.x;
    for (int64_t tile = 0; tile < p.tiles; ++tile, masks += kMaskStep, x += kTileInputs * kRows) {
      if constexpr (!kDense) __builtin_prefetch(masks + kPrefetchBytes);
#pragma GCC unroll 4
      for (int four = 0; four < kTileRows; four += kFourRows) {
        const Pairs<kRows> pairs(x + kBf16Bitmap.row_inputs * four * kRows);
#pragma GCC unroll 4
        for (int row = 0; row < kFourRows; ++row) {
          const Weights weights = NextRow<kPrefetch>(masks, four + row, values);
#pragma GCC unroll 16
          for (int i = 0; i < kRows; ++i) {
            sums[i][row % kChains] = pairs.MultiplyAdd(sums[i][row % kChains], weights, row, i);
          }
        }
      }
    }
    for (int i = 0; i < kRows; ++i) {
      Accumulator sum = sums[i][0];
      for (int c = 1; c < kChains; ++c) sum = Simd::Add(sum, sums[i][c]);
      p.output.template Store<Simd>(i, sum);
    }
  }

  struct alignas(64) WaitingSums {
    float at[kMostRows][kPanelColumns];
  };

  // Many rows of x: expand some tiles once, let all rows pass over them, go on with the next tiles. The sums of 16
  // columns wait on the stack: in y they might lie so far apart that all fall into the same few lines of the cache.
  static void Buffered(Panel& p) {
    alignas(64) uint8_t buffer[kBufferTiles * kTileRows * Simd::kStoredBytes];
    WaitingSums waiting;
    for (int64_t tile = 0; tile < p.tiles; tile += kBufferTiles) {
      const int64_t tiles = p.tiles - tile < kBufferTiles ? p.tiles - tile : kBufferTiles;
      uint8_t* out = buffer;
      for (int64_t t = tile; t < tile + tiles; ++t) {
        const uint8_t* masks = p.masks + t * kMaskStep;
        if constexpr (!kDense) __builtin_prefetch(masks + kPrefetchBytes);
        for (int row = 0; row < kTileRows; ++row, out += Simd::kStoredBytes) {
          Simd::Store(NextRow<true>(masks, row, p.values), out);
        }
      }
      int64_t i = 0;
      for (; i + Simd::kRowBlock <= p.args.m; i += Simd::kRowBlock) {
        ExpandedRows<Simd::kRowBlock>(p, buffer, tile, tiles, i, waiting);
      }
      WithRowCount<Simd::kRowBlock - 1>(p.args.m - i,
                                        [&]<int kRows>() { ExpandedRows<kRows>(p, buffer, tile, tiles, i, waiting); });
    }
  }

  template <int kRows>
  static void ExpandedRows(const Panel& p, const uint8_t* buffer, int64_t tile, int64_t tiles, int64_t i,
                           WaitingSums& waiting) {
    Accumulator sums[kRows];
    for (int r = 0; r < kRows; ++r) {
      sums[r] = tile == 0 ? Simd::Zero() : Simd::LoadColumns(waiting.at[i + r], kPanelColumns);
    }
    const Activation* x = p.x + i * p.padded_k + tile * kTileInputs * kRows;
    for (int64_t left = tiles * kTileRows; left > 0; left -= kFourRows, x += Pairs<kRows>::kElements) {
      const Pairs<kRows> pairs(x);
#pragma GCC unroll 4
      for (int row = 0; row < kFourRows; ++row, buffer += Simd::kStoredBytes) {
        const Weights weights = Simd::Load(buffer);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) sums[r] = pairs.MultiplyAdd(sums[r], weights, row, r);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      if (tile + tiles == p.tiles) {
        p.output.template Store<Simd>(i + r, sums[r]);
      } else {
        Simd::StoreColumns(waiting.at[i + r], kPanelColumns, sums[r]);
      }
    }
  }
};

template <typename Simd>
void RunPanelLoop(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
  if (WeightOf<BitmapWeight>(args).view.IsDense()) {
    PanelLoop<Simd, Storage::kDense>::Run(args, panel_begin, panel_end);
  } else {
    PanelLoop<Simd, Storage::kBitmap>::Run(args, panel_begin, panel_end);
  }
}

}  // namespace
}  // namespace ortolan
