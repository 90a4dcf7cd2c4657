// ortolan._testing: the epilogue and LayerNormalization.
#include "epilogue/epilogue.h"

#include "testing.h"

namespace ortolan {
namespace {

using StridedArray = py::array_t<float, py::array::forcecast>;

// A copy of a matrix with the same row stride and zeros in the gaps, where kernels must not write.
class Result {
 public:
  Result(const StridedArray& x, const char* name) {
    Require(x.ndim() == 2, name, " has ", x.ndim(), " dimensions, expected 2: [m, n]");
    m = x.shape(0);
    n = x.shape(1);
    const int64_t row = m > 1 ? std::max(n, x.strides(0) / kFloat) : n;
    memory_ = Array<float>({m, row});
    std::fill_n(memory_.mutable_data(), memory_.size(), 0.0f);
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) memory_.mutable_at(i, j) = x.at(i, j);
    }
    data = memory_.mutable_data();
    row_bytes = row * kFloat;
  }

  StridedArray Take() const { return StridedArray({m, n}, {row_bytes, kFloat}, data, memory_); }

  int64_t m, n, row_bytes;
  float* data;

 private:
  Array<float> memory_;
};

// Checks that an operand is [m, n] with rows of contiguous floats, as kernels require.
void CheckOperand(const StridedArray& operand, const char* name, const Result& y) {
  Require(operand.ndim() == 2 && operand.shape(0) == y.m && operand.shape(1) == y.n, name, " must be [", y.m, ", ", y.n,
          "], like y");
  Require(operand.size() <= 1 || ((y.n <= 1 || operand.strides(1) == kFloat) && operand.strides(0) % kFloat == 0), name,
          " must have rows of contiguous float32");
}

StridedArray Epilogue(const StridedArray& y, int64_t activation, const std::optional<StridedArray>& residual,
                      const std::optional<Array<float>>& factor, const KernelName& name) {
  Result result(y, "y");
  EpilogueArgs args;
  args.m = result.m;
  args.n = result.n;
  Require(IsActivation(activation), "activation is ", activation, ", expected 0 to 4");
  args.activation = static_cast<Activation>(activation);
  if (residual) {
    CheckOperand(*residual, "residual", result);
    args.residual = residual->data();
    args.residual_row_bytes = residual->strides(0);
  }
  args.y = result.data;
  args.y_row_bytes = result.row_bytes;
  args.x = args.y;
  args.x_row_bytes = args.y_row_bytes;
  // x and the factor share a row stride, so x needs its own memory.
  std::vector<float> x;
  if (factor) {
    CheckOperand(*factor, "factor", result);
    for (int64_t i = 0; i < args.m; ++i) {
      for (int64_t j = 0; j < args.n; ++j) x.push_back(y.at(i, j));
    }
    args.x = x.data();
    args.factor = factor->data();
    args.x_row_bytes = args.n * kFloat;
  }
  KernelByName(EpilogueKernels(), name).run(args);
  return result.Take();
}

StridedArray LayerNorm(const StridedArray& x, const Array<float>& weight, const Array<float>& bias, float epsilon,
                       const KernelName& name) {
  Result result(x, "x");
  for (const Array<float>* vector : {&weight, &bias}) {
    Require(vector->ndim() == 1 && vector->shape(0) == result.n, vector == &weight ? "weight" : "bias", " must be [",
            result.n, "]");
  }
  LayerNormArgs args;
  args.m = result.m;
  args.n = result.n;
  args.y = result.data;
  args.y_row_bytes = result.row_bytes;
  args.weight = weight.data();
  args.bias = bias.data();
  args.epsilon = epsilon;
  KernelByName(EpilogueKernels(), name).layer_norm(args);
  return result.Take();
}

}  // namespace

void BindEpilogue(py::module_& module) {
  DefineKernelList(module, "epilogue", &EpilogueKernels);
  module.def("epilogue", &Epilogue, py::arg("y"), py::arg("activation"), py::arg("residual") = py::none(),
             py::arg("factor") = py::none(), py::arg("kernel") = py::none());
  DefineKernelList(module, "layer_norm", &EpilogueKernels);
  module.def("layer_norm", &LayerNorm, py::arg("x"), py::arg("weight"), py::arg("bias"), py::arg("epsilon"),
             py::arg("kernel") = py::none());
}

}  // namespace ortolan
