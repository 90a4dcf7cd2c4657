// bf16 weights where products of matrices take them (pairs_loop.h): an instruction adds the products of inputs 0 and 1
// to each other, then to the sum, then likewise those of inputs 2 and 3. Any number of rows of x goes this way, one row
// too: sums have one order. Included by bf16_kernels.cc only; local to each.
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

// One row, too.
template <typename Simd>
  requires Simd::kRowPairs
struct FewRowsKindOf<Bf16Weights<Simd, Storage::kTwoFour>> {
  using Type = Bf16Weights<Simd, Storage::kTwoFour>;
  static constexpr int64_t kMostRows = 1;
};

}  // namespace
}  // namespace ortolan
