// ortolan._testing: functions of the vector API (ops/simd), by target and name.
#include <cstring>

#include "simd_call.h"
#include "testing.h"

namespace ortolan {

#define ORTOLAN_KERNEL(target)                          \
  namespace target {                                    \
  extern const int64_t kSimdLanes;                      \
  bool RunSimd(const SimdCall& call);                   \
  int64_t RunPeak(const char* product, int64_t rounds); \
  }
#include "simd_kernels.inc"
#undef ORTOLAN_KERNEL

namespace {

const std::vector<SimdTarget>& SimdTargets() {
  static const std::vector<SimdTarget> targets = {
#define ORTOLAN_KERNEL(target) {#target, feature_set::target, target::kSimdLanes, target::RunSimd, target::RunPeak},
#include "simd_kernels.inc"
#undef ORTOLAN_KERNEL
  };
  return targets;
}

// Returns {name: lanes} of the targets that this CPU can run.
py::dict LanesOfTargets() {
  py::dict lanes;
  for (const SimdTarget& target : SimdTargets()) {
    if (DetectedFeatures().Has(target.needs)) lanes[target.name] = target.lanes;
  }
  return lanes;
}

const SimdTarget& TargetHere(const std::string& name) {
  const auto has_name = [&](const SimdTarget& target) { return target.name == name; };
  const auto target = std::ranges::find_if(SimdTargets(), has_name);
  Require(target != SimdTargets().end() && DetectedFeatures().Has(target->needs), "target is ", name,
          ", which this build or CPU does not support");
  return *target;
}

// Runs products with all operands in registers; returns the number of multiply-adds.
int64_t Peak(const std::string& target, const std::string& product, int64_t rounds) {
  const int64_t done = TargetHere(target).peak(product.c_str(), rounds);
  Require(done > 0 || rounds <= 0, "product is ", product, ", which the target does not have");
  return done;
}

// Calls a function. Each argument is zero-padded to SimdCall::kBytes; the result has the same size and is 0xEE where
// nothing is written. Returns None if the target has no such function.
std::optional<Array<uint8_t>> Simd(const std::string& name, const std::string& function, const py::args& arrays,
                                   int64_t number) {
  const SimdTarget& target = TargetHere(name);
  SimdCall call;
  call.function = function.c_str();
  call.number = number;
  AlignedBytes memory(static_cast<int64_t>(std::size(call.in)) * SimdCall::kBytes);
  Require(arrays.size() <= std::size(call.in), "too many arguments, expected at most ", std::size(call.in));
  for (size_t i = 0; i < std::size(call.in); ++i) {
    char* const argument = memory.data() + i * SimdCall::kBytes;
    std::memset(argument, 0, SimdCall::kBytes);
    call.in[i] = reinterpret_cast<const uint8_t*>(argument);
    if (i >= arrays.size()) continue;
    const py::array array = py::array::ensure(arrays[i], py::array::c_style);
    Require(array && array.nbytes() <= SimdCall::kBytes, "arguments must have at most ", SimdCall::kBytes, " bytes");
    std::memcpy(argument, array.data(), static_cast<size_t>(array.nbytes()));
  }
  Array<uint8_t> result(SimdCall::kBytes);
  call.out = result.mutable_data();
  std::memset(call.out, 0xEE, SimdCall::kBytes);
  if (!target.run(call)) return std::nullopt;
  return result;
}

}  // namespace

void BindSimd(py::module_& module) {
  module.def("simd_lanes", &LanesOfTargets);
  module.def("peak", &Peak, py::arg("target"), py::arg("product"), py::arg("rounds"));
  module.def("simd", &Simd, py::arg("target"), py::arg("function"), py::arg("number") = 0);
}

}  // namespace ortolan
