// IEEE float16 as its 16 bits. Both conversions are branch-free, so that compilers vectorize loops.
#pragma once

#include <bit>
#include <cstdint>

namespace ortolan {

inline float HalfToFloat(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  const uint32_t normal = (magnitude << 13) + (uint32_t{127 - 15} << 23);
  // Infinity and NaN keep their mantissa below the largest exponent.
  const uint32_t special = (magnitude << 13) | 0x7f800000u;
  // An integer times 2^-24, because a CPU may flush subnormal floats to 0.
  const uint32_t subnormal = std::bit_cast<uint32_t>(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  const uint32_t finite = magnitude < 0x0400u ? subnormal : normal;
  return std::bit_cast<float>(sign | (magnitude >= 0x7c00u ? special : finite));
}

// Rounds to nearest even. NaN stays NaN (quiet); overflow becomes infinity.
inline uint16_t FloatToHalf(float value) {
  constexpr uint32_t kInfinity = 0x7f800000u;
  constexpr uint32_t kTooLarge = uint32_t{127 + 16} << 23;        // 65536
  constexpr uint32_t kSmallestNormal = uint32_t{127 - 14} << 23;  // 2^-14
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  // The low bits of the sum with 0.5 are the rounded subnormal.
  const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (magnitude - (uint32_t{127 - 15} << 23) + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t finite = magnitude < kSmallestNormal ? subnormal : normal;
  const uint32_t special = magnitude > kInfinity ? 0x7e00u : 0x7c00u;
  return static_cast<uint16_t>(((bits >> 16) & 0x8000u) | (magnitude >= kTooLarge ? special : finite));
}

}  // namespace ortolan
