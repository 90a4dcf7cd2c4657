// The loop on AMX tiles. Weights are expanded to B tiles in a buffer, then multiplied tile by tile. Dense bf16 and int8
// weights are stored as B tiles and loaded directly. Included by *kernels.cc only; local to each. Reference: SparAMX,
// sections 4.1 and 4.3.
//
// Two tiles of 16 rows of x and two panels make four tiles of sums, so each loaded tile is used twice. A whole block of
// weights is expanded before its first tile is loaded: stores do not forward into tile loads, so loading a tile right
// after its rows were stored would wait until they reach the cache.
//
// With fewer than kManyRows rows, bf16 is multiplied by vectors (few_float_rows.h), in the order of sums of the tiles.
//
// A sum ends with its group, so a tile product covers inputs of one group only. Groups of 32 (int4 bitmaps) use tiles
// of half the depth, and the sums of each group leave the tiles to be scaled. They are scaled after the products of the
// next group are issued: a load right after the store of a tile would wait for it.
//
// A kind of weight provides what panel_loop.h requires, except for vector products, and kStoredTiles: whether its
// stored rows are rows of B tiles.
#pragma once

#include <cstdint>
#include <utility>

#include "matmul/few_float_rows.h"
#include "matmul/group_weight.h"
#include "matmul/panel.h"
#include "simd/amx_tiles.h"
#include "simd/flush_denormals.h"

namespace ortolan {
namespace {

constexpr int64_t kAmxRowTile = 16;
// Panels multiplied together.
constexpr int kAmxPanels = 2;

// Zero the missing rows of the last block of 16 packed rows.
inline void PadAmxRows(void* packed, int64_t m, int64_t row_bytes) {
  const int64_t missing = (kAmxRowTile - m % kAmxRowTile) % kAmxRowTile;
  __builtin_memset(static_cast<char*>(packed) + m * row_bytes, 0, static_cast<size_t>(missing * row_bytes));
}

// Return whether a group fills the depth of a tile. Vectors multiply shorter groups faster
// (../w4a8_matmul/README.md).
inline bool GroupFillsTile(const MatMulWeight& w) {
  return static_cast<const GroupWeight&>(w).view.group >= kMaxTileColsb;
}

// The vectors of a kind of weight on tiles, whose products take signed bytes.
template <typename Simd>
struct WithTiles : Simd {
  static constexpr uint32_t kInt8Bias = 0;
  static constexpr uint32_t kNibbleBias = 0;
};

// Simd: WithTiles of a target.
template <typename Simd, typename Weights>
class AmxLoop {
  using Columns = simd::Columns<Simd>;
  using Floats = typename Columns::Floats;
  using Layer = ortolan::Layer<Weights>;
  using Panel = ortolan::Panel<Simd, Weights>;
  static constexpr bool kGroups = Weights::kHasGroups;
  // bf16: sums are floats and start with the bias.
  static constexpr bool kBf16 = Weights::kRowInputs == 2;

 public:
  static constexpr int kPanelsTogether = kAmxPanels;

  static void Run(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
    if constexpr (kBf16) {
      if (args.m < kManyRows) return RunFewRows(args, panel_begin, panel_end);
    }
    const Layer layer(args);
    const int step_rows = StepRows(layer);
    // Tiles 0 to 3 hold sums [row tile][panel], 4 and 5 rows of x, 6 and 7 weights. The time of a product grows with
    // its rows, so up to two tiles of x have only the rows that there are.
    TileConfig config;
    const bool few = args.m <= 2 * kRows;
    for (int t = 0; t < 2; ++t) {
      const int64_t left = args.m - t * kRows;
      const int rows = few && 0 < left && left < kRows ? static_cast<int>(left) : kMaxTileRows;
      for (int p = 0; p < kAmxPanels; ++p) config.Set(2 * t + p, rows, kMaxTileColsb);
      config.Set(4 + t, rows, 4 * step_rows);
      config.Set(6 + t, step_rows, kMaxTileColsb);
    }
    LoadTileConfig(config);
    for (int64_t row = 0; row < args.m; row += kMostRows) {
      const MatMulArgs part = RowsOf(args, row, kMostRows, layer.row_bytes);
      int64_t panel = panel_begin;
      for (; panel + kAmxPanels <= panel_end; panel += kAmxPanels) Multiply<kAmxPanels>(layer, part, panel);
      if (panel < panel_end) Multiply<1>(layer, part, panel);
    }
    TileRelease();
  }

