// bf16 weights for targets with matrix products (pairs_loop.h). An instruction adds the products of inputs 0 and 1 to
// each other, then to the sum, and does the same with inputs 2 and 3. Sums have this order for any number of rows of x,
// one row included. Included by bf16_kernels.cc only; local to each.
#pragma once

#include "matmul/weights/bf16.h"

namespace ortolan {
namespace {

template <typename Simd>
  requires Simd::kRowPairs
struct Bf16Products<Simd> : RoundedToBf16<Simd> {
  using Columns = simd::Columns<Simd>;
  using Row = typename Columns::Bytes;
  static constexpr int kInputsTogether = 4;
  static typename Simd::Float DotEights(typename Simd::Float sums, const typename Simd::Bytes& weights,
                                        const typename Simd::Bytes& x) {
    return Simd::DotEightsBf16(sums, weights, x);
  }
};

// Also for one row.
template <typename Simd>
  requires Simd::kRowPairs
struct FewRowsKindOf<Bf16Weights<Simd, Storage::kTwoFour>> {
  using Type = Bf16Weights<Simd, Storage::kTwoFour>;
  static constexpr int64_t kMostRows = 1;
};

}  // namespace
}  // namespace ortolan
