// Lookups for targets with tables of 256 bytes: entries of several bytes are looked up in one table per byte, and
// interleaved. Other targets and index sizes look up one element after another.
#include <cstdint>
#include <utility>

#include "lut_post_op/lut_post_op.h"
#include "simd/target.h"

namespace ortolan {
namespace {

// Uses memcpy because nothing needs to be aligned.
template <typename Index, typename Entry, int kCount>
void LookupSome(const char* x, const char* table, char* y) {
  Entry found[kCount];
  for (int i = 0; i < kCount; ++i) {
    Index index;
    __builtin_memcpy(&index, x + i * sizeof(Index), sizeof(Index));
    __builtin_memcpy(&found[i], table + index * sizeof(Entry), sizeof(Entry));
  }
  __builtin_memcpy(y, found, sizeof(found));
}

template <typename Index, typename Entry>
void Lookup(const LutArgs& args) {
  constexpr int64_t kBatch = 8;
  const char* x = static_cast<const char*>(args.x);
  const char* table = static_cast<const char*>(args.table);
  char* y = static_cast<char*>(args.y);
  int64_t left = args.count;
  for (; left >= kBatch; left -= kBatch, x += kBatch * sizeof(Index), y += kBatch * sizeof(Entry)) {
    LookupSome<Index, Entry, kBatch>(x, table, y);
  }
  for (; left > 0; --left, x += sizeof(Index), y += sizeof(Entry)) LookupSome<Index, Entry, 1>(x, table, y);
}

template <typename Target, int... kByte>
void LookupBytes(const LutArgs& args, std::integer_sequence<int, kByte...>) {
  using Bytes = typename Target::Bytes;
  constexpr int kEntryBytes = sizeof...(kByte);
  constexpr int64_t kAtOnce = sizeof(Bytes);
  const uint8_t* x = static_cast<const uint8_t*>(args.x);
  const uint8_t* entries = static_cast<const uint8_t*>(args.table);
  uint8_t* y = static_cast<uint8_t*>(args.y);
  alignas(64) uint8_t bytes[kEntryBytes][256];
  for (int byte = 0; byte < kEntryBytes; ++byte) {
    for (int i = 0; i < 256; ++i) bytes[byte][i] = entries[i * kEntryBytes + byte];
  }
  const typename Target::ByteTable tables[] = {typename Target::ByteTable(bytes[kByte])...};
  const auto look_up = [&](const uint8_t* from, uint8_t* to) {
    Bytes found[kEntryBytes];
    if constexpr (kEntryBytes == 1) {
      found[0] = Target::Lookup256(tables[0], Target::LoadBytes(from));
    } else {
      const Bytes dealt = Target::template DealBytes<kEntryBytes>(Target::LoadBytes(from));
      const Bytes of_byte[] = {Target::Lookup256(tables[kByte], dealt)...};
      Target::InterleaveBytes(of_byte, found);
    }
#pragma GCC unroll 4
    for (int part = 0; part < kEntryBytes; ++part) Target::StoreBytes(to + part * kAtOnce, found[part]);
  };
  int64_t i = 0;
  for (; i + kAtOnce <= args.count; i += kAtOnce) look_up(x + i, y + i * kEntryBytes);
  if (i == args.count) return;
  const size_t left = static_cast<size_t>(args.count - i);
  alignas(64) uint8_t tail[kAtOnce * kEntryBytes] = {};
  __builtin_memcpy(tail, x + i, left);
  look_up(tail, tail);
  __builtin_memcpy(y + i * kEntryBytes, tail, left * kEntryBytes);
}

template <typename Target, typename Entry>
void LookupByBytes(const LutArgs& args) {
  LookupBytes<Target>(args, std::make_integer_sequence<int, sizeof(Entry)>());
}

template <typename Target, typename Index, typename Entry>
constexpr LutFn* Best() {
  constexpr bool kBytes = sizeof(Entry) == 1 && requires { typename Target::ByteTable; };
  constexpr bool kDealtBytes = requires { Target::template DealBytes<2>; };
  if constexpr (sizeof(Index) == 1 && (kBytes || kDealtBytes)) {
    return &LookupByBytes<Target, Entry>;
  } else {
    return &Lookup<Index, Entry>;
  }
}

}  // namespace

namespace ORTOLAN_TARGET {

extern const LutFunctions kLut;
constexpr LutFunctions kLut{{
    {Best<Simd, uint8_t, uint8_t>(), Best<Simd, uint8_t, uint16_t>(), Best<Simd, uint8_t, uint32_t>()},
    {Best<Simd, uint16_t, uint8_t>(), Best<Simd, uint16_t, uint16_t>(), Best<Simd, uint16_t, uint32_t>()},
}};

}  // namespace ORTOLAN_TARGET
}  // namespace ortolan
