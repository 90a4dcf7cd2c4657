// K-quants (k_quant_loop.h) on AMX tiles. s (q - zero_point) does not fit a byte, so it is split into bytes a and b:
//
//     s (q - zero_point) = 256 a + b,   -16 <= a <= 16,   0 <= b < 256
//     D_g                = 256 (sum over the l of group g of q_il a[l, j])  + sum over the l of g of q_il b[l, j]
//
// Each tile of x is multiplied with a tile of a and a tile of b. The sums are exact in int32: a group has at most 256
// inputs. They are scaled while the next products are computed, because a load right after the store of a tile waits
// for it. Included by k_quant_kernels.cc only; local to each.
#pragma once

#include <cstdint>
#include <utility>

#include "matmul/amx_loop.h"
#include "matmul/k_quant_loop.h"
#include "simd/amx_tiles.h"

namespace ortolan {
namespace {

template <typename Simd>
class KQuantTiles {
  using Columns = simd::Columns<Simd>;
  using Ints = typename Columns::Ints;
  using Loop = KQuantLoop<Simd>;
  using Shape = typename Loop::Shape;
  using Panel = typename Loop::Panel;
  static constexpr int kPair = 2;  // panels that are multiplied with rows of x while these are in the cache

 public:
  static constexpr int64_t kRowBlock = kAmxRowTile;
  static constexpr int kPanelsTogether = kPair;
  static constexpr int64_t kSpeed = 2;

  static void Pack(const MatMulWeight& weight, const float* x, int64_t x_row_bytes, int64_t m, void* packed) {
    KQuantRows<Simd>::PackBlocks(weight, x, x_row_bytes, m, 1, packed);
    PadAmxRows(packed, m, KQuantRows<Simd>::PackedRowBytes(weight));
  }

  static void Multiply(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
    const GroupWeight& w = WeightOf<GroupWeight>(args);
    const Shape shape(w);
    TileConfig config;
    for (int tile = 0; tile < kTiles; ++tile) config.Set(tile, kMaxTileRows, kMaxTileColsb);
    LoadTileConfig(config);
    const auto run = [&]<int kBits>() {
      for (int64_t row = 0; row < args.m; row += kMostRows) {
        const MatMulArgs part = RowsOf(args, row, kMostRows, shape.row_bytes);
        int64_t panel = panel_begin;
        for (; part.m >= kRowsOfPairs && panel + kPair <= panel_end; panel += kPair) {
          MultiplyPanels<kBits>(shape, part, panel, std::make_integer_sequence<int, kPair>());
        }
        for (; panel < panel_end; ++panel) {
          MultiplyPanels<kBits>(shape, part, panel, std::make_integer_sequence<int, 1>());
        }
      }
    };
    if (w.view.subgroups.bits == 4) {
      run.template operator()<4>();
    } else if (w.view.subgroups.bits == 5) {
      run.template operator()<5>();
    } else {
      run.template operator()<6>();
    }
    TileRelease();
  }

 private:
  static constexpr int64_t kTileInputs = kMaxTileColsb;
  static constexpr int64_t kTileSpans = kTileInputs / kSpanInputs;
  static constexpr int64_t kMostTiles = 256 / kTileInputs;  // of a group
  static constexpr int kMostSpans = kMostTiles * kTileSpans;
  static constexpr int kUsualMinimums = 4;  // minimums of two subgroups each in a group of Q4_K or Q5_K
  // Rows whose totals wait on the stack: 16 KB for each panel.
  static constexpr int64_t kMostRows = 256;
  static constexpr int64_t kRows = kAmxRowTile;
  // With fewer rows, most of the time is spent on weights, and one panel at a time is faster.
  static constexpr int64_t kRowsOfPairs = 64;
  enum Part { kLow, kHigh, kParts };

  // A panel, and the tiles of the group that is multiplied.
  struct Work {
    Work(const Shape& shape, const MatMulArgs& args, int64_t index) : panel(shape, args, index) {}

    Panel panel;
    alignas(64) uint8_t tiles[kMostTiles][kParts][kMaxTileRows][kMaxTileColsb];
    // Minimums of this group and of the one before, whose last sums may still wait.
    alignas(64) int32_t minimums[2][kMostSpans][kPanelColumns];
    alignas(64) float totals[kMostRows][kPanelColumns];
  };

  // The products of a group with up to two row tiles, until they are added to the totals.
  struct alignas(64) Sums {
    int32_t of[2 * kRows][kParts][kPanelColumns];
    Work* work = nullptr;
    int64_t group = 0;
    int64_t row = 0;
    int64_t rows = 0;
    int64_t added = 0;  // rows that were added
  };
  struct WaitingSums {
    Sums at[2];
    int newer = 0;
  };

