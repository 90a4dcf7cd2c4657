#include "attention/kv_cache/kv_cache.h"

#include <algorithm>
#include <cstring>

#include "isa/kernel_table.h"
#include "simd/at_byte.h"

namespace ortolan {

#define ORTOLAN_KERNEL(target)            \
  namespace target {                      \
  extern const KvCacheFunctions kKvCache; \
  }
#include "attention/kv_cache/kernels.inc"
#undef ORTOLAN_KERNEL

std::span<const KvCacheKernel> KvCacheKernels() {
  static const KvCacheKernel kernels[] = {
#define ORTOLAN_KERNEL(target) {{target::kKvCache}, #target, feature_set::target},
#include "attention/kv_cache/kernels.inc"
#undef ORTOLAN_KERNEL
  };
  return kernels;
}

namespace {

constexpr int64_t kBlock = kKeyBlock;  // tokens

// Packs a token's codes (one a byte) into its cache row.
void WriteRow(const uint8_t* codes, int64_t sub_quantizers, uint8_t* row) {
  for (; sub_quantizers >= 8; sub_quantizers -= 8, codes += 8, row += 4) {
    uint32_t low;
    uint32_t high;
    std::memcpy(&low, codes, 4);
    std::memcpy(&high, codes + 4, 4);
    low |= high << 4;
    std::memcpy(row, &low, 4);
  }
  if (sub_quantizers == 0) return;
  for (int j = 0; j < 2; ++j) row[j] = static_cast<uint8_t>(codes[j] | codes[2 + j] << 4);
}

// Appends `count` rows to a cache, block by block. write(first, count, to) encodes `count` of the new tokens, from
// `first` on, as rows. When a block becomes full, to_block(rows, block) converts its rows to the block layout.
template <int64_t kMostRowBytes, typename Write, typename ToBlock>
void AppendRows(int64_t count, int64_t tokens, int64_t row_bytes, uint8_t* cache, const Write& write,
                const ToBlock& to_block) {
  uint8_t rows[kBlock * kMostRowBytes];
  for (int64_t done = 0; done < count;) {
    const int64_t before = (tokens + done) % kBlock;
    const int64_t added = std::min(count - done, kBlock - before);
    uint8_t* block = cache + (tokens + done - before) * row_bytes;
    const bool full = before + added == kBlock;
    if (full) std::memcpy(rows, block, static_cast<size_t>(before * row_bytes));
    write(done, added, (full ? rows : block) + before * row_bytes);
    if (full) to_block(rows, block);
    done += added;
  }
}

}  // namespace

void AppendKeys(const KvCacheKernel& kernel, const KeyCodeLayout& layout, const float* codebook, const float* keys,
                int64_t key_row_bytes, int64_t count, int64_t tokens, uint8_t* cache) {
  const int64_t parts = layout.SubQuantizers();
  uint8_t codes[kBlock * kMaxHeadDim];
  const auto write = [&](int64_t first, int64_t added, uint8_t* to) {
    kernel.encode_keys(layout, codebook, AtByte(keys, first * key_row_bytes), key_row_bytes, added, codes);
    for (int64_t i = 0; i < added; ++i) WriteRow(codes + i * parts, parts, to + i * layout.RowBytes());
  };
  AppendRows<kMaxHeadDim / 2>(count, tokens, layout.RowBytes(), cache, write, [&](const uint8_t* rows, uint8_t* block) {
    kernel.key_rows_to_block(layout, rows, kBlock, block);
  });
}

void AppendValues(const KvCacheKernel& kernel, int64_t head_dim, const float* values, int64_t row_bytes, int64_t count,
                  int64_t tokens, uint8_t* cache) {
  const int64_t cache_row = ValueRowBytes(head_dim);
  const auto write = [&](int64_t first, int64_t added, uint8_t* to) {
    for (int64_t i = 0; i < added; ++i) {
      kernel.encode_values(head_dim, AtByte(values, (first + i) * row_bytes), to + i * cache_row);
    }
  };
  AppendRows<ValueRowBytes(kMaxHeadDim)>(
      count, tokens, cache_row, cache, write,
      [&](const uint8_t* rows, uint8_t* block) { kernel.value_rows_to_block(head_dim, rows, block); });
}

}  // namespace ortolan
