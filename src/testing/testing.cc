#include "testing.h"

PYBIND11_MODULE(_testing, module) {
  module.doc() = "Kernels of Ortolan for tests and benchmarks, by name, on one thread.";
#ifdef ORTOLAN_AMX_ON_AVX2
  module.attr("AMX_VECTORS") = "avx2";
#else
  module.attr("AMX_VECTORS") = "avx512bf16";
#endif
  module.def("feature_sets", [] {
    std::vector<std::string> names;
    for (const ortolan::NamedFeatureSet& set : ortolan::FeatureSets()) names.emplace_back(set.name);
    return names;
  });
  ortolan::BindMatMul(module);
  ortolan::BindLinearPlan(module);
  ortolan::BindAttention(module);
  ortolan::BindDecodeAttention(module);
  ortolan::BindMaskedMatMul(module);
  ortolan::BindProvider(module);
  ortolan::BindEpilogue(module);
  ortolan::BindLutPostOp(module);
  ortolan::BindSimd(module);
  ortolan::BindStreamRead(module);
  ortolan::BindTensorView(module);
}