 private:
  // For few rows vectors are faster. They add in the order of tiles, so a row has the same bits in any batch.
  static void RunFewRows(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
    const ortolan::Layer<typename Weights::TileOrder> layer(args);
    const simd::DenormalRule rule = simd::FlushDenormals();
    MultiplyFewFloatRows<Simd>(layer, args, panel_begin, panel_end);
    simd::RestoreDenormals(rule);
  }

  static constexpr int64_t kRows = kAmxRowTile;
  // Four tiles of two panels, 8 KB: short enough to expand a block while the previous one is multiplied. Holds whole
  // groups.
  static constexpr int64_t kExpandedRows = 4 * kMaxTileRows;
  // 16 tiles of two panels, 32 KB: they stay in the cache for the next rows of x.
  static constexpr int64_t kStoredRows = 16 * kMaxTileRows;
  // Rows whose sums wait on the stack: 32 KB.
  static constexpr int64_t kMostRows = 256;

  // Rows of weights in one product.
  static int StepRows(const Layer& layer) {
    const int64_t group_rows = layer.group_spans * Layer::kSpanRows;
    return kGroups && group_rows < kMaxTileRows ? static_cast<int>(group_rows) : kMaxTileRows;
  }

  // Rows of weights multiplied before the next block. Sums are kept between blocks.
  static int64_t BlockRows(int64_t m, int64_t all_rows) {
    if constexpr (!Weights::kStoredTiles) return kExpandedRows;
    return m <= 2 * kRows ? all_rows : kStoredRows;
  }

  template <int kCount>
  struct Work {
    Work(const Layer& l, const MatMulArgs& args, int64_t first_panel)
        : Work(l, args, first_panel, std::make_integer_sequence<int, kCount>()) {}

    const Layer& layer;
    int64_t m;
    int64_t step_rows;
    int64_t group_rows;
    Panel panels[kCount];
    const uint8_t* block[kCount] = {};  // the rows to multiply: in `expanded`, or where they are stored
    alignas(64) uint8_t expanded[kCount][kExpandedRows][kMaxTileColsb];
    alignas(64) uint8_t waiting[kMostRows][kCount][kMaxTileColsb];  // totals of groups, or sums
    alignas(64) float bias[kCount][kPanelColumns];
    // Sums of the last two groups that left the tiles. The newer ones are not yet in the totals.
    alignas(64) int32_t sums[2][kGroups ? 2 * kRows : 1][kCount][kPanelColumns];
    int newer = 0;
    int64_t unscaled_rows = 0;  // rows of the newer sums, from unscaled_row on
    int64_t unscaled_row = 0;
    int64_t unscaled_group = 0;

   private:
    template <int... p>
    Work(const Layer& l, const MatMulArgs& args, int64_t first_panel, std::integer_sequence<int, p...>)
        : layer(l),
          m(args.m),
          step_rows(StepRows(l)),
          group_rows(l.group_spans * Layer::kSpanRows),
          panels{Panel(l, args, first_panel + p)...} {
      for (int i = 0; i < kCount; ++i) Columns::Store(bias[i], panels[i].output.Bias());
    }
  };

  // The stream is copied to a local variable: otherwise the compiler must assume that a 64-byte store changes what
  // `work` points to.
  template <typename Work>
  static void ExpandBlock(Work& work, int p, int64_t rows) {
    auto stream = work.panels[p].stream;
    uint8_t* to = work.expanded[p][0];
    for (int64_t left = rows; left > 0; left -= Layer::kSpanRows) {
      stream.template StartSpan<Fetch::kExpand>();
#pragma GCC unroll 16
      for (int row = 0; row < Layer::kSpanRows; ++row, to += kMaxTileColsb) {
        Columns::StoreBytes(to, stream.template Next<Fetch::kExpand, false>(row));
      }
      stream.EndSpan();
    }
    work.panels[p].stream.MoveTo(stream);
    work.block[p] = work.expanded[p][0];
  }

  template <typename Work>
  static void FindBlock(Work& work, int p, int64_t rows) {
    if constexpr (Weights::kStoredTiles) {
      work.block[p] = work.panels[p].stream.values;
      work.panels[p].stream.values += rows * kMaxTileColsb;
    } else {
      ExpandBlock(work, p, rows);
    }
  }

