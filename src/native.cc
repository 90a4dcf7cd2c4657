// ortolan._native: packers, unpackers, CPU information. Arrays only; Python puts bf16 on top.
#include "arrays.h"
#include "isa/features.h"
#include "isa/tuning.h"

namespace ortolan {

void BindPackedWeights(py::module_& module);
void BindCaches(py::module_& module);
void BindRules(py::module_& module);

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
      "The CPU's name, the feature sets in use and those that it has (the last of each by itself), what is wrong "
      "with ORTOLAN_ISA, and the row of isa/tuning.inc in use.");
  ortolan::BindPackedWeights(module);
  ortolan::BindCaches(module);
  ortolan::BindRules(module);
}
