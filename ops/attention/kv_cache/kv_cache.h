// What is done with the caches of keys and values beside attention itself: formats/key_code_cache.h and value_cache.h
// say how they are laid out.
#pragma once

#include <cstdint>
#include <span>

#include "formats/key_code_cache.h"
#include "isa/features.h"

namespace ortolan {

struct KvCacheKernel {
  const char* name;
  Features needs;
  EncodeKeysFn* encode_keys;
};

// The rows of kernels.inc that this build has, best first; the last one runs on any CPU.
std::span<const KvCacheKernel> KvCacheKernels();

}  // namespace ortolan
