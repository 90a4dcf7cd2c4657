#include <algorithm>
#include <bit>

#include "host/thread_scratch.h"
#include "masked_matmul/products.h"

namespace ortolan {
namespace {

// Inputs of a pass; the last pass may have up to 1.5 times this number. A tile of A with these inputs stays in the L2
// cache while the blocks of B are read.
constexpr int64_t kPassInputs = 2048;
// Bytes of the tiles of A that share a panel. With larger groups, more work items would pack the same tiles.
constexpr int64_t kTileGroupBytes = int64_t{200} << 10;

class BlockProduct {
 public:
  BlockProduct(const MaskedMatMulKernel& kernel, Way way, const Pattern& pattern, const FloatRows& a,
               const FloatRows& b, float* y, CallMemory& memory)
      : kernel_(kernel),
        pattern_(pattern),
        a_(a),
        b_(b),
        y_(y),
        memory_(memory),
        two_sided_(way == Way::kTwoSided),
        words_(MaskWords(a.columns)),
        panels_(BlockPanels(b.columns)),
        tile_rows_(two_sided_ ? kernel.sparse_tile_rows : kernel.tile_rows),
        tiles_((a.rows + tile_rows_ - 1) / tile_rows_) {
    const int64_t passes = std::max<int64_t>(1, (a.columns + kPassInputs / 2) / kPassInputs);
    pass_words_ = (words_ + passes - 1) / passes;
    pass_inputs_ = pass_words_ * kMaskBits;
    tile_floats_ = (pass_inputs_ + 1) * tile_rows_;
    // A work unit is a group of tiles; if there are few groups, each is also split by columns.
    group_ = two_sided_ ? 1 : std::clamp<int64_t>(kTileGroupBytes / (tile_floats_ * kFloatBytes), 1, tiles_);
    const int64_t groups = (tiles_ + group_ - 1) / group_;
    parts_ = std::clamp<int64_t>(kMostPieces / groups, 1, std::max<int64_t>(1, panels_ / 8));
    units_ = groups * parts_;
    tiles_bytes_ = Aligned(group_ * tile_floats_ * kFloatBytes);
    const int64_t list_bytes = (pass_inputs_ + kListPadding) * static_cast<int64_t>(sizeof(uint16_t));
    scratch_bytes_ = tiles_bytes_ + (two_sided_ ? list_bytes : 0);
    unit_finite_ = memory.New<uint8_t>(units_);
    std::fill_n(unit_finite_, units_, uint8_t{1});
    starts_ = memory.New<int64_t>(panels_ + 1);
    slots_ = memory.New<int64_t>(pass_words_ * panels_);
    if (two_sided_) ranks_ = memory.New<uint16_t>(panels_ * (pass_inputs_ + 1));
  }

  bool Run() {
    for (int64_t first_word = 0; first_word < words_; first_word += pass_words_) {
      const Pass pass{first_word, std::min(words_, first_word + pass_words_), first_word * kMaskBits,
                      std::min(a_.columns - first_word * kMaskBits, pass_inputs_)};
      PackB(pass);
      ForEachWithScratch(memory_.host(), units_, scratch_bytes_,
                         [&](int64_t unit, char* scratch) { Multiply(pass, unit, scratch); });
    }
    return std::all_of(unit_finite_, unit_finite_ + units_, [](uint8_t one) { return one != 0; });
  }

 private:
  struct Pass {
    int64_t first_word, last_word, first_input, inputs;
  };

  // Returns the slot after a panel's last block.
  int64_t End(const Pass& pass, int64_t panel) const {
    return slots_[(pass.last_word - 1 - pass.first_word) * panels_ + panel];
  }

