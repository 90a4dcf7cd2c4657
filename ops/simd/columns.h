// The 16 columns of a panel, in one or more vector registers of each kind. Local to each file that includes it.
#pragma once

#include <cstdint>
#include <utility>

#include "simd/at_byte.h"

namespace ortolan::simd {
namespace {

template <typename Simd>
struct Columns {
  static constexpr int64_t kColumns = 16;
  static constexpr int kRegisters = kColumns / Simd::kLanes;
  static constexpr int64_t kRegisterBytes = 4 * Simd::kLanes;

  struct Floats {
    typename Simd::Float at[kRegisters];
  };
  struct Ints {
    typename Simd::Int at[kRegisters];
  };
  struct Bytes {
    typename Simd::Bytes at[kRegisters];  // four of each column
  };

  // Return {each(0), each(1), …}.
  template <typename Out, typename Each>
  __attribute__((always_inline)) static Out Of(const Each& each) {
    return Of<Out>(each, std::make_integer_sequence<int, kRegisters>());
  }

  static Floats Set(float value) {
    const typename Simd::Float each = Simd::Set(value);
    return Of<Floats>([&](int) { return each; });
  }
  static Floats Load(const float* from) {
    return Of<Floats>([&](int i) { return Simd::Load(from + i * Simd::kLanes); });
  }
  static void Store(float* to, const Floats& a) {
    for (int i = 0; i < kRegisters; ++i) Simd::Store(to + i * Simd::kLanes, a.at[i]);
  }
  // Load the first `count` columns, zeros after them; no other memory is touched.
  static Floats LoadFirst(const float* from, int64_t count) {
    return Of<Floats>([&](int i) { return Simd::LoadSome(from + i * Simd::kLanes, count - i * Simd::kLanes); });
  }
  static void StoreFirst(float* to, int64_t count, const Floats& a) {
    for (int i = 0; i < kRegisters; ++i) Simd::StoreSome(to + i * Simd::kLanes, count - i * Simd::kLanes, a.at[i]);
  }
  static Floats Add(const Floats& a, const Floats& b) {
    return Of<Floats>([&](int i) { return Simd::Add(a.at[i], b.at[i]); });
  }
  static Floats Subtract(const Floats& a, const Floats& b) {
    return Of<Floats>([&](int i) { return Simd::Subtract(a.at[i], b.at[i]); });
  }
  static Floats Multiply(const Floats& a, const Floats& b) {
    return Of<Floats>([&](int i) { return Simd::Multiply(a.at[i], b.at[i]); });
  }
  static Floats MultiplyAdd(const Floats& a, const Floats& b, const Floats& c) {
    return Of<Floats>([&](int i) { return Simd::MultiplyAdd(a.at[i], b.at[i], c.at[i]); });
  }
  // a holds one value in all lanes.
  static Floats MultiplyAdd(typename Simd::Float a, const Floats& b, const Floats& c) {
    return Of<Floats>([&](int i) { return Simd::MultiplyAdd(a, b.at[i], c.at[i]); });
  }
  // Add column i + 8 to column i, then i + 4, 2 and 1: the same order for any number of lanes.
  static float SumOfColumns(Floats a) {
#pragma GCC unroll 4
    for (int half = kRegisters / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
      for (int i = 0; i < half; ++i) a.at[i] = Simd::Add(a.at[i], a.at[i + half]);
    }
    return Simd::SumOfLanes(a.at[0]);
  }
  // A bit for each nonzero column.
  static uint32_t NonZero(const Floats& a) {
    uint32_t bits = 0;
    for (int i = 0; i < kRegisters; ++i) bits |= Simd::NonZero(a.at[i]) << (i * Simd::kLanes);
    return bits;
  }
  static bool HasNan(const Floats& a) {
    bool any = false;
    for (int i = 0; i < kRegisters; ++i) any |= Simd::HasNan(a.at[i]);
    return any;
  }
  static Floats LoadBf16(const uint8_t* from) {
    return Of<Floats>([&](int i) { return Simd::LoadBf16(from + 2 * i * Simd::kLanes); });
  }
  static Floats LoadInt8(const uint8_t* from) {
    return Of<Floats>([&](int i) { return Simd::LoadInt8(from + i * Simd::kLanes); });
  }
  // Keep a in registers from here on; the compiler would reload it for each use.
  static Floats Kept(const Floats& a) {
    return Of<Floats>([&](int i) { return Kept(a.at[i]); });
  }
  static typename Simd::Float Kept(typename Simd::Float a) {
    if constexpr (Simd::kLanes == 1) return a;
    return Simd::Rounded(a);
  }
  // Transpose four rows of 16 floats to 16 rows of four.
  static void Transpose4(const float* from, int64_t row_bytes, float* to, int64_t to_row_bytes) {
    for (int64_t column = 0; column < kColumns; column += Simd::kLanes) {
      Simd::Transpose4(from + column, row_bytes, to, to_row_bytes);
      to = AtByte(to, Simd::kLanes * to_row_bytes);
    }
  }

  static Ints SetInt(int32_t value) {
    const typename Simd::Int each = Simd::SetInt(value);
    return Of<Ints>([&](int) { return each; });
  }
  static Ints LoadInt(const int32_t* from) {
    return Of<Ints>([&](int i) { return Simd::LoadInt(from + i * Simd::kLanes); });
  }
  static void StoreInt(int32_t* to, const Ints& a) {
    for (int i = 0; i < kRegisters; ++i) Simd::StoreInt(to + i * Simd::kLanes, a.at[i]);
  }
  static Ints AddInt(const Ints& a, const Ints& b) {
    return Of<Ints>([&](int i) { return Simd::AddInt(a.at[i], b.at[i]); });
  }
  static Floats ToFloat(const Ints& a) {
    return Of<Floats>([&](int i) { return Simd::ToFloat(a.at[i]); });
  }

  static Bytes LoadBytes(const uint8_t* from) {
    return Of<Bytes>([&](int i) { return Simd::LoadBytes(from + i * kRegisterBytes); });
  }
  static void StoreBytes(uint8_t* to, const Bytes& a) {
    for (int i = 0; i < kRegisters; ++i) Simd::StoreBytes(to + i * kRegisterBytes, a.at[i]);
  }
  // Move the next stored bytes to the 64 positions whose bit is set; expand is the Simd function to use.
  template <typename Expand>
  static Bytes ExpandBytes(uint64_t mask, const uint8_t* stored, const Expand& expand) {
    return Of<Bytes>([&](int i) { return expand(mask, stored, static_cast<int>(i * kRegisterBytes)); });
  }
  // Move the next 2-byte values to the 32 positions whose bit is set.
  static Bytes ExpandWords(uint64_t mask, const uint8_t* stored) {
    return Of<Bytes>([&](int i) { return Simd::ExpandWords(mask, stored, static_cast<int>(i * kRegisterBytes / 2)); });
  }

 private:
  template <typename Out, typename Each, int... i>
  __attribute__((always_inline)) static Out Of(const Each& each, std::integer_sequence<int, i...>) {
    return {{each(i)...}};
  }
};

}  // namespace
}  // namespace ortolan::simd
