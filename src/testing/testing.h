// ortolan._testing: kernels for tests and benchmarks, by name. Each file adds its functions to the module.
#pragma once

#include <optional>
#include <span>

#include "arrays.h"
#include "host/host.h"
#include "isa/kernel_table.h"

namespace ortolan {

void BindMatMul(py::module_& module);
void BindLinearPlan(py::module_& module);
void BindAttention(py::module_& module);
void BindDecodeAttention(py::module_& module);
void BindMaskedMatMul(py::module_& module);
void BindProvider(py::module_& module);
void BindEpilogue(py::module_& module);
void BindLutPostOp(py::module_& module);
void BindSimd(py::module_& module);
void BindStreamRead(py::module_& module);
void BindTensorView(py::module_& module);

// Returns the name of a row of feature_sets.inc, or "unknown".
inline const char* FeatureSetName(Features features) {
  for (const NamedFeatureSet& set : FeatureSets()) {
    if (set.features == features) return set.name;
  }
  return "unknown";
}

using KernelName = std::optional<std::string>;

// Returns the named kernel of a table, even if ORTOLAN_ISA excludes it; without a name, the best one for this work.
template <typename Kernel>
const Kernel& KernelByName(std::span<const Kernel> kernels, const KernelName& name) {
  if (!name) return SelectKernel(kernels, ActiveFeatures());
  std::string known;
  for (const Kernel& kernel : kernels) {
    known += (known.empty() ? "" : ", ") + std::string(kernel.name);
    if (*name != kernel.name) continue;
    Require(DetectedFeatures().Has(kernel.needs), "kernel ", *name, " needs ", FeatureSetName(kernel.needs),
            ", which this CPU does not support");
    return kernel;
  }
  throw std::invalid_argument(ErrorText("no kernel is called '", *name, "', expected one of: ", known));
}

template <typename Kernel>
void DefineKernelList(py::module_& module, const char* name, std::span<const Kernel> (*kernels)()) {
  module.def((std::string(name) + "_kernels").c_str(), [kernels] {
    py::list rows;
    for (const Kernel& kernel : kernels()) {
      py::dict row;
      row["name"] = kernel.name;
      row["isa"] = FeatureSetName(kernel.needs);
      row["runs_here"] = DetectedFeatures().Has(kernel.needs);
      if constexpr (requires { kernel.least_rows; }) row["least_rows"] = kernel.least_rows;
      if constexpr (requires { kernel.precision; }) row["precision"] = kernel.precision;
      if constexpr (requires { kernel.own_order; }) row["own_order"] = kernel.own_order;
      rows.append(row);
    }
    return rows;
  });
}

// A buffer aligned to 64 bytes, as ONNX Runtime aligns tensors.
class AlignedBytes {
 public:
  explicit AlignedBytes(int64_t bytes) : bytes_(static_cast<size_t>(bytes) + kAlignment) {}
  char* data() { return bytes_.data() + (kAlignment - reinterpret_cast<uintptr_t>(bytes_.data()) % kAlignment); }

 private:
  static constexpr size_t kAlignment = 64;
  std::vector<char> bytes_;
};

class OneThread : public Host {
  void RunTasks(int64_t count, Task* task, const void* user) override {
    for (int64_t i = 0; i < count; ++i) task(user, i);
  }
  void* Allocate(size_t bytes) override { return ::operator new(bytes); }
  void Free(void* data) noexcept override { ::operator delete(data); }
};

}  // namespace ortolan
