// ortolan._testing: the kernels of SparseAMXMatMul, W4A8MatMul, W8A8MatMul and VNNISpMM.
#include "formats/group.h"
#include "matmul/bitmap_weight.h"
#include "matmul/block_sparse_weight.h"
#include "matmul/group_layer.h"
#include "matmul/kernel_choice.h"
#include "testing.h"

namespace ortolan {
namespace {

using Bias = std::optional<CastArray<float>>;

// Checks x and bias, and returns the number of rows of x.
int64_t CheckActivations(const MatMulWeight& w, const CastArray<float>& x, const Bias& bias) {
  Require(x.ndim() == 2 && x.shape(1) == w.k, "x must be [m, ", w.k, "]");
  Require(!bias || (bias->ndim() == 1 && bias->shape(0) == w.n), "bias must be [", w.n, "]");
  return x.shape(0);
}

// Returns the kernel of that name, or the best one for m rows. Like plans, passes over kernels that do not multiply all
// of the weights.
const MatMulKernel& FindKernel(std::span<const MatMulKernel> kernels, const KernelName& name, int64_t m,
                               std::initializer_list<const MatMulWeight*> weights) {
  const auto from = name ? static_cast<size_t>(&KernelByName(kernels, name) - kernels.data()) : 0;
  const auto found = SupportedKernels(kernels.subspan(from), name ? DetectedFeatures() : ActiveFeatures(), weights);
  Require(!found.empty(), "no kernel multiplies weights of ", (*weights.begin())->k, " inputs");
  return name ? *found.front() : KernelForRows(found, m);
}

// Computes y [m, n] = x @ W + bias.
Array<float> MatMul(const MatMulWeight& w, std::span<const MatMulKernel> kernels, const CastArray<float>& x,
                    const Bias& bias, const KernelName& name) {
  MatMulArgs args;
  args.m = CheckActivations(w, x, bias);
  args.w = &w;
  const MatMulKernel& kernel = FindKernel(kernels, name, args.m, {&w});
  Array<float> y({args.m, w.n});
  args.bias = bias ? bias->data() : nullptr;
  args.y = y.mutable_data();
  args.y_row_bytes = w.n * kFloat;
  py::gil_scoped_release release;
  AlignedBytes packed(kernel.PackedBytes(w, args.m));
  kernel.pack(w, x.data(), w.k * kFloat, args.m, packed.data());
  args.x = packed.data();
  kernel.multiply(args, 0, BitmapPanels(w.n));
  return y;
}

Array<float> SparseAmxMatMul(const CastArray<float>& x, const Array<uint8_t>& masks, const Array<uint16_t>& values,
                             const Array<int64_t>& offsets, int64_t k, int64_t n, const Bias& bias,
                             const KernelName& name) {
  const BitmapWeight w{{k, n}, CheckedBitmap<Bf16Format>(masks, values, offsets, k, n)};
  return MatMul(w, Bf16Kernels(), x, bias, name);
}

// Int8Format: one row of float scales. Int4Format: bf16 scales, one row a group.
template <typename Format, typename Scale>
Array<float> QuantizedMatMul(std::span<const MatMulKernel> kernels, const CastArray<float>& x,
                             const Array<uint8_t>& masks, const Array<typename Format::Value>& values,
                             const Array<int64_t>& offsets, const Array<Scale>& scales, int64_t group, int64_t k,
                             int64_t n, const Bias& bias, const KernelName& name, bool x_zero_points = false,
                             const std::optional<Array<int8_t>>& zero_points = {}) {
  BitmapWeight w{{k, n}, CheckedBitmap<Format>(masks, values, offsets, k, n), group, scales.data(), nullptr};
  std::vector<int32_t> sums;
  if (x_zero_points) {
    sums = SumsOfColumnsInt8(w.view);
    w.column_sums = sums.data();
    w.pairs_fit = PairsFitInt8(w.view);
  }
  const int64_t panels = BitmapPanels(n);
  std::vector<int32_t> zeros;
  if (zero_points) {
    Require(x_zero_points && zero_points->size() == panels * kPanelColumns && k <= kMostInputsWithWeightZeroPoints,
            "zero_points must be [", panels, ", 1, ", kPanelColumns, "], with x_zero_points and at most ",
            kMostInputsWithWeightZeroPoints, " inputs");
    zeros.assign(zero_points->data(), zero_points->data() + zero_points->size());
    w.zero_points = zeros.data();
  }
  const int64_t groups = ScaleRows(k, group);
  Require(
      scales.ndim() == 3 && scales.shape(0) == panels && scales.shape(1) == groups && scales.shape(2) == kPanelColumns,
      "scales must be [", panels, ", ", groups, ", ", kPanelColumns, "], as made by pack_scales");
  return MatMul(w, kernels, x, bias, name);
}

Array<float> SparseAmxMatMulInt8(const CastArray<float>& x, const Array<uint8_t>& masks, const Array<int8_t>& values,
                                 const Array<int64_t>& offsets, const Array<float>& scales, int64_t k, int64_t n,
                                 const Bias& bias, const KernelName& name, bool x_zero_points,
                                 const std::optional<Array<int8_t>>& zero_points) {
  return QuantizedMatMul<Int8Format>(Int8Kernels(), x, masks, values, offsets, scales, kWholeColumn, k, n, bias, name,
                                     x_zero_points, zero_points);
}

Array<float> SparseAmxMatMulInt4(const CastArray<float>& x, const Array<uint8_t>& masks, const Array<uint8_t>& values,
                                 const Array<int64_t>& offsets, const Array<uint16_t>& scales, int64_t group_size,
                                 int64_t k, int64_t n, const Bias& bias, const KernelName& name) {
  Require(IsGroupSize(group_size), "group_size is ", group_size, ", expected 32, 64 or 128");
  return QuantizedMatMul<Int4Format>(Int4Kernels(), x, masks, values, offsets, scales, group_size, k, n, bias, name);
}

// scales and minimums: float32, or the bits of float16.
template <typename Scale>
Array<float> W4A8MatMul(const CastArray<float>& x, const Array<uint8_t>& weights, const Array<Scale>& scales,
                        int64_t group_size, int64_t k, int64_t n, const std::optional<Array<uint8_t>>& zero_points,
                        const Bias& bias, const KernelName& name, const std::optional<Array<Scale>>& minimums,
                        int64_t zero_point_steps, const std::optional<Array<uint8_t>>& subgroup_scales,
                        int64_t subgroup_size, const std::optional<Array<uint8_t>>& high_bits, int64_t bits,
                        int64_t subgroup_scale_bits, int64_t subgroup_zero_point,
                        const std::optional<Array<uint8_t>>& subgroup_minimums) {
  GroupView view{k, n, group_size, weights.data(), reinterpret_cast<const uint8_t*>(scales.data())};
  view.scale_type = sizeof(Scale) == 4 ? ScaleType::kFloat32 : ScaleType::kFloat16;
  GroupClaim claim{k, n, group_size, weights.size(), scales.size()};
  if (zero_points) {
    claim.zero_points = view.zero_points = zero_points->data();
    claim.zero_point_count = zero_points->size();
    claim.zero_point_steps = view.zero_point_steps = zero_point_steps;
  }
  if (minimums) {
    view.minimums = reinterpret_cast<const uint8_t*>(minimums->data());
    claim.minimum_count = minimums->size();
  }
  const auto data = [](const auto& tensor) { return tensor ? tensor->data() : nullptr; };
  const auto size = [](const auto& tensor) { return tensor ? tensor->size() : 0; };
  if (subgroup_size != 0) {
    view.subgroups = {
        subgroup_size,          bits, data(subgroup_scales), data(high_bits), subgroup_scale_bits, subgroup_zero_point,
        data(subgroup_minimums)};
    claim.subgroups = {
        subgroup_size,          bits, size(subgroup_scales), size(high_bits), subgroup_scale_bits, subgroup_zero_point,
        size(subgroup_minimums)};
  }
  RequireNoProblem(ValidateGroups(kInt4Bitmap, claim));
  const GroupWeight w{{k, n}, view};
  return MatMul(w, LayerOf(Int4Groups(), w).kernels, x, bias, name);
}

// scales: float32, or the bits of float16.
template <typename Scale>
Array<float> W8A8MatMul(const CastArray<float>& x, const Array<int8_t>& weights, const Array<Scale>& scales,
                        int64_t group_size, int64_t k, int64_t n, const Bias& bias, const KernelName& name) {
  const GroupView view{k,
                       n,
                       group_size,
                       reinterpret_cast<const uint8_t*>(weights.data()),
                       reinterpret_cast<const uint8_t*>(scales.data()),
                       sizeof(Scale) == 4 ? ScaleType::kFloat32 : ScaleType::kFloat16};
  RequireNoProblem(ValidateGroups(kInt8Bitmap, {k, n, group_size, weights.size(), scales.size()}));
  return MatMul(GroupWeight{{k, n}, view}, GroupInt8Kernels(), x, bias, name);
}

// Returns a fixed range, or throws if kernels cannot use it.
FixedRange CheckedRange(const char* name, float scale, int64_t zero_point) {
  Require(scale > 0.0f, name, "scale is ", scale, ", expected more than 0");
  Require(zero_point >= 0 && zero_point <= 255, name, "zero_point is ", zero_point, ", expected 0 to 255");
  return {scale, static_cast<int32_t>(zero_point)};
}

Array<float> VnniSpmm(const CastArray<float>& x, const Array<int8_t>& values, const Array<uint16_t>& indices,
                      const Array<int64_t>& starts, const Array<float>& scales, int64_t k, int64_t n, const Bias& bias,
                      const KernelName& name, std::optional<float> x_scale, int64_t x_zero_point) {
  const BlockSparseView view = CheckedBlockSparse(values, indices, starts, k, n, scales.size());
  const std::vector<int32_t> sums = SumsOfOutputs(view);
  BlockSparseWeight w{{k, n}, view, sums.data(), scales.data(), {}};
  if (x_scale) w.x_range = CheckedRange("x_", *x_scale, x_zero_point);
  return MatMul(w, BlockSparseKernels(), x, bias, name);
}

// Returns the hidden layer's outputs as floats, by multiplying them with an identity matrix.
Array<float> VnniSpmmHidden(const CastArray<float>& x, float x_scale, int64_t x_zero_point, const Array<int8_t>& values,
                            const Array<uint16_t>& indices, const Array<int64_t>& starts, const Array<float>& scales,
                            int64_t k, int64_t n, const Bias& bias, float table_x_scale, int64_t table_x_zero_point,
                            float table_y_scale, int64_t table_y_zero_point, const Array<uint8_t>& table,
                            const KernelName& name) {
  const BlockSparseView view = CheckedBlockSparse(values, indices, starts, k, n, scales.size());
  const std::vector<int32_t> sums = SumsOfOutputs(view);
  Require(table.size() == 256, "table must have 256 elements");
  const HiddenLayerWeight w{{{k, n}, view, sums.data(), scales.data(), CheckedRange("x_", x_scale, x_zero_point)},
                            CheckedRange("table_x_", table_x_scale, table_x_zero_point),
                            CheckedRange("table_y_", table_y_scale, table_y_zero_point),
                            table.data()};
  std::vector<int8_t> identity(static_cast<size_t>(n * n));
  for (int64_t i = 0; i < n; ++i) identity[static_cast<size_t>(i * n + i)] = 1;
  const BlockSparseMatrix ones = PackBlockSparse(identity.data(), n, n, n);
  const BlockSparseView next_view{n, n, ones.values.data(), reinterpret_cast<const uint8_t*>(ones.indices.data()),
                                  ones.starts.data()};
  const std::vector<int32_t> next_sums = SumsOfOutputs(next_view);
  const std::vector<float> of_ones(static_cast<size_t>(n), 1.0f);
  const BlockSparseWeight next_w{{n, n}, next_view, next_sums.data(), of_ones.data(), {}};

  HiddenLayerArgs args;
  args.m = CheckActivations(w, x, bias);
  args.w = &w;
  args.bias = bias ? bias->data() : nullptr;
  const MatMulKernel& kernel = FindKernel(BlockSparseKernels(), name, args.m, {&w, &next_w});
  AlignedBytes packed(kernel.PackedBytes(w, args.m));
  kernel.pack(w, x.data(), k * kFloat, args.m, packed.data());
  args.x = packed.data();
  AlignedBytes packed_next(kernel.PackedBytes(next_w, args.m));
  args.next = packed_next.data();
  // In two work items, in any order, as threads would.
  const int64_t panels = BitmapPanels(n);
  kernel.multiply_hidden(args, panels / 2, panels);
  kernel.multiply_hidden(args, 0, panels / 2);

  Array<float> y({args.m, n});
  MatMulArgs next;
  next.m = args.m;
  next.x = packed_next.data();
  next.w = &next_w;
  next.y = y.mutable_data();
  next.y_row_bytes = n * kFloat;
  kernel.multiply(next, 0, panels);
  return y;
}

}  // namespace

void BindMatMul(py::module_& module) {
  DefineKernelList(module, "sparse_amx_matmul", &Bf16Kernels);
  DefineKernelList(module, "sparse_amx_matmul_int8", &Int8Kernels);
  DefineKernelList(module, "w4a8_matmul", &GroupInt4Kernels);
  DefineKernelList(module, "w8a8_matmul", &GroupInt8Kernels);
  DefineKernelList(module, "subgroup", &SubgroupKernels);
  DefineKernelList(module, "k_quant", &KQuantKernels);
  DefineKernelList(module, "vnni_spmm", &BlockSparseKernels);

  module.def("sparse_amx_matmul", &SparseAmxMatMul, py::arg("x"), py::arg("masks").noconvert(),
             py::arg("values").noconvert(), py::arg("offsets").noconvert(), py::arg("k"), py::arg("n"),
             py::arg("bias") = py::none(), py::arg("kernel") = py::none());
  module.def("sparse_amx_matmul_int8", &SparseAmxMatMulInt8, py::arg("x"), py::arg("masks").noconvert(),
             py::arg("values").noconvert(), py::arg("offsets").noconvert(), py::arg("scales").noconvert(), py::arg("k"),
             py::arg("n"), py::arg("bias") = py::none(), py::arg("kernel") = py::none(),
             py::arg("x_zero_points") = false, py::arg("zero_points").noconvert() = py::none());
  module.def("sparse_amx_matmul_int4", &SparseAmxMatMulInt4, py::arg("x"), py::arg("masks").noconvert(),
             py::arg("values").noconvert(), py::arg("offsets").noconvert(), py::arg("scales").noconvert(),
             py::arg("group_size"), py::arg("k"), py::arg("n"), py::arg("bias") = py::none(),
             py::arg("kernel") = py::none());
  const auto define_w4a8 = [&](auto* function) {
    module.def("w4a8_matmul", function, py::arg("x"), py::arg("weights").noconvert(), py::arg("scales").noconvert(),
               py::arg("group_size"), py::arg("k"), py::arg("n"), py::arg("zero_points").noconvert() = py::none(),
               py::arg("bias") = py::none(), py::arg("kernel") = py::none(),
               py::arg("minimums").noconvert() = py::none(), py::arg("zero_point_steps") = 1,
               py::arg("subgroup_scales").noconvert() = py::none(), py::arg("subgroup_size") = 0,
               py::arg("high_bits").noconvert() = py::none(), py::arg("bits") = 4, py::arg("subgroup_scale_bits") = 0,
               py::arg("subgroup_zero_point") = 0, py::arg("subgroup_minimums").noconvert() = py::none());
  };
  const auto define_w8a8 = [&](auto* function) {
    module.def("w8a8_matmul", function, py::arg("x"), py::arg("weights").noconvert(), py::arg("scales").noconvert(),
               py::arg("group_size"), py::arg("k"), py::arg("n"), py::arg("bias") = py::none(),
               py::arg("kernel") = py::none());
  };
  define_w8a8(&W8A8MatMul<float>);
  define_w8a8(&W8A8MatMul<uint16_t>);
  define_w4a8(&W4A8MatMul<float>);
  define_w4a8(&W4A8MatMul<uint16_t>);
  module.def("vnni_spmm", &VnniSpmm, py::arg("x"), py::arg("values").noconvert(), py::arg("indices").noconvert(),
             py::arg("starts").noconvert(), py::arg("scales").noconvert(), py::arg("k"), py::arg("n"),
             py::arg("bias") = py::none(), py::arg("kernel") = py::none(), py::arg("x_scale") = py::none(),
             py::arg("x_zero_point") = 0);
  module.def("vnni_spmm_hidden", &VnniSpmmHidden, py::arg("x"), py::arg("x_scale"), py::arg("x_zero_point"),
             py::arg("values").noconvert(), py::arg("indices").noconvert(), py::arg("starts").noconvert(),
             py::arg("scales").noconvert(), py::arg("k"), py::arg("n"), py::arg("bias"), py::arg("table_x_scale"),
             py::arg("table_x_zero_point"), py::arg("table_y_scale"), py::arg("table_y_zero_point"),
             py::arg("table").noconvert(), py::arg("kernel") = py::none());
}

}  // namespace ortolan
