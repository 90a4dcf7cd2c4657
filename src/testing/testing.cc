#include "testing.h"

PYBIND11_MODULE(_testing, module) {
  module.doc() = "Kernels of Ortolan for tests and benchmarks, by name, on one thread.";
  ortolan::BindMatMul(module);
  ortolan::BindAttention(module);
  ortolan::BindDecodeAttention(module);
  ortolan::BindMaskedMatMul(module);
  ortolan::BindEpilogue(module);
  ortolan::BindLutPostOp(module);
  ortolan::BindStreamRead(module);
}
