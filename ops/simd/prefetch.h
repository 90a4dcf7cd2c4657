// Prefetching. Local to each file that includes it.
#pragma once

#include <cstdint>

namespace ortolan {
namespace {

constexpr int64_t kLineBytes = 64;

// Asks for the cache lines of these bytes, which need not exist. Always inline: gcc 12 takes a function that does
// nothing but this for one that does nothing, and drops its calls.
__attribute__((always_inline)) inline void PrefetchLines(const uint8_t* from, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += kLineBytes) __builtin_prefetch(from + line);
}
// The same, to the second level of the cache.
__attribute__((always_inline)) inline void PrefetchForLater(const uint8_t* from, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += kLineBytes) __builtin_prefetch(from + line, 0, 2);
}

}  // namespace
}  // namespace ortolan