  // Split s (q - zero_point) of four inputs into a row of both tiles.
  static void StoreParts(uint8_t (&tile)[kParts][kMaxTileRows][kMaxTileColsb], int64_t row,
                         const typename Columns::Bytes& q, typename Simd::Bytes zero_point, const Ints& scales) {
    typename Columns::Bytes parts[kParts];
    for (int i = 0; i < Columns::kRegisters; ++i) {
      const auto centered = Simd::SubtractBytes(q.at[i], zero_point);
      const auto even = Simd::MultiplyWords(Simd::EvenBytes(centered), scales.at[i]);
      const auto odd = Simd::MultiplyWords(Simd::OddBytes(centered), scales.at[i]);
      const auto even_bytes = Simd::SetInt(0x00ff00ff);
      parts[kLow].at[i] = Simd::SelectBits(even_bytes, even, Simd::template ShiftLeftInt<8>(odd));
      parts[kHigh].at[i] = Simd::SelectBits(even_bytes, Simd::template ShiftRightInt<8>(even), odd);
    }
    Columns::StoreBytes(tile[kLow][row], parts[kLow]);
    Columns::StoreBytes(tile[kHigh][row], parts[kHigh]);
  }

  template <int kBits>
  static void Expand(const Shape& shape, KQuantStream<Simd, kBits>& position, int64_t group, int64_t tiles,
                     Work& work) {
    KQuantStream<Simd, kBits> stream = position;  // in registers: stores cannot change it
    const auto zero_point = Simd::SetBytes(static_cast<int>(shape.weight.view.subgroups.zero_point));
    for (int64_t span = 0; span < tiles * kTileSpans; ++span) {
      if (shape.StartsMinimum(span)) {
        Columns::StoreInt(work.minimums[group % 2][shape.MinimumOf(span)], stream.Minimums());
      }
      auto& tile = work.tiles[span / kTileSpans];
      const int64_t first = span % kTileSpans * kStepsOfSpan * kStepRows;
      Ints scales = stream.PairsOfScales(0);
      stream.template Span<true>([&](int row, const auto& q) { StoreParts(tile, first + row, q, zero_point, scales); },
                                 [&](int step) {
                                   if (step == 0) scales = stream.PairsOfScales(1);
                                 });
    }
    position = stream;
  }

  // Add up to `rows` of the waiting sums to the totals.
  __attribute__((always_inline)) static void AddSums(Sums& sums, int64_t rows) {
    const int64_t begin = sums.added;
    sums.added = sums.rows - begin < rows ? sums.rows : begin + rows;
    if (sums.added > begin) AddRows(sums, begin);
  }

  static void AddRows(const Sums& sums, int64_t begin) {
    const Shape& shape = sums.work->panel.shape;
    if (!shape.minimums) return AddRows<0>(sums, begin, 0);
    const int64_t left = shape.spans - sums.group * shape.group_spans;
    const int64_t count = shape.MinimumOf(left < shape.group_spans ? left : shape.group_spans);
    if (count == kUsualMinimums) return AddRows<kUsualMinimums>(sums, begin, count);
    AddRows<kMostSpans>(sums, begin, count);
  }

  // kMinimums: minimums of the group; kMostSpans: any number.
  template <int kMinimums>
  static void AddRows(const Sums& sums, int64_t begin, int64_t minimums) {
    Work& work = *sums.work;
    const Panel& p = work.panel;
    const Shape& shape = p.shape;
    const auto scales = p.scales.Of(sums.group).scales;
    const auto minimum_scales = kMinimums > 0 ? p.minimums.Of(sums.group).scales : scales;
    const auto& of_weights = work.minimums[sums.group % 2];
    const int64_t first = shape.MinimumOf(sums.group * shape.group_spans);
    // Copies, because the compiler must assume that stores to the totals change them.
    const int64_t end = sums.added, row_bytes = shape.row_bytes, to_terms = shape.groups - sums.group + first;
    const char* row = reinterpret_cast<const char*>(p.BlockAt(sums.row + begin, 1).scales + sums.group);
    float* total = work.totals[sums.row + begin];
    for (int64_t i = begin; i < end; ++i, row += row_bytes, total += kPanelColumns) {
      const float* const x_scale = reinterpret_cast<const float*>(row);
      const auto low = Columns::LoadInt(sums.of[i][kLow]), high = Columns::LoadInt(sums.of[i][kHigh]);
      const Ints sum = Columns::template Of<Ints>(
          [&](int j) { return Simd::AddInt(low.at[j], Simd::template ShiftLeftInt<8>(high.at[j])); });
      const auto of_x = Columns::Set(*x_scale);
      auto to = Columns::MultiplyAdd(Columns::ToFloat(sum), Columns::Multiply(scales, of_x), Columns::Load(total));
      if constexpr (kMinimums > 0) {
        const int32_t* const terms = reinterpret_cast<const int32_t*>(x_scale) + to_terms;
        Ints of_row = Columns::SetInt(0);
#pragma GCC unroll 4
        for (int at = 0; at < (kMinimums == kUsualMinimums ? kUsualMinimums : minimums); ++at) {
          const Ints t = Columns::LoadInt(of_weights[at]);
          of_row = Columns::template Of<Ints>(
              [&](int j) { return Simd::DotPair(of_row.at[j], t.at[j], Simd::SetInt(terms[at])); });
        }
        to = Columns::MultiplyAdd(Columns::ToFloat(of_row), Columns::Multiply(minimum_scales, of_x), to);
      }
      Columns::Store(total, to);
    }
  }

