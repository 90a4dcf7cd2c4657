// Measures the rate at which threads can read memory: the reference for memory-bound kernels.
#include <thread>

#include "testing.h"

namespace ortolan {
namespace {

using Vector = uint64_t __attribute__((vector_size(64), aligned(8)));

// Reads `bytes` (a multiple of 128) once, in order, and returns a checksum so that compilers cannot remove the reads.
// Prefetches `prefetch_bytes` ahead, even past the end.
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

// Reads an equal part of the buffer in each thread.
uint64_t StreamReadArray(const Array<uint8_t>& buffer, int threads, size_t prefetch_bytes) {
  constexpr int kMostThreads = 256;
  Require(threads >= 1 && threads <= kMostThreads, "threads is ", threads, ", expected 1 to ", kMostThreads);
  const uint8_t* data = buffer.data();
  const size_t part = static_cast<size_t>(buffer.size()) / static_cast<size_t>(threads) / 128 * 128;
  py::gil_scoped_release release;
  std::vector<uint64_t> sums(static_cast<size_t>(threads));
  std::vector<std::thread> others;
  for (size_t t = 1; t < sums.size(); ++t) {
    others.emplace_back([&, t] { sums[t] = StreamRead(data + t * part, part, prefetch_bytes); });
  }
  sums[0] = StreamRead(data, part, prefetch_bytes);
  for (std::thread& other : others) other.join();
  uint64_t total = 0;
  for (const uint64_t sum : sums) total += sum;
  return total;
}

}  // namespace

void BindStreamRead(py::module_& module) {
  module.def("stream_read", &StreamReadArray, py::arg("buffer").noconvert(), py::arg("threads") = 1,
             py::arg("prefetch_bytes") = 4096);
}

}  // namespace ortolan
