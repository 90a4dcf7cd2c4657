// A call of a function of the vector API (ops/simd) on memory.
#pragma once

#include <cstdint>

#include "isa/features.h"

namespace ortolan {

struct SimdCall {
  static constexpr int64_t kBytes = 4096;  // size of each argument and of the result

  const char* function = nullptr;
  const uint8_t* in[4] = {};
  int64_t number = 0;
  uint8_t* out = nullptr;
};

struct SimdTarget {
  const char* name;
  Features needs;
  int64_t lanes;
  bool (*run)(const SimdCall&);  // false: the target lacks the function
  int64_t (*peak)(const char* product, int64_t rounds);
};

}  // namespace ortolan
