#include "masked_matmul/pattern.h"

#include <algorithm>
#include <bit>

namespace ortolan {
namespace {

constexpr int64_t kTilesAUnit = 8;

double Share(int64_t set, int64_t all) { return all == 0 ? 0.0 : static_cast<double>(set) / static_cast<double>(all); }

// Returns the cost of a way to multiply, relative to the dense product.
double CostOf(const MaskedMatMulCosts& costs, Way way, const Pattern& pattern, const ProductSize& size) {
  const double a_row = 1.0 / static_cast<double>(size.m);
  const double column = 1.0 / static_cast<double>(size.n);
  switch (way) {
    case Way::kCompact:
      return pattern.active_inputs * (1.0 + costs.copy * (a_row + column));
    case Way::kBlocks:
      return pattern.blocks * costs.blocks + costs.blocks_pattern + costs.pack_columns * column;
    case Way::kTwoSided:
      // `blocks` and `used` both count active inputs only.
      return pattern.blocks * pattern.used / std::max(pattern.active_inputs, 1e-9) * costs.two_sided +
             pattern.blocks * costs.two_sided_pack + costs.pattern + costs.list;
    case Way::kValues:
      return pattern.values * costs.values + costs.values_list + costs.pattern + costs.values_pack * a_row;
    default:
      return costs.least_gain;
  }
}

// Returns the fraction of nonzero values of a, from up to 64 of its rows. words: scratch, MaskWords(a.columns).
double ShareOfValues(const MaskedMatMulKernel& kernel, const FloatRows& a, uint64_t* words) {
  const int64_t rows = std::clamp<int64_t>(a.rows / 8, 1, 64);
  int64_t values = 0;
  for (int64_t i = 0; i < rows; ++i) {
    kernel.scan_rows(a.Rows(a.rows * i / rows, 1), words);
    values += CountBits(words, MaskWords(a.columns));
  }
  return Share(values, rows * a.columns);
}

}  // namespace

int64_t CountBits(const uint64_t* words, int64_t count) {
  int64_t bits = 0;
  for (int64_t i = 0; i < count; ++i) bits += std::popcount(words[i]);
  return bits;
}

Way CheapestWay(const MaskedMatMulCosts& costs, const Pattern& pattern, const ProductSize& size) {
  if (!pattern.finite) return Way::kDense;
  Way best = Way::kDense;
  for (const Way way : {Way::kCompact, Way::kBlocks, Way::kTwoSided, Way::kValues}) {
    if (way == Way::kTwoSided && (!pattern.of_a || size.k > kMostListedInputs)) continue;
    if (CostOf(costs, way, pattern, size) < CostOf(costs, best, pattern, size)) best = way;
  }
  return best;
}

Pattern FindPattern(const MaskedMatMulKernel& kernel, const FloatRows& a, const FloatRows& b, bool look_at_a,
                    CallMemory& memory) {
  const int64_t words = MaskWords(a.columns);
  const int64_t panels = BlockPanels(b.columns);
  const int64_t tile_rows = kernel.sparse_tile_rows;
  const int64_t tiles = look_at_a ? (a.rows + tile_rows - 1) / tile_rows : 0;
  const int64_t tile_units = (tiles + kTilesAUnit - 1) / kTilesAUnit;

  Pattern pattern;
  pattern.of_a = look_at_a;
  if (look_at_a) pattern.tile_masks = memory.New<uint64_t>(tiles * words);
  pattern.panel_masks = memory.New<uint64_t>(panels * words);
  pattern.active = memory.New<uint64_t>(words);
  uint8_t* finite = memory.New<uint8_t>(tile_units + words);
  memory.host().ParallelFor(tile_units + words, [&](int64_t unit) {
    if (unit < tile_units) {
      bool all = true;
      const int64_t end = std::min(tiles, (unit + 1) * kTilesAUnit);
      for (int64_t tile = unit * kTilesAUnit; tile < end; ++tile) {
        all &= kernel.scan_rows(a.Rows(tile * tile_rows, tile_rows), pattern.tile_masks + tile * words);
      }
      finite[unit] = all;
    } else {
      const int64_t word = unit - tile_units;
      finite[unit] = kernel.scan_blocks(b.Rows(word * kMaskBits, kMaskBits), pattern.panel_masks + word, words);
    }
  });
  pattern.finite = std::all_of(finite, finite + tile_units + words, [](uint8_t one) { return one != 0; });
  if (!pattern.finite) return pattern;
  if (look_at_a) {
    pattern.values = ShareOfValues(kernel, a, pattern.active);
    for (int64_t word = 0; word < words; ++word) {
      uint64_t of_a = 0;
      for (int64_t tile = 0; tile < tiles; ++tile) of_a |= pattern.tile_masks[tile * words + word];
      uint64_t of_b = 0;
      for (int64_t panel = 0; panel < panels; ++panel) {
        of_b |= pattern.panel_masks[panel * words + word];
        pattern.panel_masks[panel * words + word] &= of_a;
      }
      pattern.active[word] = of_a & of_b;
    }
    pattern.active_inputs = Share(CountBits(pattern.active, words), a.columns);
    pattern.used = Share(CountBits(pattern.tile_masks, tiles * words), tiles * a.columns);
  }
  pattern.blocks = Share(CountBits(pattern.panel_masks, panels * words), panels * a.columns);
  return pattern;
}

Pattern SamplePattern(const MaskedMatMulKernel& kernel, const FloatRows& a, const FloatRows& b, CallMemory& memory) {
  constexpr int64_t kSamples = 8;
  constexpr int64_t kShareOfRows = 8;
  const int64_t words = MaskWords(a.columns);
  const int64_t panels = BlockPanels(b.columns);
  const int64_t tile_rows = kernel.sparse_tile_rows;
  const int64_t tiles = std::clamp<int64_t>(a.rows / tile_rows / kShareOfRows, 1, kSamples);
  const int64_t rows = std::clamp<int64_t>(b.rows / kShareOfRows, 1, kSamples * tile_rows);
  uint64_t* one_tile = memory.New<uint64_t>(2 * words + panels);
  uint64_t* any = one_tile + words;
  uint64_t* of_panels = any + words;
  std::fill_n(any, words, uint64_t{0});
  Pattern pattern;
  int64_t used = 0;
  for (int64_t i = 0; i < tiles; ++i) {
    kernel.scan_rows(a.Rows(a.rows * i / tiles, tile_rows), one_tile);
    used += CountBits(one_tile, words);
    for (int64_t word = 0; word < words; ++word) any[word] |= one_tile[word];
  }
  int64_t blocks = 0;
  int64_t rows_in_use = 0;
  for (int64_t i = 0; i < rows; ++i) {
    kernel.scan_blocks(b.Rows(b.rows * i / rows, 1), of_panels, 1);
    const int64_t of_row = CountBits(of_panels, panels);
    blocks += of_row;
    rows_in_use += of_row > 0;
  }
  pattern.used = Share(used, tiles * a.columns);
  pattern.values = ShareOfValues(kernel, a, one_tile);
  const double used_by_any = Share(CountBits(any, words), a.columns);
  pattern.blocks = Share(blocks, rows * panels) * used_by_any;
  pattern.active_inputs = Share(rows_in_use, rows) * used_by_any;
  return pattern;
}

}  // namespace ortolan
