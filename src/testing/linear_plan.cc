// ortolan._testing: the plan of linear layers, on a TestHost.
#include "matmul/linear_plan.h"

#include "host.h"
#include "host/broadcast.h"
#include "isa/features.h"
#include "matmul/bitmap_weight.h"
#include "matmul/device_choice.h"
#include "testing.h"

namespace ortolan {
namespace {

using Norm = std::tuple<CastArray<float>, CastArray<float>, float>;

Features FeaturesOf(const std::optional<std::string>& isa) {
  if (!isa) return ActiveFeatures();
  for (const NamedFeatureSet& set : FeatureSets()) {
    if (*isa == set.name && DetectedFeatures().Has(set.features)) return set.features;
  }
  throw std::invalid_argument("isa is '" + *isa + "', which this CPU does not support");
}

std::vector<int64_t> ShapeOf(const py::array& array) { return {array.shape(), array.shape() + array.ndim()}; }

Array<float> LinearLayerOf(const CastArray<float>& x, const Array<uint8_t>& masks, const Array<uint16_t>& values,
                           const Array<int64_t>& offsets, int64_t k, int64_t n,
                           const std::optional<CastArray<float>>& bias, const std::optional<CastArray<float>>& residual,
                           int64_t activation, int64_t gated_columns, const std::optional<Norm>& norm,
                           const std::optional<std::string>& isa, int threads) {
  const BitmapWeight w{{k, n}, CheckedBitmap<Bf16Format>(masks, values, offsets, k, n)};
  Require(x.ndim() == 2 && x.shape(1) == k, "x must be [m, ", k, "]");
  Require(!bias || (bias->ndim() == 1 && bias->shape(0) == n), "bias must be [", n, "]");
  Require(IsActivation(activation), "activation is ", activation, ", expected 0 to 4");
  Require(gated_columns == 0 || n == 2 * kPanelColumns * BitmapPanels(gated_columns), "gated_columns does not match n");
  LinearLayer layer;
  layer.w = &w;
  layer.kernels = Bf16Kernels();
  layer.panel_inputs = kBf16Bitmap.PaddedK(k);
  layer.activation = static_cast<Activation>(activation);
  layer.gated_columns = gated_columns;
  const std::vector<int64_t> shape{x.shape(0), layer.Columns()};
  if (norm) {
    const auto& [weight, norm_bias, epsilon] = *norm;
    Require(weight.size() == shape[1] && norm_bias.size() == shape[1], "norm weight and bias must be [", shape[1], "]");
    LayerNormArgs& args = layer.norm.emplace();
    args.weight = weight.data();
    args.bias = norm_bias.data();
    args.epsilon = epsilon;
  }
  LinearCall call;
  call.x = x.data();
  call.m = x.shape(0);
  call.bias = bias ? bias->data() : nullptr;
  std::vector<int64_t> y_shape = shape;
  if (residual) {
    const std::optional<std::vector<int64_t>> sum = BroadcastShape(shape, ShapeOf(*residual));
    Require(sum && sum->back() == shape[1], "residual must broadcast with y and have its number of columns");
    y_shape = *sum;
  }
  Array<float> y(y_shape);
  call.y = y.mutable_data();
  const LinearPlan plan(layer, FeaturesOf(isa));
  TestHost host(threads);
  py::gil_scoped_release release;
  if (residual) {
    plan.RunWithResidual(host, call, shape, {residual->data(), ShapeOf(*residual)}, y_shape);
  } else {
    plan.Run(host, call);
  }
  return y;
}

}  // namespace

void BindLinearPlan(py::module_& module) {
  module.def("linear_layer", &LinearLayerOf, py::arg("x"), py::arg("masks").noconvert(), py::arg("values").noconvert(),
             py::arg("offsets").noconvert(), py::arg("k"), py::arg("n"), py::kw_only(), py::arg("bias") = py::none(),
             py::arg("residual") = py::none(), py::arg("activation") = 0, py::arg("gated_columns") = 0,
             py::arg("norm") = py::none(), py::arg("isa") = py::none(), py::arg("threads") = 1);
  py::class_<DeviceChoice>(module, "DeviceChoice")
      .def(py::init<>())
      .def("takes", &DeviceChoice::Takes, py::arg("m"))
      .def("took", &DeviceChoice::Took, py::arg("m"), py::arg("on_device"), py::arg("seconds"));
}

}  // namespace ortolan
