// Tables for expansion by shuffles, for targets without an expand instruction. Local to each file that includes it.
#pragma once

#include <cstdint>

namespace ortolan::simd {
namespace {

// For each byte of mask bits, the shuffle control that moves the next stored value of kBytes bytes to every position
// whose bit is set. Other positions get zero: their control byte has its top bit set.
template <int kBytes>
struct ExpandControls {
  constexpr ExpandControls() {
    for (int mask = 0; mask < 256; ++mask) {
      int next = 0;
      for (int position = 0; position < 8; ++position) {
        const bool stored = ((mask >> position) & 1) != 0;
        for (int i = 0; i < kBytes; ++i) {
          control[mask][position * kBytes + i] = static_cast<uint8_t>(stored ? next++ : 0x80);
        }
      }
    }
  }
  alignas(64) uint8_t control[256][8 * kBytes] = {};
};

constexpr ExpandControls<1> kExpandByteControls;
constexpr ExpandControls<2> kExpandWordControls;

}  // namespace
}  // namespace ortolan::simd
