// The loop of the AMX kernels for int8 and int4 weights: blocks of both are expanded to B tiles, then multiplied tile
// by tile (sparse_amx_matmul/x86_amx.cc). Included by x86_amx.cc only; local to each.
//
// Groups end a sum, so a tile product takes the inputs of one group at most: groups of 32 use tiles of half the depth,
// and the sums of a group leave the tiles to be scaled.
#pragma once

#include <immintrin.h>

#include "formats/bitmap_int8.h"
#include "formats/scales.h"
#include "matmul/avx512_int8.h"
#include "matmul/panel_output.h"
#include "matmul/quantize_rows.h"
#include "simd/amx_tiles.h"
#include "simd/prefetch.h"

namespace ortolan {
namespace {

// What a Format wants beside tiles. Rows are packed one after another, blocks of one row; weights are signed.
struct AmxInt8Simd : Avx512Int8Simd {
  static constexpr int kRowBlock = 1;
  static constexpr uint32_t kInt8Bias = 0;
  static constexpr uint32_t kInt4Bias = 0;
};

constexpr int64_t kAmxRowTile = 16;

// Zeroes the rows that are missing in the last block of 16 packed rows.
inline void PadAmxRows(void* packed, int64_t m, int64_t row_bytes) {
  const int64_t missing = (kAmxRowTile - m % kAmxRowTile) % kAmxRowTile;
  __builtin_memset(static_cast<char*>(packed) + m * row_bytes, 0, static_cast<size_t>(missing * row_bytes));
}

// Format: as for Int8PanelLoop.
template <typename Format>
class AmxInt8Loop {
  using Simd = AmxInt8Simd;
  using Args = MatMulArgs;
  using Block = typename Format::template Block<Simd, 1>;
  static constexpr bool kInt4 = Format::kInt4;
  static constexpr bool kDense = Format::kDense;

 public:
  static void Run(const Args& args, int64_t panel_begin, int64_t panel_end) {
    TileConfig config;
    const int step_quads = StepQuads(Format::Group(args));
    for (int tile = 0; tile < 4; ++tile) config.Set(tile, kMaxTileRows, kMaxTileColsb);
    for (int tile = 4; tile < 6; ++tile) config.Set(tile, kMaxTileRows, 4 * step_quads);
    for (int tile = 6; tile < 8; ++tile) config.Set(tile, step_quads, kMaxTileColsb);
    LoadTileConfig(config);
    for (int64_t row = 0; row < args.m; row += kMostRows) {
      const Args part = RowsOf(args, row, kMostRows, Format::PackedRowBytes(args));
      int64_t panel = panel_begin;
      for (; panel + kPanels <= panel_end; panel += kPanels) Panels<kPanels>(part, panel);
      if (panel < panel_end) Panels<1>(part, panel);
    }
    TileRelease();
  }

 private:
  static constexpr int kPanels = 2;
  static constexpr int64_t kRows = kAmxRowTile;
  // 16 tiles of two panels: 32 KB. Whole groups.
  static constexpr int64_t kBlockQuads = 16 * kTileRows;
  // Their sums wait on the stack: 32 KB.
  static constexpr int64_t kMostRows = 256;
  static constexpr int64_t kPrefetchBytes = 12288;
  static constexpr int64_t kLineBytes = 64;

  static constexpr int StepQuads(int64_t group) { return group == 32 ? 8 : 16; }

  struct Work {
    Work(const Args& a, int64_t first, int count_)
        : args(a),
          first_panel(first),
          count(count_),
          quads(kInt8Bitmap.Tiles(a.w->k) * kTileRows),
          step_quads(StepQuads(Format::Group(a))),
          groups(ScaleRows(a.w->k, Format::Group(a))),
          group_quads(Format::Group(a) == kWholeColumn ? quads : Format::Group(a) / kInt8Bitmap.row_inputs),
          row_bytes(Format::PackedRowBytes(a)) {
      for (int p = 0; p < count; ++p) {
        masks[p] = Format::Masks(a, first + p);
        values[p][0] = values[p][1] = Format::Values(a, first + p);
      }
    }
    // The numbers of a row of x.
    Block Numbers(int64_t row) const {
      const int8_t* x = static_cast<const int8_t*>(args.x) + row * row_bytes;
      return {x + kInt8Bitmap.PaddedK(args.w->k), groups};
    }
    typename Format::template PanelScales<Simd> Scales(int p) const { return {args, first_panel + p, groups}; }