  // Multiply the group's tiles with kRowTiles x 16 rows of x. Tiles 0 to 3 hold sums [row tile][part], 4 and 5 rows of
  // x, 6 and 7 weights.
  template <int kRowTiles>
  static void MultiplyRows(Work& work, WaitingSums& waiting, int64_t group, int64_t tiles, int64_t row) {
    const Panel& p = work.panel;
    const int64_t stride = p.shape.row_bytes;
    const char* x = reinterpret_cast<const char*>(p.BlockAt(row, 1).x) + group * p.shape.group_spans * kSpanInputs;
    TileZero<0>();
    TileZero<1>();
    if constexpr (kRowTiles > 1) {
      TileZero<2>();
      TileZero<3>();
    }
    const int64_t rows_a_tile = (2 * kRows + tiles - 1) / tiles;
    for (int64_t t = 0; t < tiles; ++t, x += kTileInputs) {
      TileLoad<4>(x, stride);
      TileLoad<6>(work.tiles[t][kLow], kMaxTileColsb);
      TileDpBsud<0, 4, 6>();
      TileLoad<7>(work.tiles[t][kHigh], kMaxTileColsb);
      TileDpBssd<1, 4, 7>();
      if constexpr (kRowTiles > 1) {
        TileLoad<5>(x + kRows * stride, stride);
        TileDpBsud<2, 5, 6>();
        TileDpBssd<3, 5, 7>();
      }
      AddSums(waiting.at[waiting.newer], rows_a_tile);
    }
    waiting.newer ^= 1;
    Sums& sums = waiting.at[waiting.newer];
    sums.work = &work;
    sums.group = group;
    sums.row = row;
    sums.added = 0;
    sums.rows = p.args.m - row < kRowTiles * kRows ? p.args.m - row : kRowTiles * kRows;
    TileStore<0>(sums.of[0][kLow], sizeof(sums.of[0]));
    TileStore<1>(sums.of[0][kHigh], sizeof(sums.of[0]));
    if constexpr (kRowTiles > 1) {
      TileStore<2>(sums.of[kRows][kLow], sizeof(sums.of[0]));
      TileStore<3>(sums.of[kRows][kHigh], sizeof(sums.of[0]));
    }
  }

  // Multiply one or two panels. Rows of x are in the cache for the second one.
  template <int kBits, int... kIndex>
  static void MultiplyPanels(const Shape& shape, const MatMulArgs& args, int64_t first,
                             std::integer_sequence<int, kIndex...>) {
    Work works[] = {Work(shape, args, first + kIndex)...};
    KQuantStream<Simd, kBits> streams[] = {
        KQuantStream<Simd, kBits>(shape.weight, first + kIndex, ActiveTuning().ahead)...};
    WaitingSums waiting;
    for (Work& work : works) {
      for (int64_t i = 0; i < args.m; ++i) Columns::Store(work.totals[i], Columns::Set(0.0f));
    }
    for (int64_t group = 0; group < shape.groups; ++group) {
      const int64_t left = shape.spans - group * shape.group_spans;
      const int64_t tiles = (left < shape.group_spans ? left : shape.group_spans) / kTileSpans;
      (Expand<kBits>(shape, streams[kIndex], group, tiles, works[kIndex]), ...);
      int64_t row = 0;
      for (; row + kRows < args.m; row += 2 * kRows) {
        (MultiplyRows<2>(works[kIndex], waiting, group, tiles, row), ...);
      }
      if (row < args.m) (MultiplyRows<1>(works[kIndex], waiting, group, tiles, row), ...);
    }
    AddSums(waiting.at[waiting.newer], 2 * kRows);
    for (int64_t i = 0; i < args.m; ++i) {
      for (const Work& work : works) work.panel.output.StoreWithBias(i, Columns::Load(work.totals[i]));
    }
  }
};

}  // namespace
}  // namespace ortolan
