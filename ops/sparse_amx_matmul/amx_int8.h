// AMX kernels for int8 and int4 weights: as for bf16 (x86_amx.cc), by int8 products. Included by x86_amx.cc only.
//
// int4 ends a sum at each group, so a tile product takes the inputs of one group at most: groups of 32 use tiles of
// half the depth, and the sums of a group leave the tiles to be scaled.
#pragma once

#include <immintrin.h>

#include "isa/amx.h"
#include "panels/avx512.h"
#include "sparse_amx_matmul/sparse_int8_format.h"

namespace ortolan {
namespace {

// Rows are packed one after another: blocks of one row.
struct AmxInt8Rows {
  static constexpr int kRowBlock = 1;
  static constexpr uint32_t kInt8Bias = 0;
  static constexpr uint32_t kInt4Bias = 0;
  static uint32_t MaxAbsBits(const float* x, int64_t k) { return Avx512MaxAbsBits(x, k); }
  static int32_t Quantize32(const float* x, int64_t left, float factor, int8_t* q) {
    return Avx512Quantize32(x, left, factor, q);
  }
};

// kBits: of a weight, 8 or 4.
template <int kBits>
class AmxInt8Loop {
  static constexpr bool kInt4 = kBits == 4;
  static constexpr const BitmapLayout& kLayout = kInt4 ? kInt4Bitmap : kInt8Bitmap;

 public:
  static void Run(const SparseInt8MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
    TileConfig config;
    const int step_quads = StepQuads(args.group);
    for (int tile = 0; tile < 4; ++tile) config.Set(tile, kMaxTileRows, kMaxTileColsb);
    for (int tile = 4; tile < 6; ++tile) config.Set(tile, kMaxTileRows, 4 * step_quads);
    for (int tile = 6; tile < 8; ++tile) config.Set(tile, step_quads, kMaxTileColsb);
    LoadTileConfig(config);
    const int64_t row_bytes = SparseInt8MatMulKernel::PackedRowBytes(args.w.k, args.group);
    for (int64_t row = 0; row < args.m; row += kMostRows) {
      const SparseInt8MatMulArgs part = RowsOf(args, row, kMostRows, row_bytes);
      int64_t panel = panel_begin;
      for (; panel + kPanels <= panel_end; panel += kPanels) Panels<kPanels>(part, panel);
      if (panel < panel_end) Panels<1>(part, panel);
    }
    TileRelease();
  }

 private:
  static constexpr int kPanels = 2;
  static constexpr int64_t kRows = 16;  // of a tile of x
  // 16 tiles of two panels: 32 KB. Whole groups.
  static constexpr int64_t kBlockQuads = 16 * kTileRows;
  // Their sums wait on the stack: 32 KB.
  static constexpr int64_t kMostRows = 256;
  static constexpr int64_t kPrefetchBytes = 12288;
  static constexpr int64_t kLineBytes = 64;

  static constexpr int StepQuads(int64_t group) { return group == 32 ? 8 : 16; }

  struct Work {
    Work(const SparseInt8MatMulArgs& a, int64_t first, int count_)
        : args(a),
          first_panel(first),
          count(count_),
          quads(kInt8Bitmap.Tiles(a.w.k) * kTileRows),
          step_quads(StepQuads(a.group)),
          group_quads(a.group == kWholeColumn ? quads : a.group / kInt8Bitmap.row_inputs),
          row_bytes(SparseInt8MatMulKernel::PackedRowBytes(a.w.k, a.group)) {
      for (int p = 0; p < count; ++p) {
        masks[p] = a.w.PanelMasks(kLayout, first + p);
        values[p][0] = values[p][1] = a.w.PanelValues(kLayout, first + p);
      }
    }
    __mmask16 Columns(int p) const { return FirstLanes(args.w.n - (first_panel + p) * kPanelColumns); }

    const SparseInt8MatMulArgs& args;
    int64_t first_panel;
    int count;
    int64_t quads;
    int64_t step_quads;
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
      const __m512 scale = LoadBf16Scales(work.args.Scales(work.first_panel + p, group));
      for (int64_t r = 0; r < kRows; ++r) {
        uint8_t* to = work.waiting[row + r][p];
        const __m512 total = group == 0 ? _mm512_setzero_ps() : _mm512_load_ps(to);
        _mm512_store_ps(to, _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_load_si512(sums.at[r])), scale, total));
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
    const bool fetch = !kInt4 && work.args.w.IsDense() && row == 0;
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
    const int64_t groups = ScaleRows(work.args.w.k, work.args.group);
    for (int64_t first = 0; first < quads; first += step) {
      // Behind the last group nothing is stored.
      if (kInt4 && (block_first + first) / work.group_quads == groups) break;
      MultiplySteps<kRowTiles, kCount>(work, row, block_first, first, quads - first < step ? quads - first : step);
    }
  }

  static void Finish(const Work& work) {
    for (int p = 0; p < work.count; ++p) {
      const __mmask16 columns = work.Columns(p);
      const int64_t column = (work.first_panel + p) * kPanelColumns;
      const __m512 bias =
          work.args.bias == nullptr ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(columns, work.args.bias + column);
      const __m512 scales = kInt4 ? _mm512_setzero_ps() : LoadFloatScales(work.args.Scales(work.first_panel + p, 0));
      for (int64_t i = 0; i < work.args.m; ++i) {
        const char* x = static_cast<const char*>(work.args.x) + i * work.row_bytes;
        float x_scale;
        __builtin_memcpy(&x_scale, x + kInt8Bitmap.PaddedK(work.args.w.k), sizeof(x_scale));
        __m512 scale = _mm512_set1_ps(x_scale);
        __m512 sum;
        if constexpr (kInt4) {
          sum = _mm512_load_ps(work.waiting[i][p]);
        } else {
          sum = _mm512_cvtepi32_ps(_mm512_load_si512(work.waiting[i][p]));
          scale = _mm512_mul_ps(scales, scale);
        }
        _mm512_mask_storeu_ps(work.args.YRow(i) + column, columns, _mm512_fmadd_ps(sum, scale, bias));
      }
    }
  }

  template <int kCount>
  static void Panels(const SparseInt8MatMulArgs& args, int64_t panel) {
    Work work(args, panel, kCount);
    for (int64_t block = 0; block < work.quads; block += kBlockQuads) {
      const int64_t quads = work.quads - block < kBlockQuads ? work.quads - block : kBlockQuads;
      if (args.w.IsDense()) {
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
