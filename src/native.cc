// ortolan._native: packers, unpackers, shared rules, CPU information. It handles plain arrays; Python adds the bf16
// type.
#include "arrays.h"
#include "isa/features.h"
#include "isa/tuning.h"

namespace ortolan {

void BindPackedWeights(py::module_& module);
void BindCaches(py::module_& module);
void BindRules(py::module_& module);
void BindMatch(py::module_& module);
void BindMatchEpilogue(py::module_& module);
void BindMatchLinear(py::module_& module);
void BindSampling(py::module_& module);

namespace {

py::dict CpuInfo() {
  py::dict info;
  info["name"] = CpuName();
  const std::vector<std::string> active = NamesOf(ActiveFeatures());
  info["isa"] = active.back();
  info["features"] = active;
  info["detected_features"] = NamesOf(DetectedFeatures());
  info["isa_problem"] = IsaProblem();
  const Tuning& tuning = ActiveTuning();
  info["microarchitecture"] = tuning.microarchitecture;
  info["l1_bytes"] = tuning.l1_bytes;
  info["l2_bytes"] = tuning.l2_bytes;
  return info;
}

}  // namespace
}  // namespace ortolan

PYBIND11_MODULE(_native, module) {
  module.doc() = "Native core of Ortolan: packers, unpackers, rules, CPU information.";
  module.def(
      "cpu_info", &ortolan::CpuInfo,
      "Return the CPU's name, the feature sets in use (and the last of them as `isa`), the detected feature sets, "
      "what is wrong with ORTOLAN_ISA, and the tuning values in use.");
  ortolan::BindPackedWeights(module);
  ortolan::BindCaches(module);
  ortolan::BindRules(module);
  ortolan::BindMatch(module);
  ortolan::BindMatchEpilogue(module);
  ortolan::BindMatchLinear(module);
  ortolan::BindSampling(module);
}
