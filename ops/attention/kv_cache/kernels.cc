#include "attention/kv_cache/decode_keys.h"
#include "attention/kv_cache/encode_loop.h"
#include "attention/kv_cache/kv_cache.h"
#include "simd/target.h"

namespace ortolan {
namespace {

using Float = Simd::Float;
constexpr int64_t kLanes = Simd::kLanes;
constexpr int64_t kScalesBytes = kValueBlock * kValueScaleBytes;

float ScaleAt(const uint8_t* from) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(from[0] | from[1] << 8) << 16);
}

// The bits of max |value| / 127 rounded up to bfloat16; NaN if a value is not finite.
uint32_t ScaleBits(int64_t head_dim, const float* values) {
  Float most = Simd::Set(0.0f);
  Float check = Simd::Set(0.0f);  // NaN once a value is not finite
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    const Float value = Simd::Load(values + d);
    most = Simd::Max(Simd::Abs(value), most);
    check = Simd::MultiplyAdd(value, Simd::Set(0.0f), check);
  }
  if (!(Simd::SumOfLanes(check) == 0)) return 0x7fc0;
  return (__builtin_bit_cast(uint32_t, Simd::MaxOfLanes(most) / 127.0f) + 0xffff) >> 16;
}

void RotatePair(const float* from, const float* cos, const float* sin, int64_t at, float* to) {
  const auto product = [](float a, float b) { return simd::scalar::Rounded(a * b); };
  const float x = from[at], y = from[at + 1], c = cos[at / 2], s = sin[at / 2];
  to[at] = product(x, c) - product(y, s);
  to[at + 1] = product(y, c) + product(x, s);
}

// Rotates full vectors of interleaved pairs; returns the index of the first remaining pair.
template <typename Simd>
int64_t RotatePairs(const float* from, const float* cos, const float* sin, int64_t head_dim, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= head_dim; i += kLanes) {
    const Float values = Simd::Load(from + i);
    const Float a = Simd::Rounded(Simd::Multiply(values, Simd::LoadTwice(cos + i / 2)));
    const Float b = Simd::Rounded(Simd::Multiply(Simd::SwapPairs(values), Simd::LoadTwice(sin + i / 2)));
    Simd::Store(to + i, Simd::SubtractAdd(a, b));
  }
  return i;
}

void RotateHalves(const float* from, const float* cos, const float* sin, int64_t half, float* to) {
  const auto product = [](Float a, Float b) { return Simd::Rounded(Simd::Multiply(a, b)); };
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t count = half - i;
    const bool all = count >= kLanes;
    const auto load = [&](const float* at) { return all ? Simd::Load(at + i) : Simd::LoadFirst(at + i, count); };
    const Float x = load(from), y = load(from + half), c = load(cos), s = load(sin);
    const Float first = Simd::Subtract(product(x, c), product(y, s));
    const Float second = Simd::Add(product(y, c), product(x, s));
    if (all) {
      Simd::Store(to + i, first);
      Simd::Store(to + half + i, second);
    } else {
      Simd::StoreFirst(to + i, count, first);
      Simd::StoreFirst(to + half + i, count, second);
    }
  }
}

void EncodeValues(int64_t head_dim, const float* values, uint8_t* row) {
  const uint32_t bits = ScaleBits(head_dim, values);
  row[0] = static_cast<uint8_t>(bits);
  row[1] = static_cast<uint8_t>(bits >> 8);
  uint8_t* q = row + kValueScaleBytes;
  const float scale = ScaleAt(row);
  if (!(scale > 0)) {
    __builtin_memset(q, 0, static_cast<size_t>(head_dim));
    return;
  }
  const Float divisor = Simd::Set(scale);
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    Simd::StoreInt8(q + d, Simd::RoundToInt(Simd::Divide(Simd::Load(values + d), divisor)));
  }
}

void ValueRowsToBlock(int64_t head_dim, const uint8_t* rows, uint8_t* block) {
  const int64_t row_bytes = ValueRowBytes(head_dim);
  for (int64_t t = 0; t < kValueBlock; ++t) {
    __builtin_memcpy(block + t * kValueScaleBytes, rows + t * row_bytes, kValueScaleBytes);
  }
  uint8_t* to = block + kScalesBytes;
  for (int64_t t = 0; t < kValueBlock; t += 4) {
    const uint8_t* from = rows + t * row_bytes + kValueScaleBytes;
    for (int64_t d = 0; d < head_dim; d += kLanes, to += 4 * kLanes) {
      const auto bytes = [&](int64_t token) { return Simd::LoadUint8(from + token * row_bytes + d); };
      const auto low = Simd::OrInt(bytes(0), Simd::ShiftLeftInt<8>(bytes(1)));
      const auto high = Simd::OrInt(bytes(2), Simd::ShiftLeftInt<8>(bytes(3)));
      Simd::StoreInt(to, Simd::OrInt(low, Simd::ShiftLeftInt<16>(high)));
    }
  }
}

void DecodeValues(int64_t head_dim, const uint8_t* cache, int64_t tokens, int64_t begin, int64_t end, float* values,
                  int64_t row_bytes) {
  const int64_t cache_row = ValueRowBytes(head_dim);
  const int64_t full = tokens / kValueBlock * kValueBlock;
  const auto row_of = [&](int64_t token) { return AtByte(values, (token - begin) * row_bytes); };
  for (int64_t token = begin / 4 * 4; token < end && token < full; token += 4) {
    const uint8_t* block = cache + token / kValueBlock * kValueBlock * cache_row;
    const int64_t t = token % kValueBlock;
    const uint8_t* quad = block + kScalesBytes + t * head_dim;
    const auto write = [&]<int kToken>() {
      if (token + kToken < begin || token + kToken >= end) return;
      const Float scale = Simd::Set(ScaleAt(block + (t + kToken) * kValueScaleBytes));
      float* to = row_of(token + kToken);
      for (int64_t d = 0; d < head_dim; d += kLanes) {
        Simd::Store(to + d, Simd::Multiply(scale, Simd::SignedByte<kToken>(Simd::LoadInt(quad + 4 * d))));
      }
    };
    write.template operator()<0>();
    write.template operator()<1>();
    write.template operator()<2>();
    write.template operator()<3>();
  }
  for (int64_t token = begin > full ? begin : full; token < end; ++token) {
    const uint8_t* row = cache + token * cache_row;
    const Float scale = Simd::Set(ScaleAt(row));
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      Simd::Store(row_of(token) + d, Simd::Multiply(scale, Simd::LoadInt8(row + kValueScaleBytes + d)));
    }
  }
}

void Rotate(const float* from, const float* cos, const float* sin, int64_t head_dim, bool interleaved, float* to) {
  if (!interleaved) return RotateHalves(from, cos, sin, head_dim / 2, to);
  int64_t i = 0;
  if constexpr (kLanes > 1) i = RotatePairs<Simd>(from, cos, sin, head_dim, to);
  for (; i < head_dim; i += 2) RotatePair(from, cos, sin, i, to);
}

}  // namespace
}  // namespace ortolan

namespace ortolan::ORTOLAN_TARGET {

extern const KvCacheFunctions kKvCache;
constexpr KvCacheFunctions kKvCache{
    .encode_keys = &EncodeKeys<Simd>,
    .key_rows_to_block = &WriteKeyBlock,
    .decode_keys = &DecodeKeys,
    .encode_values = &EncodeValues,
    .value_rows_to_block = &ValueRowsToBlock,
    .decode_values = &DecodeValues,
    .rotate = &Rotate,
};

}  // namespace ortolan::ORTOLAN_TARGET
