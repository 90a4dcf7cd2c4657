// Tables for SpreadBytes by shuffles. Local to each file that includes it.
#pragma once

#include <cstdint>

namespace ortolan::simd {
namespace {

// Of pairs of bytes that go to places a < b of a quad. A pair has the number 2 a + b: none has another's.
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
  // For each pair's number the bytes of the pair at places 0 … 3; none: the control of a shuffle with its top bit set.
  alignas(64) uint8_t control[16][4] = {};
  alignas(64) uint8_t quad[64] = {};  // where the quad begins, within 16 bytes
};
constexpr SpreadControl kSpreadControl;

}  // namespace
}  // namespace ortolan::simd