  void PackB(const Pass& pass) {
    // The first slot of each panel and word. One or two blocks of zeros make a panel's count even.
    starts_[0] = 0;
    for (int64_t panel = 0; panel < panels_; ++panel) {
      int64_t slot = starts_[panel];
      for (int64_t word = pass.first_word; word < pass.last_word; ++word) {
        slots_[(word - pass.first_word) * panels_ + panel] = slot;
        slot += std::popcount(pattern_.panel_masks[panel * words_ + word]);
      }
      starts_[panel + 1] = starts_[panel] + (slot - starts_[panel] + 2) / 2 * 2;
    }
    if (starts_[panels_] > capacity_) {
      capacity_ = starts_[panels_];
      values_ = memory_.New<float>(capacity_ * kBlockColumns);
      if (!two_sided_) inputs_ = memory_.New<uint32_t>(capacity_);
    }
    memory_.host().ParallelFor(pass.last_word - pass.first_word, [&](int64_t i) {
      const int64_t word = pass.first_word + i;
      kernel_.pack_blocks({b_.Rows(word * kMaskBits, kMaskBits), pattern_.panel_masks + word, words_,
                           static_cast<uint32_t>(i * kMaskBits), starts_, slots_ + i * panels_, values_, inputs_,
                           ranks_, pass_inputs_ + 1});
    });
    for (int64_t panel = 0; panel < panels_; ++panel) {
      const int64_t end = End(pass, panel);
      for (int64_t slot = end; slot < starts_[panel + 1]; ++slot) {
        std::fill_n(values_ + slot * kBlockColumns, kBlockColumns, 0.0f);
        if (!two_sided_) inputs_[slot] = static_cast<uint32_t>(pass.inputs);
      }
      if (two_sided_) ranks_[panel * (pass_inputs_ + 1) + pass.inputs] = static_cast<uint16_t>(end - starts_[panel]);
    }
  }

  void Multiply(const Pass& pass, int64_t unit, char* scratch) {
    float* packed = reinterpret_cast<float*>(scratch);
    const int64_t first_tile = unit / parts_ * group_;
    const int64_t last_tile = std::min(tiles_, first_tile + group_);
    for (int64_t tile = first_tile; tile < last_tile; ++tile) {
      FloatRows rows = a_.Rows(tile * tile_rows_, tile_rows_);
      rows.data += pass.first_input;
      rows.columns = pass.inputs;
      const auto pack = two_sided_ ? kernel_.pack_sparse_tile : kernel_.pack_tile;
      if (!pack(rows, packed + (tile - first_tile) * tile_floats_)) unit_finite_[unit] = 0;
    }
    const int64_t last_panel = (unit % parts_ + 1) * panels_ / parts_;
    for (int64_t panel = unit % parts_ * panels_ / parts_; panel < last_panel; ++panel) {
      for (int64_t tile = first_tile; tile < last_tile; ++tile) {
        SparseTileArgs args;
        args.tile = packed + (tile - first_tile) * tile_floats_;
        args.values = values_ + starts_[panel] * kBlockColumns;
        args.y_row_bytes = b_.columns * kFloatBytes;
        args.y = y_ + tile * tile_rows_ * b_.columns + panel * kBlockColumns;
        args.rows = std::min(tile_rows_, a_.rows - tile * tile_rows_);
        args.columns = std::min(kBlockColumns, b_.columns - panel * kBlockColumns);
        args.add = pass.first_word > 0;
        if (two_sided_) {
          args.tile_mask = pattern_.tile_masks + tile * words_ + pass.first_word;
          args.panel_mask = pattern_.panel_masks + panel * words_ + pass.first_word;
          args.ranks = ranks_ + panel * (pass_inputs_ + 1);
          args.k = pass.inputs;
          args.list = reinterpret_cast<uint16_t*>(scratch + tiles_bytes_);
          kernel_.multiply_sparse_tile(args);
        } else {
          args.inputs = inputs_ + starts_[panel];
          args.count = End(pass, panel) - starts_[panel];
          kernel_.multiply_tile(args);
        }
      }
    }
  }

  const MaskedMatMulKernel& kernel_;
  const Pattern& pattern_;
  const FloatRows& a_;
  const FloatRows& b_;
  float* const y_;
  CallMemory& memory_;
  const bool two_sided_;
  const int64_t words_, panels_;
  const int64_t tile_rows_, tiles_;
  int64_t pass_words_, pass_inputs_, tile_floats_;
  int64_t group_, parts_, units_;        // tiles of a unit, units that share tiles, number of units
  int64_t tiles_bytes_, scratch_bytes_;  // bytes of a unit's tiles, and including its list of inputs
  uint8_t* unit_finite_;
  int64_t* starts_;  // [panels + 1]
  int64_t* slots_;   // [words of a pass][panels]
  int64_t capacity_ = 0;
  float* values_ = nullptr;     // [capacity][16]
  uint32_t* inputs_ = nullptr;  // [capacity]
  uint16_t* ranks_ = nullptr;
};

}  // namespace

bool MultiplyBlocks(const MaskedMatMulKernel& kernel, Way way, const Pattern& pattern, const FloatRows& a,
                    const FloatRows& b, float* y, CallMemory& memory) {
  return BlockProduct(kernel, way, pattern, a, b, y, memory).Run();
}

}  // namespace ortolan
