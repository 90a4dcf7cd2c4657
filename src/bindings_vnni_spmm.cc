// ortolan._native: format and kernels of VNNISpMM.
#include <algorithm>

#include "bindings.h"
#include "formats/bitmap.h"
#include "formats/block_sparse_4x1.h"
#include "vnni_spmm/vnni_spmm.h"

namespace ortolan {
namespace {

py::tuple PackBlockSparseArray(const Array<int8_t>& q) {
  if (q.ndim() != 2) throw std::invalid_argument(ErrorText("q has ", q.ndim(), " dimensions, expected 2: [k, n]"));
  const int64_t k = q.shape(0);
  const int64_t n = q.shape(1);
  if (k < 1 || n < 1 || k > kMostSparseInputs || n > kMostSparseOutputs) {
    throw std::invalid_argument(
        ErrorText("q is ", k, " x ", n, ", expected 1 to ", kMostSparseInputs, " x 1 to ", kMostSparseOutputs));
  }
  const BlockSparseMatrix packed = [&] {
    py::gil_scoped_release release;
    return PackBlockSparse(q.data(), n, k, n);
  }();
  const int64_t quads = packed.starts.back();
  return py::make_tuple(ToArray(packed.values, {quads, kGroupOutputs, kQuadInputs}),
                        ToArray(packed.indices, {quads, kQuadInputs}),
                        ToArray(packed.starts, {static_cast<py::ssize_t>(packed.starts.size())}));
}

BlockSparseView CheckedBlockSparse(const Array<int8_t>& values, const Array<uint16_t>& indices,
                                   const Array<int64_t>& starts, int64_t k, int64_t n, int64_t scale_count) {
  const BlockSparseView view{k, n, values.data(), reinterpret_cast<const uint8_t*>(indices.data()), starts.data()};
  const std::string problem = ValidateBlockSparse({view, values.size(), indices.size(), starts.size(), scale_count});
  if (!problem.empty()) throw std::invalid_argument(problem);
  return view;
}

Array<int8_t> UnpackBlockSparseArray(const Array<int8_t>& values, const Array<uint16_t>& indices,
                                     const Array<int64_t>& starts, int64_t k, int64_t n) {
  const BlockSparseView view = CheckedBlockSparse(values, indices, starts, k, n, n);
  Array<int8_t> q({k, n});
  int8_t* out = q.mutable_data();
  py::gil_scoped_release release;
  UnpackBlockSparse(view, out, n);
  return q;
}

// scale and zero_point of a range that is given; throws unless both are what kernels take.
FixedRange CheckedRange(const char* name, float scale, int64_t zero_point) {
  if (!(scale > 0.0f)) throw std::invalid_argument(ErrorText(name, "scale is ", scale, ", expected more than 0"));
  if (zero_point < 0 || zero_point > 255) {
    throw std::invalid_argument(ErrorText(name, "zero_point is ", zero_point, ", expected 0 to 255"));
  }
  return {scale, static_cast<int32_t>(zero_point)};
}

const VnniSpmmKernel& FindKernel(int64_t m, int64_t most_inputs, const std::optional<std::string>& name) {
  const VnniSpmmKernel& kernel =
      KernelByName(VnniSpmmKernels(), SelectVnniSpmm(ActiveFeatures(), m, most_inputs), name);
  if (most_inputs > kernel.most_inputs) {
    throw std::invalid_argument(
        ErrorText("kernel ", kernel.name, " is for ", kernel.most_inputs, " inputs at most, k is ", most_inputs));
  }
  return kernel;
}

Array<float> VnniSpmm(const CastArray<float>& x, const Array<int8_t>& values, const Array<uint16_t>& indices,
                      const Array<int64_t>& starts, const Array<float>& scales, int64_t k, int64_t n,
                      const std::optional<CastArray<float>>& bias, const std::optional<std::string>& kernel_name,
                      std::optional<float> x_scale, int64_t x_zero_point) {
  VnniSpmmArgs args;
  args.w = CheckedBlockSparse(values, indices, starts, k, n, scales.size());
  CheckActivations(x, bias, k, n);
  std::optional<FixedRange> fixed;
  if (x_scale) fixed = CheckedRange("x_", *x_scale, x_zero_point);
  args.scales = scales.data();
  args.m = x.shape(0);
  const VnniSpmmKernel& kernel = FindKernel(args.m, k, kernel_name);
  args.bias = bias ? bias->data() : nullptr;
  Array<float> y({args.m, n});
  args.y = y.mutable_data();
  args.y_row_bytes = n * static_cast<int64_t>(sizeof(float));
  py::gil_scoped_release release;
  const std::vector<int32_t> sums = SumsOfOutputs(args.w);
  args.sums = sums.data();
  std::vector<char> packed(static_cast<size_t>(kernel.PackedBytes(args.m, k)));
  kernel.pack(x.data(), k * static_cast<int64_t>(sizeof(float)), args.m, k, fixed ? &*fixed : nullptr, packed.data());
  args.x = packed.data();
  kernel.multiply(args, 0, BitmapPanels(n));
  return y;
}

// The hidden layer's numbers as floats: what an identity matrix makes of them.
Array<float> VnniSpmmHidden(const CastArray<float>& x, float x_scale, int64_t x_zero_point, const Array<int8_t>& values,
                            const Array<uint16_t>& indices, const Array<int64_t>& starts, const Array<float>& scales,
                            int64_t k, int64_t n, const std::optional<CastArray<float>>& bias, float table_x_scale,
                            int64_t table_x_zero_point, float table_y_scale, int64_t table_y_zero_point,
                            const Array<uint8_t>& table, const std::optional<std::string>& kernel_name) {
  HiddenLayerArgs args;
  args.w = CheckedBlockSparse(values, indices, starts, k, n, scales.size());
  CheckActivations(x, bias, k, n);
  args.x_range = CheckedRange("x_", x_scale, x_zero_point);
  args.table_x = CheckedRange("table_x_", table_x_scale, table_x_zero_point);
  args.table_y = CheckedRange("table_y_", table_y_scale, table_y_zero_point);
  if (table.size() != 256) throw std::invalid_argument("table must have 256 elements");
  args.table = table.data();
  args.scales = scales.data();
  args.bias = bias ? bias->data() : nullptr;
  args.m = x.shape(0);
  const VnniSpmmKernel& kernel = FindKernel(args.m, std::max(k, n), kernel_name);
  Array<float> y({args.m, n});
  VnniSpmmArgs next;
  next.m = args.m;
  next.y = y.mutable_data();
  next.y_row_bytes = n * static_cast<int64_t>(sizeof(float));
  py::gil_scoped_release release;
  const std::vector<int32_t> sums = SumsOfOutputs(args.w);
  args.sums = sums.data();
  std::vector<char> packed(static_cast<size_t>(kernel.PackedBytes(args.m, k)));
  kernel.pack(x.data(), k * static_cast<int64_t>(sizeof(float)), args.m, k, &args.x_range, packed.data());
  args.x = packed.data();
  std::vector<char> packed_next(static_cast<size_t>(kernel.PackedBytes(args.m, n)));
  args.next = packed_next.data();
  // In two pieces, as threads would.
  const int64_t panels = BitmapPanels(n);
  kernel.multiply_hidden(args, panels / 2, panels);
  kernel.multiply_hidden(args, 0, panels / 2);
  std::vector<int8_t> identity(static_cast<size_t>(n * n));
  for (int64_t i = 0; i < n; ++i) identity[static_cast<size_t>(i * n + i)] = 1;
  const BlockSparseMatrix ones = PackBlockSparse(identity.data(), n, n, n);
  const std::vector<float> of_ones(static_cast<size_t>(n), 1.0f);
  next.w = {n, n, ones.values.data(), reinterpret_cast<const uint8_t*>(ones.indices.data()), ones.starts.data()};
  const std::vector<int32_t> next_sums = SumsOfOutputs(next.w);
  next.sums = next_sums.data();
  next.scales = of_ones.data();
  next.x = packed_next.data();
  kernel.multiply(next, 0, panels);
  return y;
}

}  // namespace

void BindVNNISpMM(py::module_& module) {
  module.def("pack_block_sparse", &PackBlockSparseArray, py::arg("q").noconvert(),
             "Pack int8 q [k, n] in blocks of 4 outputs x 1 input: values i8 [quads, 4, 4], indices u16 [quads, 4], "
             "starts i64.");
  module.def("unpack_block_sparse", &UnpackBlockSparseArray, py::arg("values").noconvert(),
             py::arg("indices").noconvert(), py::arg("starts").noconvert(), py::arg("k"), py::arg("n"),
             "The dense int8 [k, n] matrix. Raises ValueError if the tensors are malformed.");
  module.def(
      "vnni_spmm_kernels", [] { return KernelList(VnniSpmmKernels()); },
      "The rows of the room's kernel table, best first.");
  module.def(
      "vnni_spmm", &VnniSpmm, py::arg("x"), py::arg("values").noconvert(), py::arg("indices").noconvert(),
      py::arg("starts").noconvert(), py::arg("scales").noconvert(), py::arg("k"), py::arg("n"),
      py::arg("bias") = py::none(), py::arg("kernel") = py::none(), py::arg("x_scale") = py::none(),
      py::arg("x_zero_point") = 0,
      "y [m, n] = x [m, k] quantized row by row, or with x_scale, @ W + bias on one thread, by the named or best "
      "kernel.");
  module.def("vnni_spmm_hidden", &VnniSpmmHidden, py::arg("x"), py::arg("x_scale"), py::arg("x_zero_point"),
             py::arg("values").noconvert(), py::arg("indices").noconvert(), py::arg("starts").noconvert(),
             py::arg("scales").noconvert(), py::arg("k"), py::arg("n"), py::arg("bias"), py::arg("table_x_scale"),
             py::arg("table_x_zero_point"), py::arg("table_y_scale"), py::arg("table_y_zero_point"),
             py::arg("table").noconvert(), py::arg("kernel") = py::none(),
             "What a hidden layer passes on [m, n], as floats: table_y_scale (q - table_y_zero_point).");
}

}  // namespace ortolan