  template <int kTile, typename Work>
  static void StartSums(const Work& work, int64_t row, int p, bool first) {
    if (!kGroups && !first) {
      TileLoad<kTile>(work.waiting[row][p], sizeof(work.waiting[0]));
    } else if constexpr (kBf16) {
      TileLoad<kTile>(work.bias[p], 0);  // the same 16 floats for every row
    } else {
      TileZero<kTile>();
    }
  }

  template <int kC, int kA, int kB>
  static void Product() {
    if constexpr (kBf16) {
      TileDpBf16<kC, kA, kB>();
    } else {
      TileDpBssd<kC, kA, kB>();
    }
  }

  // Keep the sums of a row tile in `waiting` or, of a group, in `sums`.
  template <int kTile, typename Work>
  static void EndSums(Work& work, int64_t row, int row_tile, int p) {
    if constexpr (!kGroups) {
      TileStore<kTile>(work.waiting[row + row_tile * kRows][p], sizeof(work.waiting[0]));
    } else {
      TileStore<kTile>(work.sums[work.newer][row_tile * kRows][p], sizeof(work.sums[0][0]));
    }
  }

  // Add the newer sums, scaled, to the totals.
  template <int kCount>
  static void AddGroup(Work<kCount>& work) {
    const int64_t group = work.unscaled_group;
    const int32_t (*sums)[kCount][kPanelColumns] = work.sums[work.newer];
    const auto add = [&]<int... p>(std::integer_sequence<int, p...>) {
      const decltype(work.panels[0].scales.Of(group)) scales[] = {work.panels[p].scales.Of(group)...};
      for (int64_t r = 0; r < work.unscaled_rows; ++r) {
        const auto terms = work.panels[0].template RowTermsOf<1>(work.unscaled_row + r);
        const auto add_panel = [&](int i) {
          float* total = reinterpret_cast<float*>(work.waiting[work.unscaled_row + r][i]);
          const Floats before = group == 0 ? Columns::Set(0.0f) : Columns::Load(total);
          Columns::Store(total, terms.Add(before, Weights::LoadSums(sums[r][i]), scales[i], group, 0));
        };
        (add_panel(p), ...);
      }
    };
    add(std::make_integer_sequence<int, kCount>());
    work.unscaled_rows = 0;
  }

  // Prefetch the tiles that will be multiplied next; past the end of a panel, those of the next panels.
  template <int kCount>
  static void PrefetchTiles(const Work<kCount>& work, int64_t row, int64_t row_of_block) {
    const int64_t panel_bytes = work.layer.spans * Layer::kSpanRows * kMaxTileColsb;
    int64_t ahead = work.layer.ahead.weight_blocks;
    if (row * kMaxTileColsb + ahead >= panel_bytes) ahead += (kCount - 1) * panel_bytes;
    for (int p = 0; p < kCount; ++p) PrefetchTile(work.block[p] + row_of_block * kMaxTileColsb + ahead);
  }

  // Multiply rows first … first+rows-1 of the block, which belong to one group, with kRowTiles x 16 rows of x.
  template <int kRowTiles, int kCount>
  static void MultiplySteps(Work<kCount>& work, int64_t row, int64_t block_first, int64_t first, int64_t rows) {
    const bool start = block_first == 0;
    StartSums<0>(work, row, 0, start);
    if constexpr (kCount > 1) StartSums<1>(work, row, 1, start);
    if constexpr (kRowTiles > 1) StartSums<2>(work, row + kRows, 0, start);
    if constexpr (kRowTiles > 1 && kCount > 1) StartSums<3>(work, row + kRows, 1, start);
    const int64_t stride = work.layer.row_bytes;
    const char* x = reinterpret_cast<const char*>(work.panels[0].X(row)) + 4 * (block_first + first);
    // Expanded tiles are in the cache; stored tiles are fetched during the first rows.
    const bool fetch = Weights::kStoredTiles && row == 0;
    for (int64_t at = first; at < first + rows; at += work.step_rows, x += 4 * work.step_rows) {
      if (fetch) PrefetchTiles(work, block_first + at, at);
      TileLoad<4>(x, stride);
      TileLoad<6>(work.block[0] + at * kMaxTileColsb, kMaxTileColsb);
      Product<0, 4, 6>();
      if constexpr (kCount > 1) {
        TileLoad<7>(work.block[1] + at * kMaxTileColsb, kMaxTileColsb);
        Product<1, 4, 7>();
      }
      if constexpr (kRowTiles > 1) {
        TileLoad<5>(x + kRows * stride, stride);
        Product<2, 5, 6>();
        if constexpr (kCount > 1) Product<3, 5, 7>();
      }
    }
    if constexpr (kGroups) {
      AddGroup(work);
      work.newer ^= 1;
      work.unscaled_row = row;
      work.unscaled_rows = work.m - row < kRowTiles * kRows ? work.m - row : kRowTiles * kRows;
      work.unscaled_group = (block_first + first) / work.group_rows;
    }
    EndSums<0>(work, row, 0, 0);
    if constexpr (kCount > 1) EndSums<1>(work, row, 0, 1);
    if constexpr (kRowTiles > 1) EndSums<2>(work, row, 1, 0);
    if constexpr (kRowTiles > 1 && kCount > 1) EndSums<3>(work, row, 1, 1);
  }

