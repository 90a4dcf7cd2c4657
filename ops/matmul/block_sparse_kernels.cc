// Block-sparse weights with the vectors of a target.
#include "isa/tuning.h"
#include "matmul/few_rows.h"
#include "matmul/few_tokens.h"
#include "simd/target.h"

namespace ortolan {
namespace {

// Vectors of tokens in the largest block. With rows of bytes, the sums of four outputs take half of the registers. The
// sizes of smaller blocks divide it.
template <typename Simd>
constexpr int kMostVectors = Simd::kRegisters == 32 && sizeof(typename Simd::RowElement) == 1 ? 4 : 2;
template <typename Simd>
constexpr int64_t kMostBlock = kMostVectors<Simd> * Simd::kLanes;
static_assert(kMostRowBlock % kMostBlock<Simd> == 0);

// Call body(block, first token, tokens) for the blocks of m tokens.
template <typename Simd, typename Body>
void ForEachBlock(int64_t m, const Body& body) {
  constexpr int64_t kLanes = Simd::kLanes;
  for (int64_t first = 0; first < m;) {
    const int64_t left = m - first;
    const auto run = [&](auto block) {
      constexpr int64_t kWidth = decltype(block)::kWidth;
      body(block, first, left < kWidth ? left : kWidth);
      first += kWidth;
    };
    if constexpr (Simd::kGathersBytes) {
      if (left == 1) return run(FewTokens<Simd, 1>{});
      if (left == 2) return run(FewTokens<Simd, 2>{});
      if (left == 3) return run(FewTokens<Simd, 3>{});
      if (left == 4) return run(FewTokens<Simd, 4>{});
    } else if constexpr (Simd::kDotsFewRows) {
      if (left == 1) return run(FewRows<Simd, 1>{});
      if (left == 2) return run(FewRows<Simd, 2>{});
      if (left <= 4) return run(FewRows<Simd, 4>{});
    }
    if constexpr (kMostVectors<Simd> == 4) {
      if (left > 3 * kLanes) {
        run(TokenBlock<Simd, 4>{});
        continue;
      }
    }
    if (left > kLanes) {
      run(TokenBlock<Simd, 2>{});
    } else {
      run(TokenBlock<Simd, 1>{});
    }
  }
}

int64_t TokenBytes(const MatMulWeight& w) { return PackedTokenBytes<Simd::RowElement>(w.k); }

void PackBlockSparse(const MatMulWeight& w, const float* x, int64_t x_row_bytes, int64_t m, void* packed) {
  const FixedRange* fixed = static_cast<const BlockSparseWeight&>(w).Fixed();
  ForEachBlock<Simd>(m, [&](auto block, int64_t first, int64_t count) {
    decltype(block)::Pack(AtByte(x, first * x_row_bytes), x_row_bytes, count, w.k, fixed,
                          static_cast<uint8_t*>(packed) + first * TokenBytes(w));
  });
}

void MultiplyBlockSparse(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
  const int64_t ahead = ActiveTuning().ahead.sparse4x1;
  ForEachBlock<Simd>(args.m, [&](auto block, int64_t first, int64_t count) {
    const uint8_t* x = static_cast<const uint8_t*>(args.x) + first * TokenBytes(*args.w);
    decltype(block)::Multiply(args, x, first, count, ahead, panel_begin, panel_end);
  });
}

void MultiplyHidden(const HiddenLayerArgs& args, int64_t panel_begin, int64_t panel_end) {
  const int64_t ahead = ActiveTuning().ahead.sparse4x1;
  const HiddenLayerWeight& layer = WeightOf<HiddenLayerWeight>(args);
  const Simd::ByteTable table(layer.table);
  ForEachBlock<Simd>(args.m, [&](auto block, int64_t first, int64_t) {
    const uint8_t* x = static_cast<const uint8_t*>(args.x) + first * TokenBytes(layer);
    uint8_t* next = static_cast<uint8_t*>(args.next) + first * PackedTokenBytes<Simd::RowElement>(layer.n);
    decltype(block)::MultiplyHidden(args, x, table, next, ahead, panel_begin, panel_end);
    if (panel_begin == 0) decltype(block)::SetRanges(next, layer.n, layer.table_y);
  });
}

}  // namespace

namespace ORTOLAN_TARGET {

extern const MatMulFunctions kBlockSparse;
constexpr MatMulFunctions kBlockSparse{kMostBlock<Simd>, kMostSparseInputs,    &TokenBytes,
                                       &PackBlockSparse, &MultiplyBlockSparse, &MultiplyHidden};

}  // namespace ORTOLAN_TARGET
}  // namespace ortolan
