#include "lut_post_op/lut_post_op.h"

#include <cstring>

#include "isa/kernel_table.h"

namespace ortolan {

#define ORTOLAN_KERNEL(set, name, index_bytes, entry_bytes) LutFn Lut##name;
#include "lut_post_op/kernels.inc"
#undef ORTOLAN_KERNEL

namespace {

// By memcpy throughout: nothing need be aligned.
template <typename Index, typename Entry, int kCount>
void LookupSome(const char* x, const char* table, char* y) {
  Entry found[kCount];
  for (int i = 0; i < kCount; ++i) {
    Index index;
    std::memcpy(&index, x + i * sizeof(Index), sizeof(Index));
    std::memcpy(&found[i], table + index * sizeof(Entry), sizeof(Entry));
  }
  std::memcpy(y, found, sizeof(found));
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

constexpr LutKernel kKernels[] = {
#define ORTOLAN_KERNEL(set, name, index_bytes, entry_bytes) \
  {#name, feature_set::set, index_bytes, entry_bytes, &Lut##name},
#include "lut_post_op/kernels.inc"
#undef ORTOLAN_KERNEL
};

}  // namespace

void LutScalarFrom8To8(const LutArgs& args) { Lookup<uint8_t, uint8_t>(args); }
void LutScalarFrom8To16(const LutArgs& args) { Lookup<uint8_t, uint16_t>(args); }
void LutScalarFrom8To32(const LutArgs& args) { Lookup<uint8_t, uint32_t>(args); }
void LutScalarFrom16To8(const LutArgs& args) { Lookup<uint16_t, uint8_t>(args); }
void LutScalarFrom16To16(const LutArgs& args) { Lookup<uint16_t, uint16_t>(args); }
void LutScalarFrom16To32(const LutArgs& args) { Lookup<uint16_t, uint32_t>(args); }

std::span<const LutKernel> LutKernels() { return kKernels; }

const LutKernel* SelectLut(Features features, int64_t index_bytes, int64_t entry_bytes) {
  for (const LutKernel& kernel : kKernels) {
    if (features.Has(kernel.needs) && kernel.index_bytes == index_bytes && kernel.entry_bytes == entry_bytes)
      return &kernel;
  }
  return nullptr;
}

}  // namespace ortolan
