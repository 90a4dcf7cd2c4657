#include "stream_read.h"

namespace ortolan {
namespace {

using Vector = uint64_t __attribute__((vector_size(64), aligned(8)));

}  // namespace

#if defined(__x86_64__) && defined(__linux__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
uint64_t StreamRead(const uint8_t* data, size_t bytes, size_t prefetch_bytes) {
  Vector sums[2] = {};
  for (size_t i = 0; i + 128 <= bytes; i += 128) {
    __builtin_prefetch(data + i + prefetch_bytes);
    __builtin_prefetch(data + i + prefetch_bytes + 64);
    sums[0] += *reinterpret_cast<const Vector*>(data + i);
    sums[1] += *reinterpret_cast<const Vector*>(data + i + 64);
  }
  const Vector sum = sums[0] + sums[1];
  uint64_t total = 0;
  for (int lane = 0; lane < 8; ++lane) total += sum[lane];
  return total;
}

}  // namespace ortolan
