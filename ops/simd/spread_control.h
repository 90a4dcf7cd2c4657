// Shuffle tables for SpreadBytes and RepeatEachByte. Local to each file that includes it.
#pragma once

#include <cstdint>

namespace ortolan::simd {
namespace {

// Pairs of bytes move to positions a < b of a quad. 2 a + b identifies a pair uniquely.
struct SpreadControl {
  constexpr SpreadControl() {
    for (int b = 1; b < 4; ++b) {
      for (int a = 0; a < b; ++a) {
        for (int position = 0; position < 4; ++position)
          control[2 * a + b][position] = position == a ? 0 : position == b ? 1 : 0x80;
      }
    }
    for (int i = 0; i < 64; ++i) quad[i] = static_cast<uint8_t>(i % 16 / 4 * 4);
  }
  // For each pair, the source byte of positions 0 … 3; positions that get no byte have the top bit of their control
  // set.
  alignas(64) uint8_t control[16][4] = {};
  alignas(64) uint8_t quad[64] = {};  // offset of the quad within 16 bytes
};
constexpr SpreadControl kSpreadControl;

// Byte i of each quad is byte `quad` of the source.
struct RepeatControl {
  constexpr RepeatControl() {
    for (int i = 0; i < 64; ++i) at[i] = static_cast<uint8_t>(i / 4);
  }
  alignas(64) uint8_t at[64] = {};
};
constexpr RepeatControl kRepeatControl;

}  // namespace
}  // namespace ortolan::simd
