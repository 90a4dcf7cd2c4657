// The product of two matrices of which both may be sparse, out of the blocks kernels: what finds the pattern, chooses,
// packs and multiplies. It knows no threads and allocates nothing itself: the caller says how, so that the operator
// runs it on ONNX Runtime's threads and memory, and tests run it without.
//
//     parallel(count, body)   calls body(i) for 0 <= i < count, in any order, on any thread
//     allocate(bytes)         memory, aligned to 64 bytes, that lives as long as the product
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "masked_matmul/masked_matmul.h"

namespace ortolan {

// What there is to skip in A [m, k] and B [k, n].
struct Pattern {
  uint64_t* tile_masks = nullptr;   // [sparse tiles][words], or null: A was not looked at
  uint64_t* panel_masks = nullptr;  // [panels][words], without the inputs that no row of A uses
  uint64_t* active = nullptr;       // [words]: the inputs that a row of A uses and whose row of B is not zero
  bool finite = true;               // all of A and B that was looked at
  double active_inputs = 1;         // share of k
  double blocks = 1;                // share of all blocks of B that are neither zero nor of an inactive input
  double used = 1;                  // share of the inputs that a sparse tile uses, on average
  double numbers = 1;               // share of A's numbers that are not zero, from a sample of its rows
};

enum class Way {
  kDense,     // one dense product
  kCompact,   // a dense product of the active inputs
  kBlocks,    // blocks of B skipped
  kTwoSided,  // inputs of a tile of A skipped too
  kNumbers,   // numbers of A skipped one by one, B taken as dense
};

// ---- choice ---------------------------------------------------------------------------------------------------------

// What a way costs, as a share of the dense product's time (m, k, n of 1024 and more; Zen 5, one thread). Measured: a
// product in the blocks kernels takes 1.05 times as long as in a dense product of full speed, of two sides 1.33 times;
// packing A is shared by the columns.
inline constexpr double kBlocksCost = 1.05;
inline constexpr double kTwoSidedCost = 1.33;
inline constexpr double kPatternCost = 0.03;
inline constexpr double kListCost = 0.03;
inline constexpr double kTwoSidedPackCost = 0.18;  // of B's blocks
inline constexpr double kBlocksPatternCost = 0.015;
inline constexpr double kPackColumns = 40.0;
// Copying a number of A or B, in multiply-adds.
inline constexpr double kCopyCost = 110.0;
// A number of A costs as much more than in a dense product, its row of a panel 0.12 of the row's products however many
// it has; packing B as much as so many rows of A.
inline constexpr double kNumbersCost = 1.3;
inline constexpr double kNumbersListCost = 0.12;
inline constexpr double kNumbersPackRows = 30.0;
// A way that skips must be this much better than the dense product, or the dense one is taken.
inline constexpr double kLeastGain = 0.9;

inline double CostOf(Way way, const Pattern& pattern, int64_t m, int64_t n) {
  switch (way) {
    case Way::kCompact:
      return pattern.active_inputs * (1.0 + kCopyCost * (1.0 / static_cast<double>(m) + 1.0 / static_cast<double>(n)));
    case Way::kBlocks:
      return pattern.blocks * kBlocksCost + kBlocksPatternCost + kPackColumns / static_cast<double>(n);
    case Way::kTwoSided:
      // Both count active inputs only.
      return pattern.blocks * pattern.used / std::max(pattern.active_inputs, 1e-9) * kTwoSidedCost +
             pattern.blocks * kTwoSidedPackCost + kPatternCost + kListCost;
    case Way::kNumbers:
      return pattern.numbers * kNumbersCost + kNumbersListCost + kPatternCost +
             kNumbersPackRows / static_cast<double>(m);
    default:
      return kLeastGain;
  }
}

inline Way CheapestWay(const Pattern& pattern, int64_t m, int64_t k, int64_t n) {
  if (!pattern.finite) return Way::kDense;
  Way best = Way::kDense;
  for (const Way way : {Way::kCompact, Way::kBlocks, Way::kTwoSided, Way::kNumbers}) {
    if (way == Way::kTwoSided && k > kMostListedInputs) continue;
    if (CostOf(way, pattern, m, n) < CostOf(best, pattern, m, n)) best = way;
  }
  return best;
}

// ---- pattern --------------------------------------------------------------------------------------------------------

namespace block_product {

inline constexpr int64_t kTilesAUnit = 8;
// Inputs of a pass, or half as many more: a tile of so many fits the L2 cache, and the blocks stream past it.
inline constexpr int64_t kPassInputs = 2048;
inline constexpr int64_t kTileGroupBytes = int64_t{200} << 10;
inline constexpr int64_t kMostSlots = 16;

template <typename T, typename Allocate>
T* New(Allocate& allocate, int64_t count) {
  return reinterpret_cast<T*>(allocate(static_cast<size_t>(count) * sizeof(T)));
}

inline double Share(int64_t set, int64_t all) {
  return all == 0 ? 0.0 : static_cast<double>(set) / static_cast<double>(all);
}

inline int64_t CountBits(const uint64_t* words, int64_t count) {
  int64_t bits = 0;
  for (int64_t i = 0; i < count; ++i) bits += std::popcount(words[i]);
  return bits;
}

}  // namespace block_product

// The share of numbers of a that are not zero, by up to 64 of its rows. words: scratch, MaskWords(a.columns).
inline double ShareOfNumbers(const MaskedMatMulKernel& kernel, const FloatRows& a, uint64_t* words) {
  using namespace block_product;
  const int64_t rows = std::clamp<int64_t>(a.rows / 8, 1, 64);
  int64_t numbers = 0;
  for (int64_t i = 0; i < rows; ++i) {
    kernel.scan_rows(a.Rows(a.rows * i / rows, 1), words);
    numbers += CountBits(words, MaskWords(a.columns));
  }
  return Share(numbers, rows * a.columns);
}

// m, k and n are 1 or more. look_at_a false: A is taken to use all inputs, for Way::kBlocks, which finds out whether it
// is finite.
template <typename Parallel, typename Allocate>
Pattern FindPattern(const MaskedMatMulKernel& kernel, const FloatRows& a, const FloatRows& b, bool look_at_a,
                    const Parallel& parallel, Allocate& allocate) {
  using namespace block_product;
  const int64_t words = MaskWords(a.columns);
  const int64_t panels = BlockPanels(b.columns);
  const int64_t tile_rows = kernel.sparse_tile_rows;
  const int64_t tiles = look_at_a ? (a.rows + tile_rows - 1) / tile_rows : 0;
  const int64_t tile_units = (tiles + kTilesAUnit - 1) / kTilesAUnit;

  Pattern pattern;
  if (look_at_a) pattern.tile_masks = New<uint64_t>(allocate, tiles * words);
  pattern.panel_masks = New<uint64_t>(allocate, panels * words);
  pattern.active = New<uint64_t>(allocate, words);
  uint8_t* finite = New<uint8_t>(allocate, tile_units + words);
  parallel(tile_units + words, [&](int64_t unit) {
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
  if (!look_at_a) {
    pattern.blocks = Share(CountBits(pattern.panel_masks, panels * words), panels * a.columns);
    return pattern;
  }

  pattern.numbers = ShareOfNumbers(kernel, a, pattern.active);
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
  pattern.blocks = Share(CountBits(pattern.panel_masks, panels * words), panels * a.columns);
  pattern.used = Share(CountBits(pattern.tile_masks, tiles * words), tiles * a.columns);
  return pattern;
}

// What a few rows of A and B show: the shares, no masks. They may hold more zeros than the rest, or fewer.
inline Pattern SamplePattern(const MaskedMatMulKernel& kernel, const FloatRows& a, const FloatRows& b,
                             uint64_t* words_of_k, uint64_t* words_of_panels) {
  using namespace block_product;
  constexpr int64_t kSamples = 8;
  constexpr int64_t kShareOfRows = 8;
  const int64_t words = MaskWords(a.columns);
  const int64_t panels = BlockPanels(b.columns);
  const int64_t tile_rows = kernel.sparse_tile_rows;
  const int64_t tiles = std::clamp<int64_t>(a.rows / tile_rows / kShareOfRows, 1, kSamples);
  const int64_t rows = std::clamp<int64_t>(b.rows / kShareOfRows, 1, kSamples * tile_rows);
  uint64_t* one_tile = words_of_k;
  uint64_t* any = words_of_k + words;
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
    kernel.scan_blocks(b.Rows(b.rows * i / rows, 1), words_of_panels, 1);
    const int64_t of_row = CountBits(words_of_panels, panels);
    blocks += of_row;
    rows_in_use += of_row > 0;
  }
  pattern.used = Share(used, tiles * a.columns);
  pattern.numbers = ShareOfNumbers(kernel, a, one_tile);
  const double used_by_any = Share(CountBits(any, words), a.columns);
  pattern.blocks = Share(blocks, rows * panels) * used_by_any;
  pattern.active_inputs = Share(rows_in_use, rows) * used_by_any;
  return pattern;
}

// ---- product --------------------------------------------------------------------------------------------------------

// y = A B by Way::kBlocks or Way::kTwoSided; pattern is that of a and b. Returns whether a is finite, as b is: else y
// is not the product.
template <typename Parallel, typename Allocate>
bool MultiplyBlocks(const MaskedMatMulKernel& kernel, Way way, const Pattern& pattern, const FloatRows& a,
                    const FloatRows& b, float* y, int64_t y_row_bytes, const Parallel& parallel, Allocate& allocate) {
  using namespace block_product;
  const bool two_sided = way == Way::kTwoSided;
  const int64_t words = MaskWords(a.columns);
  const int64_t panels = BlockPanels(b.columns);
  const int64_t tile_rows = two_sided ? kernel.sparse_tile_rows : kernel.tile_rows;
  const int64_t passes = std::max<int64_t>(1, (a.columns + kPassInputs / 2) / kPassInputs);
  const int64_t pass_words = (words + passes - 1) / passes;
  const int64_t pass_inputs = pass_words * kMaskBits;
  const int64_t tile_floats = (pass_inputs + 1) * tile_rows;

  // Rows by groups of tiles, and where these are few also columns, in units of work; a slot is a unit's scratch memory.
  const int64_t tiles = (a.rows + tile_rows - 1) / tile_rows;
  const int64_t tile_bytes = tile_floats * static_cast<int64_t>(sizeof(float));
  const int64_t group = two_sided ? 1 : std::clamp<int64_t>(kTileGroupBytes / tile_bytes, 1, tiles);
  const int64_t groups = (tiles + group - 1) / group;
  const int64_t parts = std::clamp<int64_t>(kMostSlots / groups, 1, std::max<int64_t>(1, panels / 8));
  const int64_t units = groups * parts;
  const int64_t slots = std::min(units, kMostSlots);
  float* slot_tiles = New<float>(allocate, slots * group * tile_floats);
  uint8_t* slot_finite = New<uint8_t>(allocate, slots);
  std::fill_n(slot_finite, slots, uint8_t{1});
  uint16_t* lists = two_sided ? New<uint16_t>(allocate, slots * (pass_inputs + kListPadding)) : nullptr;

  int64_t* starts = New<int64_t>(allocate, panels + 1);
  int64_t* places = New<int64_t>(allocate, pass_words * panels);
  float* values = nullptr;
  uint32_t* inputs = nullptr;
  uint16_t* ranks = two_sided ? New<uint16_t>(allocate, panels * (pass_inputs + 1)) : nullptr;
  int64_t capacity = 0;
  for (int64_t first_word = 0; first_word < words; first_word += pass_words) {
    const int64_t last_word = std::min(words, first_word + pass_words);
    const int64_t first_input = first_word * kMaskBits;
    const int64_t count = std::min(a.columns - first_input, pass_inputs);
    // Where the blocks of each panel and word go; behind them, one or two of zeros, for an even number.
    starts[0] = 0;
    for (int64_t panel = 0; panel < panels; ++panel) {
      int64_t place = starts[panel];
      for (int64_t word = first_word; word < last_word; ++word) {
        places[(word - first_word) * panels + panel] = place;
        place += std::popcount(pattern.panel_masks[panel * words + word]);
      }
      starts[panel + 1] = starts[panel] + (place - starts[panel] + 2) / 2 * 2;
    }
    if (starts[panels] > capacity) {
      capacity = starts[panels];
      values = New<float>(allocate, capacity * kBlockColumns);
      if (!two_sided) inputs = New<uint32_t>(allocate, capacity);
    }
    parallel(last_word - first_word, [&](int64_t i) {
      const int64_t word = first_word + i;
      kernel.pack_blocks({b.Rows(word * kMaskBits, kMaskBits), pattern.panel_masks + word, words,
                          static_cast<uint32_t>(i * kMaskBits), starts, places + i * panels, values, inputs, ranks,
                          pass_inputs + 1});
    });
    int64_t* ends = places + (last_word - 1 - first_word) * panels;
    for (int64_t panel = 0; panel < panels; ++panel) {
      for (int64_t place = ends[panel]; place < starts[panel + 1]; ++place) {
        std::fill_n(values + place * kBlockColumns, kBlockColumns, 0.0f);
        if (!two_sided) inputs[place] = static_cast<uint32_t>(count);
      }
      if (two_sided) ranks[panel * (pass_inputs + 1) + count] = static_cast<uint16_t>(ends[panel] - starts[panel]);
    }

    parallel(slots, [&](int64_t slot) {
      float* packed = slot_tiles + slot * group * tile_floats;
      for (int64_t unit = slot; unit < units; unit += slots) {
        const int64_t first_tile = unit / parts * group;
        const int64_t last_tile = std::min(tiles, first_tile + group);
        const int64_t first_panel = unit % parts * panels / parts;
        const int64_t last_panel = (unit % parts + 1) * panels / parts;
        for (int64_t tile = first_tile; tile < last_tile; ++tile) {
          FloatRows rows = a.Rows(tile * tile_rows, tile_rows);
          rows.data += first_input;
          rows.columns = count;
          const auto pack = two_sided ? kernel.pack_sparse_tile : kernel.pack_tile;
          if (!pack(rows, packed + (tile - first_tile) * tile_floats)) slot_finite[slot] = 0;
        }
        for (int64_t panel = first_panel; panel < last_panel; ++panel) {
          for (int64_t tile = first_tile; tile < last_tile; ++tile) {
            SparseTileArgs args;
            args.tile = packed + (tile - first_tile) * tile_floats;
            args.values = values + starts[panel] * kBlockColumns;
            args.y_row_bytes = y_row_bytes;
            args.y = reinterpret_cast<float*>(reinterpret_cast<char*>(y) + tile * tile_rows * y_row_bytes) +
                     panel * kBlockColumns;
            args.rows = std::min(tile_rows, a.rows - tile * tile_rows);
            args.columns = std::min(kBlockColumns, b.columns - panel * kBlockColumns);
            args.add = first_word > 0;
            if (two_sided) {
              args.tile_mask = pattern.tile_masks + tile * words + first_word;
              args.panel_mask = pattern.panel_masks + panel * words + first_word;
              args.ranks = ranks + panel * (pass_inputs + 1);
              args.k = count;
              args.list = lists + slot * (pass_inputs + kListPadding);
              kernel.multiply_sparse_tile(args);
            } else {
              args.inputs = inputs + starts[panel];
              args.count = ends[panel] - starts[panel];
              kernel.multiply_tile(args);
            }
          }
        }
      }
    });
  }
  return std::all_of(slot_finite, slot_finite + slots, [](uint8_t one) { return one != 0; });
}

}  // namespace ortolan
