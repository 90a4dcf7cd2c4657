// bf16 weights where products of matrices take them (pairs_loop.h): an instruction adds the products of inputs 0 and 1
// to each other, then to the sum, then likewise those of inputs 2 and 3. Any number of rows of x goes this way, one row
// too: sums have one order. Included by bf16_kernels.cc only; local to each.
#pragma once

#include "matmul/weights/bf16.h"

namespace ortolan {
namespace {

template <typename Simd>
  requires Simd::kRowPairs
struct Bf16Products<Simd> {
  using Columns = simd::Columns<Simd>;
  using Activation = uint16_t;
  using Row = typename Columns::Bytes;
  static constexpr int kInputsTogether = 4;
  static constexpr int64_t kStoredBytes = 64;
  static constexpr int kRowBlock = kHalfOfRegisters<Simd>;

  static void Round(const float* x, int64_t left, uint16_t* to) {
    for (int64_t l = 0; l < kTileInputs; l += 2 * Simd::kLanes) {
      const auto low = Simd::LoadSome(x + l, left - l);
      const auto high = Simd::LoadSome(x + l + Simd::kLanes, left - l - Simd::kLanes);
      Simd::StoreBytes(reinterpret_cast<uint8_t*>(to + l), Simd::PackBf16(low, high));
    }
  }
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