    const Args& args;
    int64_t first_panel;
    int count;
    int64_t quads;
    int64_t step_quads;
    int64_t groups;
    int64_t group_quads;
    int64_t row_bytes;
    const uint8_t* masks[kPanels] = {};  // these move along from block to block
    const uint8_t* values[kPanels][2] = {};
    const uint8_t* block[kPanels] = {};  // the rows to multiply: in expanded, or where they are stored
    alignas(64) uint8_t expanded[kPanels][kBlockQuads][kMaxTileColsb];
    alignas(64) uint8_t waiting[kMostRows][kPanels][kMaxTileColsb];  // int32 (int8) or float (int4)
  };

  // Row `quad` of the tile whose masks are given, to the same row of `to`; moves values on to the next of its rows.
  template <bool kHigh>
  static void ExpandRow(const uint8_t* masks, int quad, const uint8_t*& values, uint8_t* to) {
    uint64_t mask;
    __builtin_memcpy(&mask, masks + quad * static_cast<int>(sizeof(mask)), sizeof(mask));
    __builtin_prefetch(values + kPrefetchBytes);
    __m512i row;
    if constexpr (kInt4) {
      row = kHigh ? ExpandHighNibbles(mask, values) : ExpandLowNibbles(mask, values);
      row = _mm512_sub_epi8(row, EachByte(kInt4Bias));
    } else {
      row = ExpandBytes(mask, values);
    }
    values += __builtin_popcountll(mask);
    _mm512_store_si512(to + quad * kMaxTileColsb, row);
  }

  // The streams are kept in locals: a store of 64 bytes might change what `work` points to, for all a compiler knows.
  static void ExpandBlock(Work& work, int64_t quads) {
    for (int p = 0; p < work.count; ++p) {
      const uint8_t* masks = work.masks[p];
      const uint8_t* even = work.values[p][0];
      const uint8_t* odd = work.values[p][1];
      uint8_t* to = work.expanded[p][0];
      for (int64_t tile = 0; tile < quads; tile += kTileRows, to += kTileBytes, masks += kInt8Bitmap.TileMaskBytes()) {
        __builtin_prefetch(masks + kPrefetchBytes);
        __builtin_prefetch(masks + kPrefetchBytes + kLineBytes);
        for (int quad = 0; quad < kTileRows; quad += 2) {
          ExpandRow<false>(masks, quad, even, to);
          ExpandRow<true>(masks, quad + 1, kInt4 ? odd : even, to);
        }
      }
      work.masks[p] = masks;
      work.values[p][0] = even;
      work.values[p][1] = odd;
      work.block[p] = work.expanded[p][0];
    }
  }

  // int8 weights are B tiles as they are stored, int4 weights take the bytes of two rows apart.
  static void FindDenseBlock(Work& work, int64_t quads) {
    for (int p = 0; p < work.count; ++p) {
      const uint8_t*& values = work.values[p][0];
      if constexpr (!kInt4) {
        work.block[p] = values;
        values += quads * kMaxTileColsb;
      } else {
        for (int64_t quad = 0; quad < quads; quad += 2, values += kMaxTileColsb) {
          __builtin_prefetch(values + kPrefetchBytes);
          const __m512i bytes = _mm512_loadu_si512(values);
          _mm512_store_si512(work.expanded[p][quad], _mm512_sub_epi8(LowNibbles(bytes), EachByte(kInt4Bias)));
          _mm512_store_si512(work.expanded[p][quad + 1], _mm512_sub_epi8(HighNibbles(bytes), EachByte(kInt4Bias)));
        }
        work.block[p] = work.expanded[p][0];
      }
    }
  }

  template <int kTile>
  static void StartSums(const Work& work, int64_t row, int p, bool zero) {
    if (zero) {
      TileZero<kTile>();
    } else {
      TileLoad<kTile>(work.waiting[row][p], sizeof(work.waiting[0]));
    }
  }

  // Leaves int32 sums (int8), or adds the scaled sums of a group to the float ones (int4).
  template <int kTile>
  static void EndSums(Work& work, int64_t row, int p, int64_t group) {
    if constexpr (!kInt4) {
      TileStore<kTile>(work.waiting[row][p], sizeof(work.waiting[0]));
    } else {
      struct alignas(64) {
        int32_t at[kRows][kPanelColumns];
      } sums;
      TileStore<kTile>(&sums, sizeof(sums.at[0]));
      const auto scales = work.Scales(p).Of(group);
      for (int64_t r = 0; r < kRows; ++r) {
        uint8_t* to = work.waiting[row + r][p];
        const __m512 total = group == 0 ? Simd::Zero() : Simd::LoadWaiting(to);
        const __m512i sum = Simd::LoadWaitingSums(reinterpret_cast<const uint8_t*>(sums.at[r]));
        Simd::StoreWaiting(to, work.Numbers(row + r).Add(total, sum, scales, group, 0));
      }
    }
  }

