// The rows kernels: y = the weighted sum of the listed rows of B. Included only by kernels.cc.
//
// Four rows of B are added to y in one pass, and y stays in the cache, so that only reads of B use memory bandwidth. A
// row often ends before the hardware prefetcher reaches full speed, and the next row in the list is unpredictable. So
// each cache line of a row is prefetched while the same line of an earlier row is used.
#pragma once

#include <cstdint>

#include "masked_matmul/tile_loop.h"
#include "simd/prefetch.h"

namespace ortolan {
namespace {

constexpr int64_t kRowsAtATime = 4;
constexpr int64_t kRowsAhead = 4;
constexpr int64_t kShortRowsAhead = 12;
constexpr int64_t kShortRow = 1000;       // bytes
constexpr int64_t kStripColumns = 512;    // columns of B for four rows of A at a time
constexpr int64_t kCachedFloats = 16384;  // floats of y for all rows

// Elements of B: float, uint16_t (bf16) or int8_t.
inline Floats LoadElements(const float* from) { return Block::Load(from); }
inline Floats LoadElements(const uint16_t* from) { return Block::LoadBf16(reinterpret_cast<const uint8_t*>(from)); }
inline Floats LoadElements(const int8_t* from) { return Block::LoadInt8(reinterpret_cast<const uint8_t*>(from)); }
inline float ToFloat(float value) { return value; }
inline float ToFloat(uint16_t bf16) { return __builtin_bit_cast(float, static_cast<uint32_t>(bf16) << 16); }
inline float ToFloat(int8_t value) { return value; }

// sums[i][j] += a[i][r] x rows[r][j] for kRows rows of A and kCount rows of B; the weights in A stay in registers.
// Prefetches ahead[r], unless null, while rows[r] is read.
template <int kRows, int kCount, typename Element>
void AddProducts(const float* a, int64_t a_row, const Element* const* rows, const Element* const* ahead, float* sums,
                 int64_t sums_row, int64_t begin, int64_t end) {
  Simd::Float weights[kRows][kCount];
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int r = 0; r < kCount; ++r) weights[i][r] = Simd::Set(a[i * a_row + r]);
  }
  const auto add_block = [&](int64_t j) {
    Floats w[kCount];
#pragma GCC unroll 4
    for (int r = 0; r < kCount; ++r) w[r] = LoadElements(rows[r] + j);
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      Floats sum = Block::Load(sums + i * sums_row + j);
#pragma GCC unroll 4
      for (int r = 0; r < kCount; ++r) sum = Block::MultiplyAdd(weights[i][r], w[r], sum);
      Block::Store(sums + i * sums_row + j, sum);
    }
  };
  constexpr int64_t kLineColumns = kLineBytes / static_cast<int64_t>(sizeof(Element));
  int64_t j = begin;
  if (ahead != nullptr) {
    for (; j + kLineColumns <= end; j += kLineColumns) {
#pragma GCC unroll 4
      for (int r = 0; r < kCount; ++r) __builtin_prefetch(ahead[r] + j);
#pragma GCC unroll 4
      for (int64_t part = 0; part < kLineColumns; part += kBlockColumns) add_block(j + part);
    }
    for (int r = 0; j < end && r < kCount; ++r) __builtin_prefetch(ahead[r] + j);
  }
  for (; j + kBlockColumns <= end; j += kBlockColumns) add_block(j);
  for (; j < end; ++j) {
    for (int i = 0; i < kRows; ++i) {
      auto sum = Simd::Set(sums[i * sums_row + j]);
      for (int r = 0; r < kCount; ++r) sum = Simd::MultiplyAdd(weights[i][r], Simd::Set(ToFloat(rows[r][j])), sum);
      Simd::StoreFirst(sums + i * sums_row + j, 1, sum);
    }
  }
}