  template <int kRowTiles, int kCount>
  static void MultiplyBlock(Work<kCount>& work, int64_t row, int64_t block_first, int64_t rows) {
    const int64_t step = kGroups ? work.group_rows : rows;
    for (int64_t first = 0; first < rows; first += step) {
      // Padding follows the last group.
      if (kGroups && (block_first + first) / work.group_rows == work.layer.groups) break;
      MultiplySteps<kRowTiles, kCount>(work, row, block_first, first, rows - first < step ? rows - first : step);
    }
  }

  // Finish rows begin … end-1 one by one, because rows of y may be pages apart.
  template <int kCount>
  static void Finish(const Work<kCount>& work, int64_t begin, int64_t end) {
    const int64_t row_bytes = work.layer.row_bytes;
    const char* terms = reinterpret_cast<const char*>(work.panels[0].X(begin) + work.layer.padded_k);
    const int64_t groups = work.layer.groups;
    const auto finish = [&]<int... p>(std::integer_sequence<int, p...>) {
      // Copies, because the compiler must assume that stores to y change the panels.
      const PanelOutput<Simd> outputs[] = {work.panels[p].output...};
      const typename Weights::Scales scales[] = {work.panels[p].scales...};
      for (int64_t i = begin; i < end; ++i, terms += row_bytes) {
        const typename Panel::template RowTerms<1> of_row(reinterpret_cast<const typename Panel::Activation*>(terms),
                                                          groups);
        (FinishRow(of_row, scales[p], outputs[p], work.waiting[i][p], i), ...);
      }
    };
    finish(std::make_integer_sequence<int, kCount>());
  }

  static void FinishRow(const typename Panel::template RowTerms<1>& terms, const typename Weights::Scales& scales,
                        const PanelOutput<Simd>& output, const uint8_t* waiting, int64_t i) {
    Floats total;
    if constexpr (kGroups) {
      total = Columns::Load(reinterpret_cast<const float*>(waiting));
    } else {
      total = terms.Add(Columns::Set(0.0f), Weights::LoadSums(waiting), scales.Of(0), 0, 0);
    }
    if constexpr (kBf16) {
      output.Store(i, terms.End(total, 0));
    } else {
      output.StoreWithBias(i, terms.End(total, 0));
    }
  }

  template <int kCount>
  static void Multiply(const Layer& layer, const MatMulArgs& args, int64_t first_panel) {
    Work<kCount> work(layer, args, first_panel);
    const int64_t all_rows = layer.spans * Layer::kSpanRows;
    const int64_t block_rows = BlockRows(args.m, all_rows);
    for (int64_t block = 0; block < all_rows; block += block_rows) {
      const int64_t rows = all_rows - block < block_rows ? all_rows - block : block_rows;
      const bool last = block + rows == all_rows;
      for (int p = 0; p < kCount; ++p) FindBlock(work, p, rows);
      // Finish the previous rows while the tiles of these rows are multiplied.
      int64_t row = 0, finished = 0;
      for (; row + kRows < args.m; row += 2 * kRows) {
        MultiplyBlock<2, kCount>(work, row, block, rows);
        if (!last) continue;
        Finish(work, finished, row);
        finished = row;
      }
      if (row < args.m) MultiplyBlock<1, kCount>(work, row, block, rows);
      if (!last) continue;
      if constexpr (kGroups) AddGroup(work);
      Finish(work, finished, args.m);
    }
  }
};

}  // namespace
}  // namespace ortolan
