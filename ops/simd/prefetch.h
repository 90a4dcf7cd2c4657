// Prefetching. Local to each file that includes it.
#pragma once

#include <cstdint>

namespace ortolan {
namespace {

constexpr int64_t kLineBytes = 64;

// Prefetch the cache lines of a range that need not exist. Always inline: gcc 12 treats a function that only prefetches
// as empty and drops its calls.
__attribute__((always_inline)) inline void PrefetchLines(const uint8_t* from, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += kLineBytes) __builtin_prefetch(from + line);
}
// Prefetch the range to the level-2 cache.
__attribute__((always_inline)) inline void PrefetchForLater(const uint8_t* from, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += kLineBytes) __builtin_prefetch(from + line, 0, 2);
}

}  // namespace
}  // namespace ortolan