// Runs AddProducts for all rows of A and inputs first … first+kCount-1. The first rows of A load these rows of B into
// the L1 cache, where the remaining rows of A find them.
template <typename Element, int kCount>
void AddRows(const RowsArgs& args, int64_t first, float* sums, int64_t sums_row, int64_t column, int64_t columns) {
  constexpr int kRegisterRows = kOneRegister ? 4 : 1;
  const auto row = [&](int64_t q) { return static_cast<const Element*>(args.b) + args.Input(q) * args.n + column; };
  const Element* rows[kCount];
  const Element* rows_ahead[kCount] = {};
  for (int r = 0; r < kCount; ++r) rows[r] = row(first + r);
  const bool is_short = columns * static_cast<int64_t>(sizeof(Element)) < kShortRow;
  const int64_t distance = is_short ? kShortRowsAhead : kRowsAhead;
  const bool more = first + distance + kCount <= args.count;
  for (int r = 0; more && r < kCount; ++r) rows_ahead[r] = row(first + distance + r);
  const int64_t strip = args.m <= kRegisterRows ? columns : kStripColumns;
  for (int64_t begin = 0; begin < columns; begin += strip) {
    const int64_t end = columns - begin < strip ? columns : begin + strip;
    TakeAll<kRegisterRows>(0, args.m, [&]<int kRows>(int64_t i) {
      const Element* const* ahead = more && i == 0 ? rows_ahead : nullptr;
      AddProducts<kRows, kCount>(args.a + i * args.a_row + first, args.a_row, rows, ahead, sums + i * sums_row,
                                 sums_row, begin, end);
    });
  }
}

template <typename Element>
void AddListed(const RowsArgs& args, int64_t begin, int64_t end, float* sums, int64_t sums_row, int64_t column,
               int64_t columns) {
  int64_t q = begin;
  for (; q + kRowsAtATime <= end; q += kRowsAtATime) {
    AddRows<Element, kRowsAtATime>(args, q, sums, sums_row, column, columns);
  }
  for (; q < end; ++q) AddRows<Element, 1>(args, q, sums, sums_row, column, columns);
}

template <typename Element>
void MultiplyRows(const RowsArgs& args, int64_t column_begin, int64_t column_end) {
  const int64_t most = kCachedFloats / args.m < 512 ? 512 : kCachedFloats / args.m;
  for (int64_t column = column_begin; column < column_end; column += most) {
    const int64_t columns = column_end - column < most ? column_end - column : most;
    for (int64_t i = 0; i < args.m; ++i) __builtin_memset(args.y + i * args.n + column, 0, columns * sizeof(float));
    if (args.scales == nullptr) {
      AddListed<Element>(args, 0, args.count, args.y + column, args.n, column, columns);
      continue;
    }
    for (int64_t begin = 0; begin < args.count;) {
      const int64_t group = args.Input(begin) / args.group;
      int64_t end = begin + 1;
      while (end < args.count && args.Input(end) / args.group == group) ++end;
      float* sums = args.sums + (column - column_begin);
      const int64_t sums_row = column_end - column_begin;
      for (int64_t i = 0; i < args.m; ++i) __builtin_memset(sums + i * sums_row, 0, columns * sizeof(float));
      AddListed<Element>(args, begin, end, sums, sums_row, column, columns);
      const float* scales = args.scales + group * args.n + column;
      for (int64_t i = 0; i < args.m; ++i) {
        float* y = args.y + i * args.n + column;
        const float* from = sums + i * sums_row;
        for (int64_t j = 0; j < columns; ++j) y[j] += scales[j] * from[j];
      }
      begin = end;
    }
  }
}

int64_t ListInputs(const FloatRows& a, const uint8_t* always, int32_t* inputs, float* to, int64_t to_row) {
  int64_t count = 0;
  for (int64_t first = 0; first < a.columns; first += kBlockColumns) {
    const int64_t left = a.columns - first;
    uint32_t used = 0;
    for (int64_t i = 0; i < a.rows; ++i) used |= Block::NonZero(LoadBlock(a.Row(i) + first, left));
    for (int64_t l = 0; always != nullptr && l < kBlockColumns && l < left; ++l) {
      used |= static_cast<uint32_t>(always[first + l] != 0) << l;
    }
    for (; used != 0; used &= used - 1) {
      const int64_t l = first + __builtin_ctz(used);
      inputs[count] = static_cast<int32_t>(l);
      for (int64_t i = 0; i < a.rows; ++i) to[i * to_row + count] = a.Row(i)[l];
      ++count;
    }
  }
  return count;
}

}  // namespace
}  // namespace ortolan
