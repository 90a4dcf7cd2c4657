// Transposes rows of key codes into a full block (key_rows_to_block of kv_cache.h), for all targets. Included only by
// kernels; local to each target.
#pragma once

#include "formats/key_code_cache.h"
#include "simd/target.h"

namespace ortolan {
namespace {

// Calls function.operator()<d_sub>() with d_sub, 1, 2 or 4, as a constant.
template <typename Function>
void WithDSub(int64_t d_sub, const Function& function) {
  if (d_sub == 1) return function.template operator()<1>();
  if (d_sub == 2) return function.template operator()<2>();
  function.template operator()<4>();
}

// Eight sub-quantizers of a key are 32 bits of its row: the low nibbles become a lane of one quad, the high nibbles a
// lane of the next quad.
inline void WriteKeyBlock(const KeyCodeLayout& layout, const uint8_t* rows, int64_t count, uint8_t* block) {
  using Float = Simd::Float;
  constexpr int64_t kLanes = Simd::kLanes;
  const int64_t row_bytes = layout.RowBytes();
  const int64_t words = row_bytes / 4;
  for (int64_t word = 0; word < words; word += kLanes) {
    const int64_t lanes = words - word < kLanes ? words - word : kLanes;
    const auto load = [&](int64_t key) {
      if (key >= count) return Simd::Set(0.0f);
      const uint8_t* from = rows + key * row_bytes + 4 * word;
      return Simd::FloatOf(lanes == kLanes ? Simd::LoadInt(from) : Simd::LoadFirstInt(from, lanes));
    };
    for (int64_t k = 0; k < 16; k += kLanes) {
      Float a[kLanes];
      Float b[kLanes];
#pragma GCC unroll 16
      for (int64_t i = 0; i < kLanes; ++i) {
        a[i] = load(k + i);
        b[i] = load(16 + k + i);
      }
      Simd::Transpose(a);
      Simd::Transpose(b);
      const auto nibbles = Simd::SetInt(0x0f0f0f0f);
      for (int64_t i = 0; i < lanes; ++i) {
        const auto low = Simd::BitsOf(a[i]);
        const auto high = Simd::BitsOf(b[i]);
        uint8_t* to = block + (word + i) * 128 + 4 * k;
        Simd::StoreInt(to, Simd::SelectBits(nibbles, low, Simd::ShiftLeftInt<4>(high)));
        Simd::StoreInt(to + 64, Simd::SelectBits(nibbles, Simd::ShiftRightInt<4>(low), high));
      }
    }
  }
  if (row_bytes % 4 == 0) return;
  block += words * 128;
  for (int64_t k = 0; k < 16; ++k) {
    for (int64_t j = 0; j < 4; ++j) {
      const auto code = [&](int64_t key) {
        return key < count ? rows[key * row_bytes + 4 * words + j % 2] >> (j < 2 ? 0 : 4) & 0xf : 0;
      };
      block[4 * k + j] = static_cast<uint8_t>(code(k) | code(16 + k) << 4);
    }
  }
}

}  // namespace
}  // namespace ortolan
