// Lists of the bits that are set in a mask, in ascending order; by an instruction where a column has one (Simd gives
// the function of the same name). Local to each file that includes it.
#pragma once

#include <cstdint>

namespace ortolan {
namespace {

// first + the numbers of the bits, to list, which has space for 64 in any case. Returns how many there are.
template <typename Simd, typename Number>
int64_t ListBits(uint64_t bits, Number first, Number* list) {
  if constexpr (requires { Simd::ListBits(bits, first, list); }) {
    return Simd::ListBits(bits, first, list);
  } else {
    int64_t count = 0;
    for (; bits != 0; bits &= bits - 1) list[count++] = static_cast<Number>(first + __builtin_ctzll(bits));
    return count;
  }
}

// The numbers of `from` whose bits are set, to `to`, which has space for 64 in any case; no others are read.
template <typename Simd>
void CompressFloats(uint64_t bits, const float* from, float* to) {
  if constexpr (requires { Simd::CompressFloats(bits, from, to); }) {
    Simd::CompressFloats(bits, from, to);
  } else {
    for (; bits != 0; bits &= bits - 1) *to++ = from[__builtin_ctzll(bits)];
  }
}

}  // namespace
}  // namespace ortolan
