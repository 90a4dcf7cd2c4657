// The rate at which one thread can read memory: what a memory-bound kernel is measured against.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ortolan {

// Reads `bytes` (a multiple of 128) once, in order, as fast as plain vector loads can, and returns a checksum so that
// no compiler can leave the reads out. Prefetches `prefetch_bytes` ahead, also past the end (a prefetch cannot fault).
uint64_t StreamRead(const uint8_t* data, size_t bytes, size_t prefetch_bytes);

}  // namespace ortolan
