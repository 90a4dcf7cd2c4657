// ortolan._testing: the kernels of MaskedMatMul.
#include "masked_matmul/masked_matmul.h"

#include "masked_matmul/plan.h"
#include "masked_matmul/products.h"
#include "testing.h"

namespace ortolan {
namespace {

FloatRows Matrix(const CastArray<float>& x, const char* name) {
  Require(x.ndim() == 2 && x.size() > 0, name, " must be a matrix with at least one row and one column");
  return {x.data(), x.shape(1) * kFloat, x.shape(0), x.shape(1)};
}

Way WayByName(const std::string& name) {
  if (name == "blocks") return Way::kBlocks;
  if (name == "two_sided") return Way::kTwoSided;
  if (name == "values") return Way::kValues;
  throw std::invalid_argument("way is '" + name + "', expected blocks, two_sided or values");
}

// Returns None if a or b is not finite.
std::optional<Array<float>> MaskedMatMul(const CastArray<float>& a, const CastArray<float>& b,
                                         const std::string& way_name, const KernelName& name) {
  const FloatRows a_rows = Matrix(a, "a");
  const FloatRows b_rows = Matrix(b, "b");
  Require(a_rows.columns == b_rows.rows, "a and b do not fit");
  const Way way = WayByName(way_name);
  Require(way != Way::kTwoSided || a_rows.columns <= kMostListedInputs, "k is too large for way two_sided");
  const MaskedMatMulKernel& kernel = KernelByName(MaskedMatMulKernels(), name);
  Array<float> y({a_rows.rows, b_rows.columns});
  float* out = y.mutable_data();
  bool finite = true;
  {
    py::gil_scoped_release release;
    OneThread host;
    CallMemory memory(host);
    const Pattern pattern = FindPattern(kernel, a_rows, b_rows, way == Way::kTwoSided, memory);
    finite = pattern.finite;
    if (finite && way == Way::kValues) {
      MultiplyByValues(kernel, a_rows, b_rows, out, memory);
    } else if (finite) {
      finite = MultiplyBlocks(kernel, way, pattern, a_rows, b_rows, out, memory);
    }
  }
  if (!finite) return std::nullopt;
  return y;
}

// Returns the product computed by the plan, and the way it used. finite: b is known to be finite.
py::tuple PlannedMatMul(const CastArray<float>& a, const CastArray<float>& b, bool finite, const KernelName& name) {
  const FloatRows a_rows = Matrix(a, "a");
  const FloatRows b_rows = Matrix(b, "b");
  Require(a_rows.columns == b_rows.rows, "a and b do not fit");
  const DenseProduct dense = [](const ProductSize& size, const float* x, const float* weight, float* y) {
    std::fill_n(y, size.m * size.n, 0.0f);
    for (int64_t i = 0; i < size.m; ++i) {
      for (int64_t l = 0; l < size.k; ++l) {
        for (int64_t j = 0; j < size.n; ++j) y[i * size.n + j] += x[i * size.k + l] * weight[l * size.n + j];
      }
    }
  };
  KnownB known;
  known.finite = finite;
  const MaskedMatMulPlan plan(KernelByName(MaskedMatMulKernels(), name), ActiveTuning().masked, known);
  Array<float> y({a_rows.rows, b_rows.columns});
  OneThread host;
  CallMemory memory(host);
  const ProductSize size{a_rows.rows, a_rows.columns, b_rows.columns};
  const Way way = plan.Run({memory, dense, size, a_rows.data, b_rows.data, y.mutable_data()});
  constexpr const char* kWays[] = {"dense", "panels", "rows", "compact", "blocks", "two_sided", "values"};
  return py::make_tuple(y, kWays[static_cast<int>(way)]);
}

// b: float32, int8, or u16 with the bits of bf16.
template <typename Weight>
Array<float> MaskedRows(const CastArray<float>& a, const Array<Weight>& b,
                        const std::optional<CastArray<float>>& scales, int64_t group,
                        const std::optional<Array<uint8_t>>& always, const KernelName& name, bool panels) {
  const FloatRows a_rows = Matrix(a, "a");
  Require(b.ndim() == 2 && b.shape(0) == a_rows.columns && b.shape(1) > 0, "a and b do not fit");
  const int64_t n = b.shape(1);
  const int64_t k = a_rows.columns;
  Require(group >= 1, "group must be at least 1");
  Require(!scales || (scales->ndim() == 2 && scales->shape(0) == (k + group - 1) / group && scales->shape(1) == n),
          "scales must be [groups, n]");
  Require(!always || always->size() == k, "always must be [k]");
  const MaskedMatMulKernel& kernel = KernelByName(MaskedMatMulKernels(), name);
  Array<float> y({a_rows.rows, n});
  std::vector<float> used(static_cast<size_t>(a_rows.rows * (k + kBlockColumns)));
  std::vector<float> sums(static_cast<size_t>(a_rows.rows * n));
  std::vector<int32_t> inputs(static_cast<size_t>(k + kBlockColumns));
  RowsArgs args;
  args.m = a_rows.rows;
  args.a = used.data();
  args.a_row = k + kBlockColumns;
  args.inputs = inputs.data();
  args.b = b.data();
  args.n = n;
  args.scales = scales ? scales->data() : nullptr;
  args.group = group;
  args.sums = sums.data();
  args.y = y.mutable_data();
  py::gil_scoped_release release;
  args.count = kernel.list_inputs(a_rows, always ? always->data() : nullptr, inputs.data(), used.data(), args.a_row);
  constexpr ElementType kValues = sizeof(Weight) == 4   ? ElementType::kFloat
                                  : sizeof(Weight) == 2 ? ElementType::kBf16
                                                        : ElementType::kInt8;
  if (panels) {
    OneThread host;
    CallMemory memory(host);
    MultiplyByPanels(kernel, kValues, args, memory);
    return y;
  }
  // Compute in two work items, as MaskedMatMul does.
  const int64_t half = n / 2;
  MultiplyRowsFn* const multiply = kernel.multiply_rows[static_cast<int>(kValues)];
  multiply(args, 0, half);
  multiply(args, half, n);
  return y;
}

}  // namespace

void BindMaskedMatMul(py::module_& module) {
  DefineKernelList(module, "masked_matmul", &MaskedMatMulKernels);
  module.def("masked_matmul", &MaskedMatMul, py::arg("a"), py::arg("b"), py::arg("way") = "blocks",
             py::arg("kernel") = py::none());
  module.def("masked_matmul_plan", &PlannedMatMul, py::arg("a"), py::arg("b"), py::arg("finite") = false,
             py::arg("kernel") = py::none());
  const auto define_rows = [&](auto* function) {
    module.def("masked_rows", function, py::arg("a"), py::arg("b").noconvert(), py::arg("scales") = py::none(),
               py::arg("group") = 1, py::arg("always").noconvert() = py::none(), py::arg("kernel") = py::none(),
               py::arg("panels") = false);
  };
  define_rows(&MaskedRows<float>);
  define_rows(&MaskedRows<uint16_t>);
  define_rows(&MaskedRows<int8_t>);
}

}  // namespace ortolan
