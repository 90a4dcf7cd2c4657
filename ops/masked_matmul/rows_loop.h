// The rows kernels of all tiers, over the Block of tile_loop.h: y = the listed rows of B, weighted.
//
// Four rows of B at a time: their products are added to y in one pass over it, and y stays in a cache, so that the loop
// waits for B alone. A row often ends before the processor's prefetcher is up to speed, and it cannot know which row is
// listed next. So each line of a row is asked for while the line at the same place of a row before it is used.
#pragma once

#include <cstdint>

#include "masked_matmul/tile_loop.h"

namespace ortolan {
namespace {

inline constexpr int64_t kRowsAtATime = 4;
inline constexpr int64_t kRowsAhead = 4;
inline constexpr int64_t kShortRowsAhead = 12;
inline constexpr int64_t kShortRow = 1000;  // bytes
inline constexpr int64_t kLineBytes = 64;
inline constexpr int64_t kStripColumns = 512;    // of B: what four rows of A use at a time
inline constexpr int64_t kCachedFloats = 16384;  // of y, for its rows together

struct FloatWeights {
  using Number = float;
  template <typename Block>
  static typename Block::Vector Load(const float* from) {
    return Block::Load(from);
  }
  static float ToFloat(float number) { return number; }
};

struct Bf16Weights {
  using Number = uint16_t;
  template <typename Block>
  static typename Block::Vector Load(const uint16_t* from) {
    return Block::LoadBf16(from);
  }
  static float ToFloat(uint16_t number) {
    const uint32_t bits = static_cast<uint32_t>(number) << 16;
    float value;
    __builtin_memcpy(&value, &bits, sizeof(value));
    return value;
  }
};

struct Int8Weights {
  using Number = int8_t;
  template <typename Block>
  static typename Block::Vector Load(const int8_t* from) {
    return Block::LoadInt8(from);
  }
  static float ToFloat(int8_t number) { return number; }
};

// sums[i][j] += a[i][r] x rows[r][j] for kRows rows of A and kCount rows of B, whose weights in A stay in registers.
// ahead[r], if there is one, is asked for where rows[r] is read.
template <typename Block, typename Weights, int kRows, int kCount>
void AddProducts(const float* a, int64_t a_row, const typename Weights::Number* const* rows,
                 const typename Weights::Number* const* ahead, float* sums, int64_t sums_row, int64_t begin,
                 int64_t end) {
  using Vector = typename Block::Vector;
  typename Block::Scalar weights[kRows][kCount];
  ORTOLAN_UNROLL
  for (int i = 0; i < kRows; ++i) {
    ORTOLAN_UNROLL
    for (int r = 0; r < kCount; ++r) weights[i][r] = Block::Broadcast(a + i * a_row + r);
  }
  const auto add_block = [&](int64_t j) {
    Vector w[kCount];
    ORTOLAN_UNROLL
    for (int r = 0; r < kCount; ++r) w[r] = Weights::template Load<Block>(rows[r] + j);
    ORTOLAN_UNROLL
    for (int i = 0; i < kRows; ++i) {
      Vector sum = Block::Load(sums + i * sums_row + j);
      ORTOLAN_UNROLL
      for (int r = 0; r < kCount; ++r) sum = Block::MultiplyAdd(weights[i][r], w[r], sum);
      Block::Store(sums + i * sums_row + j, sum);
    }
  };
  constexpr int64_t kLineColumns = kLineBytes / static_cast<int64_t>(sizeof(typename Weights::Number));
  int64_t j = begin;
  if (ahead != nullptr) {
    for (; j + kLineColumns <= end; j += kLineColumns) {
      ORTOLAN_UNROLL
      for (int r = 0; r < kCount; ++r) __builtin_prefetch(ahead[r] + j);
      ORTOLAN_UNROLL
      for (int64_t part = 0; part < kLineColumns; part += kBlockColumns) add_block(j + part);
    }
    for (int r = 0; j < end && r < kCount; ++r) __builtin_prefetch(ahead[r] + j);
  }
  for (; j + kBlockColumns <= end; j += kBlockColumns) add_block(j);
  for (; j < end; ++j) {
    for (int i = 0; i < kRows; ++i) {
      float sum = sums[i * sums_row + j];
      for (int r = 0; r < kCount; ++r) sum += a[i * a_row + r] * Weights::ToFloat(rows[r][j]);
      sums[i * sums_row + j] = sum;
    }
  }
}

// The same for all rows of A and inputs first … first+kCount-1. Further rows of A find the weights in the L1 cache.
template <typename Block, typename Weights, int kCount>
void AddRows(const RowsArgs& args, int64_t first, float* sums, int64_t sums_row, int64_t column, int64_t columns) {
  using Number = typename Weights::Number;
  constexpr int64_t kRegisterRows = Block::kVectorsABlock == 1 ? 4 : 1;
  const auto row = [&](int64_t q) { return static_cast<const Number*>(args.b) + args.inputs[q] * args.n + column; };
  const Number* rows[kCount];
  const Number* rows_ahead[kCount] = {};
  for (int r = 0; r < kCount; ++r) rows[r] = row(first + r);
  const bool is_short = columns * static_cast<int64_t>(sizeof(Number)) < kShortRow;
  const int64_t distance = is_short ? kShortRowsAhead : kRowsAhead;
  const bool more = first + distance + kCount <= args.count;
  for (int r = 0; more && r < kCount; ++r) rows_ahead[r] = row(first + distance + r);
  const int64_t strip = args.m <= kRegisterRows ? columns : kStripColumns;
  for (int64_t begin = 0; begin < columns; begin += strip) {
    const int64_t end = columns - begin < strip ? columns : begin + strip;
    for (int64_t i = 0; i < args.m;) {
      const float* a = args.a + i * args.a_row + first;
      float* to = sums + i * sums_row;
      const int64_t left = args.m - i;
      const Number* const* ahead = more && i == 0 ? rows_ahead : nullptr;
      if (kRegisterRows >= 4 && left >= 4) {
        AddProducts<Block, Weights, 4, kCount>(a, args.a_row, rows, ahead, to, sums_row, begin, end);
        i += 4;
      } else if (kRegisterRows >= 2 && left >= 2) {
        AddProducts<Block, Weights, 2, kCount>(a, args.a_row, rows, ahead, to, sums_row, begin, end);
        i += 2;
      } else {
        AddProducts<Block, Weights, 1, kCount>(a, args.a_row, rows, ahead, to, sums_row, begin, end);
        i += 1;
      }
    }
  }
}

template <typename Block, typename Weights>
void AddListed(const RowsArgs& args, int64_t begin, int64_t end, float* sums, int64_t sums_row, int64_t column,
               int64_t columns) {
  int64_t q = begin;
  for (; q + kRowsAtATime <= end; q += kRowsAtATime) {
    AddRows<Block, Weights, kRowsAtATime>(args, q, sums, sums_row, column, columns);
  }
  for (; q < end; ++q) AddRows<Block, Weights, 1>(args, q, sums, sums_row, column, columns);
}

template <typename Block, typename Weights>
void MultiplyRows(const RowsArgs& args, int64_t column_begin, int64_t column_end) {
  const int64_t most = kCachedFloats / args.m < 512 ? 512 : kCachedFloats / args.m;
  for (int64_t column = column_begin; column < column_end; column += most) {
    const int64_t columns = column_end - column < most ? column_end - column : most;
    for (int64_t i = 0; i < args.m; ++i) __builtin_memset(args.y + i * args.n + column, 0, columns * sizeof(float));
    if (args.scales == nullptr) {
      AddListed<Block, Weights>(args, 0, args.count, args.y + column, args.n, column, columns);
      continue;
    }
    for (int64_t begin = 0; begin < args.count;) {
      const int64_t group = args.inputs[begin] / args.group;
      int64_t end = begin + 1;
      while (end < args.count && args.inputs[end] / args.group == group) ++end;
      float* sums = args.sums + (column - column_begin);
      const int64_t sums_row = column_end - column_begin;
      for (int64_t i = 0; i < args.m; ++i) __builtin_memset(sums + i * sums_row, 0, columns * sizeof(float));
      AddListed<Block, Weights>(args, begin, end, sums, sums_row, column, columns);
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

template <typename Block>
int64_t ListInputs(const FloatRows& a, const uint8_t* always, int32_t* inputs, float* to, int64_t to_row) {
  int64_t count = 0;
  for (int64_t first = 0; first < a.columns; first += kBlockColumns) {
    const int64_t left = a.columns - first;
    uint32_t used = 0;
    for (int64_t i = 0; i < a.rows; ++i) {
      const float* from = a.Row(i) + first;
      used |= Block::Bits(left >= kBlockColumns ? Block::Load(from) : Block::LoadFirst(from, left));
    }
    if (always != nullptr) {
      for (int64_t l = 0; l < kBlockColumns && l < left; ++l)
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
