// ortolan._testing: the kernels of SparseAMXMatMul, W4A8MatMul and VNNISpMM.
#include "formats/int4_group.h"
#include "sparse_amx_matmul/sparse_amx_matmul.h"
#include "sparse_amx_matmul/sparse_amx_matmul_int8.h"
#include "testing.h"
#include "vnni_spmm/vnni_spmm.h"
#include "w4a8_matmul/w4a8_matmul.h"

namespace ortolan {
namespace {

using Bias = std::optional<CastArray<float>>;

// x and bias of a product with a weight [k, n].
struct Activations {
  const CastArray<float>& x;
  const Bias& bias;

  int64_t Rows(int64_t k, int64_t n) const {
    Require(x.ndim() == 2 && x.shape(1) == k, "x must be [m, ", k, "]");
    Require(!bias || (bias->ndim() == 1 && bias->shape(0) == n), "bias must be [", n, "]");
    return x.shape(0);
  }
};

// y [m, n] = x @ W + bias. args: a kernel's, with all but x, bias and y. pack(x, bytes from row to row, m, packed)
// fills packed_bytes.
template <typename Args>
Array<float> Multiply(Args& args, const Activations& given, int64_t packed_bytes, const auto& pack,
                      void (*multiply)(const Args&, int64_t, int64_t)) {
  Array<float> y({args.m, args.w.n});
  args.bias = given.bias ? given.bias->data() : nullptr;
  args.y = y.mutable_data();
  args.y_row_bytes = args.w.n * kFloat;
  py::gil_scoped_release release;
  AlignedBytes packed(packed_bytes);
  pack(given.x.data(), args.w.k * kFloat, args.m, packed.data());
  args.x = packed.data();
  multiply(args, 0, BitmapPanels(args.w.n));
  return y;
}

Array<float> SparseAmxMatMul(const CastArray<float>& x, const Array<uint8_t>& masks, const Array<uint16_t>& values,
                             const Array<int64_t>& offsets, int64_t k, int64_t n, const Bias& bias,
                             const KernelName& name) {
  SparseMatMulArgs args;
  args.w = CheckedBitmap<Bf16Format>(masks, values, offsets, k, n);
  const Activations given{x, bias};
  args.m = given.Rows(k, n);
  const SparseMatMulKernel& kernel = KernelByName(SparseMatMulKernels(), name, {args.m});
  return Multiply(
      args, given, kernel.PackedBytes(args.m, k),
      [&](const float* rows, int64_t row_bytes, int64_t m, void* packed) {
        kernel.pack(rows, row_bytes, m, k, packed);
      },
      kernel.multiply);
}

// Int8Format: scales float, one row of them. Int4Format: scales bf16, one row a group.
template <typename Format, typename Scale>
Array<float> SparseInt8MatMul(const CastArray<float>& x, const Array<uint8_t>& masks,
                              const Array<typename Format::Value>& values, const Array<int64_t>& offsets,
                              const Array<Scale>& scales, int64_t group, int64_t k, int64_t n, const Bias& bias,
                              const KernelName& name) {
  SparseInt8MatMulArgs args;
  args.w = CheckedBitmap<Format>(masks, values, offsets, k, n);
  args.group = group;
  const Activations given{x, bias};
  args.m = given.Rows(k, n);
  const int64_t panels = BitmapPanels(n);
  const int64_t groups = ScaleRows(k, group);
  Require(
      scales.ndim() == 3 && scales.shape(0) == panels && scales.shape(1) == groups && scales.shape(2) == kPanelColumns,
      "scales must be [", panels, ", ", groups, ", ", kPanelColumns, "]: pack_scales makes them");
  args.scales = scales.data();
  const SparseInt8MatMulKernel& kernel = KernelByName(SparseInt8MatMulKernels(), name, {args.m});
  return Multiply(
      args, given, kernel.PackedBytes(args.m, k, group),
      [&](const float* rows, int64_t row_bytes, int64_t m, void* packed) {
        kernel.pack(rows, row_bytes, m, k, group, packed);
      },
      group == kWholeColumn ? kernel.multiply_int8 : kernel.multiply_int4);
}

Array<float> SparseAmxMatMulInt8(const CastArray<float>& x, const Array<uint8_t>& masks, const Array<int8_t>& values,
                                 const Array<int64_t>& offsets, const Array<float>& scales, int64_t k, int64_t n,
                                 const Bias& bias, const KernelName& name) {
  return SparseInt8MatMul<Int8Format>(x, masks, values, offsets, scales, kWholeColumn, k, n, bias, name);
}

Array<float> SparseAmxMatMulInt4(const CastArray<float>& x, const Array<uint8_t>& masks, const Array<uint8_t>& values,
                                 const Array<int64_t>& offsets, const Array<uint16_t>& scales, int64_t group_size,
                                 int64_t k, int64_t n, const Bias& bias, const KernelName& name) {
  Require(IsInt4Group(group_size), "group_size is ", group_size, ", expected 32, 64 or 128");
  return SparseInt8MatMul<Int4Format>(x, masks, values, offsets, scales, group_size, k, n, bias, name);
}

// scales: float32, or the bits of float16.
template <typename Scale>
Array<float> W4A8MatMul(const CastArray<float>& x, const Array<uint8_t>& weights, const Array<Scale>& scales,
                        int64_t group_size, int64_t k, int64_t n, const std::optional<Array<uint8_t>>& zero_points,
                        const Bias& bias, const KernelName& name) {
  const uint8_t* const points = zero_points ? zero_points->data() : nullptr;
  const int64_t point_count = zero_points ? zero_points->size() : 0;
  RequireNoProblem(ValidateInt4Group({k, n, group_size, weights.size(), scales.size(), points, point_count}));
  W4A8MatMulArgs args;
  const Activations given{x, bias};
  args.m = given.Rows(k, n);
  args.w = {k,
            n,
            group_size,
            weights.data(),
            reinterpret_cast<const uint8_t*>(scales.data()),
            sizeof(Scale) == 4 ? ScaleType::kFloat32 : ScaleType::kFloat16,
            point_count > 0 ? points : nullptr};
  const W4A8MatMulKernel& kernel = KernelByName(W4A8MatMulKernels(), name, {args.m});
  return Multiply(
      args, given, kernel.PackedBytes(args.m, k, group_size),
      [&](const float* rows, int64_t row_bytes, int64_t m, void* packed) {
        kernel.pack(rows, row_bytes, m, k, group_size, packed);
      },
      kernel.multiply);
}

// scale and zero_point of a range that is given; throws unless both are what kernels take.
FixedRange CheckedRange(const char* name, float scale, int64_t zero_point) {
  Require(scale > 0.0f, name, "scale is ", scale, ", expected more than 0");
  Require(zero_point >= 0 && zero_point <= 255, name, "zero_point is ", zero_point, ", expected 0 to 255");
  return {scale, static_cast<int32_t>(zero_point)};
}

const VnniSpmmKernel& FindVnniSpmm(int64_t m, int64_t most_inputs, const KernelName& name) {
  const VnniSpmmKernel& kernel = KernelByName(VnniSpmmKernels(), name, {m, most_inputs});
  Require(most_inputs <= kernel.most_inputs, "kernel ", kernel.name, " is for ", kernel.most_inputs,
          " inputs at most, k is ", most_inputs);
  return kernel;
}

// fixed: null if each row has a range of its own.
auto PackTokens(const VnniSpmmKernel& kernel, int64_t k, const FixedRange* fixed) {
  return [&kernel, k, fixed](const float* rows, int64_t row_bytes, int64_t m, void* packed) {
    kernel.pack(rows, row_bytes, m, k, fixed, packed);
  };
}

Array<float> VnniSpmm(const CastArray<float>& x, const Array<int8_t>& values, const Array<uint16_t>& indices,
                      const Array<int64_t>& starts, const Array<float>& scales, int64_t k, int64_t n, const Bias& bias,
                      const KernelName& name, std::optional<float> x_scale, int64_t x_zero_point) {
  VnniSpmmArgs args;
  args.w = CheckedBlockSparse(values, indices, starts, k, n, scales.size());
  const Activations given{x, bias};
  args.m = given.Rows(k, n);
  std::optional<FixedRange> fixed;
  if (x_scale) fixed = CheckedRange("x_", *x_scale, x_zero_point);
  args.scales = scales.data();
  const std::vector<int32_t> sums = SumsOfOutputs(args.w);
  args.sums = sums.data();
  const VnniSpmmKernel& kernel = FindVnniSpmm(args.m, k, name);
  const auto pack = PackTokens(kernel, k, fixed ? &*fixed : nullptr);
  return Multiply(args, given, kernel.PackedBytes(args.m, k), pack, kernel.multiply);
}

// The hidden layer's numbers as floats: what an identity matrix makes of them.
Array<float> VnniSpmmHidden(const CastArray<float>& x, float x_scale, int64_t x_zero_point, const Array<int8_t>& values,
                            const Array<uint16_t>& indices, const Array<int64_t>& starts, const Array<float>& scales,
                            int64_t k, int64_t n, const Bias& bias, float table_x_scale, int64_t table_x_zero_point,
                            float table_y_scale, int64_t table_y_zero_point, const Array<uint8_t>& table,
                            const KernelName& name) {
  HiddenLayerArgs args;
  args.w = CheckedBlockSparse(values, indices, starts, k, n, scales.size());
  const Activations given{x, bias};
  args.m = given.Rows(k, n);
  args.x_range = CheckedRange("x_", x_scale, x_zero_point);
  args.table_x = CheckedRange("table_x_", table_x_scale, table_x_zero_point);
  args.table_y = CheckedRange("table_y_", table_y_scale, table_y_zero_point);
  Require(table.size() == 256, "table must have 256 elements");
  args.table = table.data();
  args.scales = scales.data();
  args.bias = bias ? bias->data() : nullptr;
  const std::vector<int32_t> sums = SumsOfOutputs(args.w);
  args.sums = sums.data();
  const VnniSpmmKernel& kernel = FindVnniSpmm(args.m, std::max(k, n), name);
  AlignedBytes packed(kernel.PackedBytes(args.m, k));
  kernel.pack(x.data(), k * kFloat, args.m, k, &args.x_range, packed.data());
  args.x = packed.data();
  AlignedBytes next(kernel.PackedBytes(args.m, n));
  args.next = next.data();
  // In two pieces, as threads would.
  const int64_t panels = BitmapPanels(n);
  kernel.multiply_hidden(args, panels / 2, panels);
  kernel.multiply_hidden(args, 0, panels / 2);

  std::vector<int8_t> identity(static_cast<size_t>(n * n));
  for (int64_t i = 0; i < n; ++i) identity[static_cast<size_t>(i * n + i)] = 1;
  const BlockSparseMatrix ones = PackBlockSparse(identity.data(), n, n, n);
  const std::vector<float> of_ones(static_cast<size_t>(n), 1.0f);
  VnniSpmmArgs product;
  product.w = {n, n, ones.values.data(), reinterpret_cast<const uint8_t*>(ones.indices.data()), ones.starts.data()};
  const std::vector<int32_t> next_sums = SumsOfOutputs(product.w);
  product.sums = next_sums.data();
  product.scales = of_ones.data();
  product.m = args.m;
  Array<float> y({args.m, n});
  product.x = next.data();
  product.y = y.mutable_data();
  product.y_row_bytes = n * kFloat;
  kernel.multiply(product, 0, panels);
  return y;
}

}  // namespace

void BindMatMul(py::module_& module) {
  DefineKernelList(module, "sparse_amx_matmul", &SparseMatMulKernels);
  DefineKernelList(module, "sparse_amx_matmul_int8", &SparseInt8MatMulKernels);
  DefineKernelList(module, "w4a8_matmul", &W4A8MatMulKernels);
  DefineKernelList(module, "vnni_spmm", &VnniSpmmKernels);

  module.def("sparse_amx_matmul", &SparseAmxMatMul, py::arg("x"), py::arg("masks").noconvert(),
             py::arg("values").noconvert(), py::arg("offsets").noconvert(), py::arg("k"), py::arg("n"),
             py::arg("bias") = py::none(), py::arg("kernel") = py::none());
  module.def("sparse_amx_matmul_int8", &SparseAmxMatMulInt8, py::arg("x"), py::arg("masks").noconvert(),
             py::arg("values").noconvert(), py::arg("offsets").noconvert(), py::arg("scales").noconvert(), py::arg("k"),
             py::arg("n"), py::arg("bias") = py::none(), py::arg("kernel") = py::none());
  module.def("sparse_amx_matmul_int4", &SparseAmxMatMulInt4, py::arg("x"), py::arg("masks").noconvert(),
             py::arg("values").noconvert(), py::arg("offsets").noconvert(), py::arg("scales").noconvert(),
             py::arg("group_size"), py::arg("k"), py::arg("n"), py::arg("bias") = py::none(),
             py::arg("kernel") = py::none());
  const auto define_w4a8 = [&](auto* function) {
    module.def("w4a8_matmul", function, py::arg("x"), py::arg("weights").noconvert(), py::arg("scales").noconvert(),
               py::arg("group_size"), py::arg("k"), py::arg("n"), py::arg("zero_points").noconvert() = py::none(),
               py::arg("bias") = py::none(), py::arg("kernel") = py::none());
  };
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
