// CPUs with AMX: the vectors of avx512bf16.h beside the tiles of amx_tiles.h. A test build may use those of avx2.h
// (ORTOLAN_AMX_ON_AVX2 in CMakeLists.txt), because there is no emulator for AVX-512.
#pragma once

#include "simd/amx_tiles.h"
#ifdef ORTOLAN_AMX_ON_AVX2
#include "simd/avx2.h"
#else
#include "simd/avx512bf16.h"
#endif

namespace ortolan::simd {
namespace {

#ifdef ORTOLAN_AMX_ON_AVX2
using BesideTiles = avx2;
#else
using BesideTiles = avx512bf16;
#endif

struct amx : BesideTiles {
  static constexpr bool kHasTiles = true;
};

}  // namespace
}  // namespace ortolan::simd
