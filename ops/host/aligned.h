// Sizes and addresses of scratch memory, rounded to cache lines.
#pragma once

#include <cstdint>

namespace ortolan {

inline constexpr int64_t kScratchAlignment = 64;

constexpr int64_t Aligned(int64_t bytes) {
  return (bytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
}

// The first aligned address at or after data. The memory must have kScratchAlignment bytes more than are used.
inline char* AlignedAddress(void* data) {
  return reinterpret_cast<char*>(Aligned(static_cast<int64_t>(reinterpret_cast<uintptr_t>(data))));
}

}  // namespace ortolan
