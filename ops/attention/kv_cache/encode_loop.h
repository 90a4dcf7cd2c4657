// Encodes keys (encode_keys of kv_cache.h), for all targets. Included only by kernels.cc; local to each target.
//
// Lanes are sub-quantizers: the centroids of kLanes sub-quantizers are transposed, in registers if they fit, and then
// applied to all keys. The codebook is not stored transposed, because the decode step that follows reads it as it is: a
// second copy would only take cache space.
#pragma once

#include "attention/kv_cache/key_block.h"
#include "attention/kv_cache/kv_cache.h"
#include "simd/at_byte.h"
#include "simd/scalar.h"

namespace ortolan {
namespace {

template <typename Simd, int kDSub>
void EncodeGroups(int64_t parts, const float* codebook, const float* keys, int64_t key_row_bytes, int64_t count,
                  uint8_t* codes) {
  using Float = typename Simd::Float;
  constexpr int64_t kLanes = Simd::kLanes;
  constexpr int64_t kColumns = kCentroids * kDSub;
  for (int64_t first = 0; first < parts; first += kLanes) {
    const int64_t part = first + kLanes < parts ? first : parts - kLanes;  // the last two groups may overlap
    Float centroids[kColumns];
#pragma GCC unroll 8
    for (int64_t column = 0; column < kColumns; column += kLanes) {
      Float square[kLanes];
#pragma GCC unroll 16
      for (int64_t i = 0; i < kLanes; ++i) square[i] = Simd::Load(codebook + (part + i) * kColumns + column);
      Simd::Transpose(square);
#pragma GCC unroll 16
      for (int64_t i = 0; i < kLanes; ++i) centroids[column + i] = square[i];
    }
    for (int64_t key = 0; key < count; ++key) {
      const float* from = AtByte(keys, key * key_row_bytes);
      Float values[kDSub];
#pragma GCC unroll 4
      for (int d = 0; d < kDSub; ++d) {
        const float* at = from + part * kDSub + d;
        values[d] = kDSub == 1 ? Simd::Load(at) : Simd::LoadStrided(at, kDSub);
      }
      Float least = Simd::Set(__builtin_inff());
      Float best = Simd::Set(0.0f);
#pragma GCC unroll 16
      for (int64_t c = 0; c < kCentroids; ++c) {
        Float distance;
#pragma GCC unroll 4
        for (int d = 0; d < kDSub; ++d) {
          const Float difference = Simd::Subtract(values[d], centroids[c * kDSub + d]);
          Float square = Simd::Multiply(difference, difference);
          if (kDSub > 1) square = Simd::Rounded(square);
          distance = d == 0 ? square : Simd::Add(distance, square);
        }
        best = Simd::SelectLess(distance, least, Simd::Set(static_cast<float>(c)), best);
        least = Simd::Min(distance, least);  // a NaN distance keeps `least`
      }
      Simd::StoreBytes(codes + key * parts + part, best);
    }
  }
}

template <typename Simd>
void EncodeKeys(const KeyCodeLayout& layout, const float* codebook, const float* keys, int64_t key_row_bytes,
                int64_t count, uint8_t* codes) {
  const int64_t parts = layout.SubQuantizers();
  if (parts < Simd::kLanes) {
    return EncodeKeys<simd::scalar>(layout, codebook, keys, key_row_bytes, count, codes);
  }
  WithDSub(layout.d_sub,
           [&]<int kDSub>() { EncodeGroups<Simd, kDSub>(parts, codebook, keys, key_row_bytes, count, codes); });
}

}  // namespace
}  // namespace ortolan
