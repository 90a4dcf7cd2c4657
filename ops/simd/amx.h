// CPUs with AMX: the vectors of avx512bf16.h beside the tiles of amx_tiles.h.
#pragma once

#include "simd/amx_tiles.h"
#include "simd/avx512bf16.h"

namespace ortolan::simd {
namespace {

struct amx : avx512bf16 {
  static constexpr bool kHasTiles = true;
};

}  // namespace
}  // namespace ortolan::simd