  // Quads first … first+quads-1 of the block, which are of one group in int4, times kRowTiles x 16 rows of x.
  template <int kRowTiles, int kCount>
  static void MultiplySteps(Work& work, int64_t row, int64_t block_first, int64_t first, int64_t quads) {
    const bool zero = kInt4 || block_first == 0;
    StartSums<0>(work, row, 0, zero);
    if constexpr (kCount > 1) StartSums<1>(work, row, 1, zero);
    if constexpr (kRowTiles > 1) StartSums<2>(work, row + kRows, 0, zero);
    if constexpr (kRowTiles > 1 && kCount > 1) StartSums<3>(work, row + kRows, 1, zero);
    const int64_t stride = work.row_bytes;
    const char* x = static_cast<const char*>(work.args.x) + row * stride + 4 * (block_first + first);
    // Expanded tiles are in the cache; stored ones are fetched while the first rows pass.
    const bool fetch = !kInt4 && kDense && row == 0;
    for (int64_t quad = first; quad < first + quads; quad += work.step_quads, x += 4 * work.step_quads) {
      if (fetch) {
        for (int p = 0; p < kCount; ++p) PrefetchTile(work.block[p] + quad * kMaxTileColsb + kPrefetchBytes);
      }
      TileLoad<4>(x, stride);
      TileLoad<6>(work.block[0] + quad * kMaxTileColsb, kMaxTileColsb);
      TileDpBssd<0, 4, 6>();
      if constexpr (kCount > 1) {
        TileLoad<7>(work.block[1] + quad * kMaxTileColsb, kMaxTileColsb);
        TileDpBssd<1, 4, 7>();
      }
      if constexpr (kRowTiles > 1) {
        TileLoad<5>(x + kRows * stride, stride);
        TileDpBssd<2, 5, 6>();
        if constexpr (kCount > 1) TileDpBssd<3, 5, 7>();
      }
    }
    const int64_t group = (block_first + first) / work.group_quads;
    EndSums<0>(work, row, 0, group);
    if constexpr (kCount > 1) EndSums<1>(work, row, 1, group);
    if constexpr (kRowTiles > 1) EndSums<2>(work, row + kRows, 0, group);
    if constexpr (kRowTiles > 1 && kCount > 1) EndSums<3>(work, row + kRows, 1, group);
  }

  template <int kRowTiles, int kCount>
  static void MultiplyBlock(Work& work, int64_t row, int64_t block_first, int64_t quads) {
    const int64_t step = kInt4 ? work.group_quads : quads;
    for (int64_t first = 0; first < quads; first += step) {
      // Behind the last group nothing is stored.
      if (kInt4 && (block_first + first) / work.group_quads == work.groups) break;
      MultiplySteps<kRowTiles, kCount>(work, row, block_first, first, quads - first < step ? quads - first : step);
    }
  }

  static void Finish(const Work& work) {
    for (int p = 0; p < work.count; ++p) {
      const PanelOutput output(work.args, work.first_panel + p);
      const auto scales = work.Scales(p);
      for (int64_t i = 0; i < work.args.m; ++i) {
        const Block numbers = work.Numbers(i);
        const uint8_t* waiting = work.waiting[i][p];
        const __m512 total = kInt4 ? Simd::LoadWaiting(waiting)
                                   : numbers.Add(Simd::Zero(), Simd::LoadWaitingSums(waiting), scales.Of(0), 0, 0);
        output.template Store<Simd>(i, numbers.End(total, 0));
      }
    }
  }

  template <int kCount>
  static void Panels(const Args& args, int64_t panel) {
    Work work(args, panel, kCount);
    for (int64_t block = 0; block < work.quads; block += kBlockQuads) {
      const int64_t quads = work.quads - block < kBlockQuads ? work.quads - block : kBlockQuads;
      if constexpr (kDense) {
        FindDenseBlock(work, quads);
      } else {
        ExpandBlock(work, quads);
      }
      int64_t row = 0;
      for (; row + kRows < args.m; row += 2 * kRows) MultiplyBlock<2, kCount>(work, row, block, quads);
      if (row < args.m) MultiplyBlock<1, kCount>(work, row, block, quads);
    }
    Finish(work);
  }
};

}  // namespace
}  // namespace ortolan
