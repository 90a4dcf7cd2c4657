#include "lut_post_op/lut_post_op.h"

#include <cstring>

#include "isa/kernel_table.h"

namespace ortolan {

#define ORTOLAN_KERNEL(isa, name, index_bytes, entry_bytes) LutFn Lut##name;
#include "lut_post_op/kernels.inc"
#undef ORTOLAN_KERNEL

namespace {

template <typename Index, typename Entry>
void Lookup(const LutArgs& args) {
  const char* x = static_cast<const char*>(args.x);
  const char* table = static_cast<const char*>(args.table);
  char* y = static_cast<char*>(args.y);
  for (int64_t i = 0; i < args.count; ++i) {
    // By memcpy: nothing need be aligned.
    Index index;
    std::memcpy(&index, x + i * static_cast<int64_t>(sizeof(Index)), sizeof(Index));
    std::memcpy(y + i * static_cast<int64_t>(sizeof(Entry)), table + index * sizeof(Entry), sizeof(Entry));
  }
}

constexpr LutKernel kKernels[] = {
#define ORTOLAN_KERNEL(isa, name, index_bytes, entry_bytes) {#name, Isa::isa, index_bytes, entry_bytes, &Lut##name},
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

const LutKernel* SelectLut(Isa isa, int64_t index_bytes, int64_t entry_bytes) {
  for (const LutKernel& kernel : kKernels) {
    if (kernel.isa <= isa && kernel.index_bytes == index_bytes && kernel.entry_bytes == entry_bytes) return &kernel;
  }
  return nullptr;
}

}  // namespace ortolan
