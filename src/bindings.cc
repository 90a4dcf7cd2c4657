// ortolan._native: packers, kernels for tests and benchmarks, CPU information. Arrays only; Python puts bf16 on top.
#include "bindings.h"

#include <thread>

#include "isa/tuning.h"
#include "stream_read.h"

namespace ortolan {
namespace {

py::dict CpuInfo() {
  py::dict info;
  info["name"] = CpuName();
  const std::vector<std::string> active = NamesOf(ActiveFeatures());
  const std::vector<std::string> detected = NamesOf(DetectedFeatures());
  info["isa"] = active.back();
  info["detected_isa"] = detected.back();
  info["features"] = active;
  info["detected_features"] = detected;
  info["isa_problem"] = IsaProblem();
  info["microarchitecture"] = ActiveTuning().microarchitecture;
  return info;
}

// Reads the buffer once, an equal part a thread.
uint64_t StreamReadArray(const Array<uint8_t>& buffer, int threads, size_t prefetch_bytes) {
  constexpr int kMostThreads = 256;
  if (threads < 1 || threads > kMostThreads) {
    throw std::invalid_argument(ErrorText("threads is ", threads, ", expected 1 to ", kMostThreads));
  }
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
}  // namespace ortolan

PYBIND11_MODULE(_native, module) {
  using namespace ortolan;
  module.doc() = "Native core of Ortolan: packers, kernels for tests and benchmarks, CPU information.";
  module.def("cpu_info", &CpuInfo,
             "The CPU's name, the feature sets in use and those that it has (the last of each by itself), and what is "
             "wrong with "
             "ORTOLAN_ISA.");

  BindSparseAMXMatMul(module);
  BindW4A8MatMul(module);
  BindVNNISpMM(module);
  BindLutPostOp(module);
  BindMaskedMatMul(module);
  BindNoMADAttention(module);
  BindDecodeAttention(module);
  BindEpilogue(module);

  module.def("stream_read", &StreamReadArray, py::arg("buffer").noconvert(), py::arg("threads") = 1,
             py::arg("prefetch_bytes") = 4096, "Read a uint8 buffer once and return a checksum: the memory's rate.");
}
