// bfloat16 as its 16 bits: the upper half of an IEEE float32.
#pragma once

#include <bit>
#include <cstdint>

namespace ortolan {

// Rounds to nearest even. NaN stays NaN (quiet); overflow becomes infinity.
inline uint16_t RoundToBf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x0040u);
  const uint32_t to_even = 0x7fffu + ((bits >> 16) & 1u);
  return static_cast<uint16_t>((bits + to_even) >> 16);
}

inline float Bf16ToFloat(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

}  // namespace ortolan
