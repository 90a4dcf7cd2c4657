// AVX-512 with BF16: the vectors of avx512.h, and products of pairs of bf16.
#pragma once

#include "simd/avx512.h"

namespace ortolan::simd {
namespace {

struct avx512bf16 : avx512 {};

}  // namespace
}  // namespace ortolan::simd
