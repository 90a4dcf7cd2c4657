// How a kernel lays out u8 tokens: in blocks of 64 tokens; of what is left a block of 64 if that is more than 48, else
// one of 32 if more than 16, then one of 16.
//
//     [k][width] a block: the block that begins with token i stands where row i of PackedTokenBytes does
//
// Of blocks of 64, token 16 v + 4 a + b stands at 16 a + 4 v + b: byte unpacks leave tokens 16 v, 16 v + 1, … in a
// vector. All others have their tokens in order. Kernels are 10 to 15 % faster on blocks aligned to 64 bytes.
//
// What is in the places of missing tokens does not matter.
#pragma once

#include <cstdint>

namespace ortolan {

inline constexpr int64_t kTokenBlock = 64;

// Tokens of the block that begins where `left` are left.
inline constexpr int64_t TokenBlockWidth(int64_t left) { return left > 48 ? 64 : left > 16 ? 32 : 16; }

// The token, counted from the block's first one, that stands at this place of a block.
constexpr int64_t TokenAt(int64_t width, int64_t place) {
  return width == kTokenBlock ? place % 16 / 4 * 16 + place / 16 * 4 + place % 4 : place;
}

}  // namespace ortolan
