// ortolan._native: the epilogue and LayerNormalization.
#include <algorithm>

#include "bindings.h"
#include "epilogue/epilogue.h"
#include "epilogue/layer_norm.h"

namespace ortolan {
namespace {

// Checks that another operand of the epilogue is [m, n] with rows of contiguous floats, as the kernels read them.
void CheckEpilogueOperand(const StridedArray<float>& operand, const char* name, const EpilogueArgs& args) {
  constexpr int64_t kFloatBytes = sizeof(float);
  if (operand.ndim() != 2 || operand.shape(0) != args.m || operand.shape(1) != args.n) {
    throw std::invalid_argument(ErrorText(name, " must be [", args.m, ", ", args.n, "], as y"));
  }
  if (operand.size() > 1 &&
      ((args.n > 1 && operand.strides(1) != kFloatBytes) || operand.strides(0) % kFloatBytes != 0)) {
    throw std::invalid_argument(ErrorText(name, " must have rows of contiguous float32"));
  }
}

// y and residual may have gaps between their rows: the kernel sees the row strides of both.
StridedArray<float> Epilogue(const StridedArray<float>& y, int64_t activation,
                             const std::optional<StridedArray<float>>& residual,
                             const std::optional<Array<float>>& factor, const std::optional<std::string>& kernel_name) {
  constexpr int64_t kFloatBytes = sizeof(float);
  if (y.ndim() != 2) throw std::invalid_argument(ErrorText("y has ", y.ndim(), " dimensions, expected 2: [m, n]"));
  EpilogueArgs args;
  args.m = y.shape(0);
  args.n = y.shape(1);
  if (!IsActivation(activation)) {
    throw std::invalid_argument(ErrorText("activation is ", activation, ", expected 0 to 4"));
  }
  args.activation = static_cast<Activation>(activation);
  if (residual) {
    CheckEpilogueOperand(*residual, "residual", args);
    args.residual = residual->data();
    args.residual_row_bytes = residual->strides(0);
  }
  const EpilogueKernel& kernel =
      KernelByName(EpilogueKernels(), SelectKernel(EpilogueKernels(), ActiveFeatures()), kernel_name);
  const int64_t row = args.m > 1 ? std::max(args.n, y.strides(0) / kFloatBytes) : args.n;
  Array<float> result({args.m, row});
  std::fill_n(result.mutable_data(), result.size(), 0.0f);
  for (int64_t i = 0; i < args.m; ++i) {
    for (int64_t j = 0; j < args.n; ++j) result.mutable_at(i, j) = y.at(i, j);
  }
  args.y = result.mutable_data();
  args.y_row_bytes = row * kFloatBytes;
  args.x = args.y;
  args.x_row_bytes = args.y_row_bytes;
  // x and the factor share the distance between rows, and x is then apart from y.
  std::vector<float> x;
  if (factor) {
    CheckEpilogueOperand(*factor, "factor", args);
    for (int64_t i = 0; i < args.m; ++i) {
      for (int64_t j = 0; j < args.n; ++j) x.push_back(y.at(i, j));
    }
    args.x = x.data();
    args.factor = factor->data();
    args.x_row_bytes = args.n * kFloatBytes;
  }
  {
    py::gil_scoped_release release;
    kernel.run(args);
  }
  return StridedArray<float>({args.m, args.n}, {args.y_row_bytes, kFloatBytes}, result.data(), result);
}

// x may have gaps between its rows: the kernel sees its row stride, and the gaps of the result are zeros.
StridedArray<float> LayerNorm(const StridedArray<float>& x, const Array<float>& weight, const Array<float>& bias,
                              float epsilon, const std::optional<std::string>& kernel_name) {
  constexpr int64_t kFloatBytes = sizeof(float);
  if (x.ndim() != 2) throw std::invalid_argument(ErrorText("x has ", x.ndim(), " dimensions, expected 2: [m, n]"));
  LayerNormArgs args;
  args.m = x.shape(0);
  args.n = x.shape(1);
  for (const Array<float>* vector : {&weight, &bias}) {
    if (vector->ndim() == 1 && vector->shape(0) == args.n) continue;
    throw std::invalid_argument(ErrorText(vector == &weight ? "weight" : "bias", " must be [", args.n, "]"));
  }
  const LayerNormKernel& kernel =
      KernelByName(LayerNormKernels(), SelectKernel(LayerNormKernels(), ActiveFeatures()), kernel_name);
  const int64_t row = args.m > 1 ? std::max(args.n, x.strides(0) / kFloatBytes) : args.n;
  Array<float> result({args.m, row});
  std::fill_n(result.mutable_data(), result.size(), 0.0f);
  for (int64_t i = 0; i < args.m; ++i) {
    for (int64_t j = 0; j < args.n; ++j) result.mutable_at(i, j) = x.at(i, j);
  }
  args.y = result.mutable_data();
  args.y_row_bytes = row * kFloatBytes;
  args.weight = weight.data();
  args.bias = bias.data();
  args.epsilon = epsilon;
  {
    py::gil_scoped_release release;
    kernel.run(args);
  }
  return StridedArray<float>({args.m, args.n}, {args.y_row_bytes, kFloatBytes}, result.data(), result);
}

}  // namespace

void BindEpilogue(py::module_& module) {
  module.def(
      "epilogue_kernels", [] { return KernelList(EpilogueKernels()); },
      "The rows of the epilogue's kernel table, best first.");
  module.def("epilogue", &Epilogue, py::arg("y"), py::arg("activation"), py::arg("residual") = py::none(),
             py::arg("factor") = py::none(), py::arg("kernel") = py::none(),
             "activation(y) factor + residual [m, n] as a new array, by the named kernel or the best one.");
  module.def(
      "layer_norm_kernels", [] { return KernelList(LayerNormKernels()); },
      "The rows of LayerNormalization's kernel table, best first.");
  module.def("layer_norm", &LayerNorm, py::arg("x"), py::arg("weight"), py::arg("bias"), py::arg("epsilon"),
             py::arg("kernel") = py::none(),
             "LayerNormalization of the rows of x [m, n] as a new array, by the named kernel or the best one.");
}

}  // namespace ortolan
