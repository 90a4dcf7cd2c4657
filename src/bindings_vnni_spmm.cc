// ortolan._native: format and kernels of VNNISpMM.
#include <algorithm>
#include <cstring>

#include "bindings.h"
#include "formats/bitmap.h"
#include "formats/block_sparse_4x1.h"
#include "vnni_spmm/quantized_tokens.h"
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

// An array aligned as ORT aligns tensors, which kernels like.
template <typename T>
py::array NewAligned(std::vector<py::ssize_t> shape) {
  constexpr uintptr_t kAlignment = 64;
  py::ssize_t bytes = sizeof(T);
  for (const py::ssize_t size : shape) bytes *= size;
  Array<char> memory(bytes + static_cast<py::ssize_t>(kAlignment));
  char* const aligned = memory.mutable_data() + -reinterpret_cast<uintptr_t>(memory.data()) % kAlignment;
  return py::array(py::dtype::of<T>(), std::move(shape), aligned, memory);
}

py::array QuantizeTokensArray(const CastArray<float>& x, float scale, int64_t zero_point,
                              const std::optional<std::string>& kernel_name) {
  if (x.ndim() != 2) throw std::invalid_argument(ErrorText("x has ", x.ndim(), " dimensions, expected 2: [m, k]"));
  const FixedRange range = CheckedRange("", scale, zero_point);
  const int64_t m = x.shape(0);
  const int64_t k = x.shape(1);
  const QuantizedSpmmKernel& kernel =
      KernelByName(QuantizedSpmmKernels(), SelectQuantizedSpmm(ActiveFeatures()), kernel_name);
  py::array blocks = NewAligned<uint8_t>({PaddedTokens(m) * k});
  uint8_t* out = static_cast<uint8_t*>(blocks.mutable_data());
  py::gil_scoped_release release;
  kernel.quantize(x.data(), k * static_cast<int64_t>(sizeof(float)), m, k, 1.0f / range.scale, range.zero_point, out);
  return blocks;
}

// A product between quantized layers whose weight has been checked: y is float [m, n]; u8 token blocks where y_scale is
// given; or int32 token blocks of the sums.
class QuantizedSpmm {
 public:
  QuantizedSpmm(int64_t m, float x_scale, int64_t x_zero_point, const Array<int8_t>& values,
                const Array<uint16_t>& indices, const Array<int64_t>& starts, const Array<float>& scales, int64_t k,
                int64_t n, const std::optional<CastArray<float>>& bias, std::optional<float> y_scale,
                int64_t y_zero_point, const std::optional<Array<uint8_t>>& table, bool sums_only,
                const std::optional<std::string>& kernel_name)
      : arrays_{values, indices, starts, scales},
        kernel_(KernelByName(QuantizedSpmmKernels(), SelectQuantizedSpmm(ActiveFeatures()), kernel_name)) {
    args_.w = CheckedBlockSparse(values, indices, starts, k, n, scales.size());
    if (m < 0 || m > kMaxDimension) {
      throw std::invalid_argument(ErrorText("m is ", m, ", expected 0 to ", kMaxDimension));
    }
    if (bias && (bias->ndim() != 1 || bias->shape(0) != n)) {
      throw std::invalid_argument(ErrorText("bias must be [", n, "]"));
    }
    if (table && (table->size() != 256 || !y_scale)) {
      throw std::invalid_argument("table must have 256 elements, and needs y_scale");
    }
    const FixedRange x_range = CheckedRange("x_", x_scale, x_zero_point);
    const FixedRange y_range = CheckedRange("y_", y_scale.value_or(1.0f), y_zero_point);
    sums_ = SumsOfOutputs(args_.w);
    args_.sums = sums_.data();
    args_.scales = scales.data();
    args_.m = m;
    args_.x_scale = x_range.scale;
    args_.x_zero_point = x_range.zero_point;
    args_.y_scale = y_range.scale;
    args_.y_zero_point = y_range.zero_point;
    if (bias) {
      args_.bias = bias->data();
      arrays_.push_back(*bias);
    }
    if (table) {
      args_.table = table->data();
      arrays_.push_back(*table);
    }
    if (sums_only) {
      y_type_ = py::dtype::of<int32_t>();
    } else if (y_scale) {
      y_type_ = py::dtype::of<uint8_t>();
    }
  }

  py::array NewOutput() const {
    const BlockSparseView& w = args_.w;
    if (y_type_.kind() == 'f') return NewAligned<float>({args_.m, w.n});
    const int64_t elements = PaddedTokens(args_.m) * w.n;
    py::array y = y_type_.kind() == 'i' ? NewAligned<int32_t>({elements}) : NewAligned<uint8_t>({elements});
    std::memset(y.mutable_data(), 0, static_cast<size_t>(y.nbytes()));
    return y;
  }

  // The arguments with x and y, which must fit.
  QuantizedSpmmArgs With(const Array<uint8_t>& x, py::array& y) const {
    const BlockSparseView& w = args_.w;
    if (x.size() != PaddedTokens(args_.m) * w.k) {
      throw std::invalid_argument(ErrorText("x of ", x.size(), " bytes is not token blocks of ", args_.m, " x ", w.k));
    }
    const bool is_float = y_type_.kind() == 'f';
    if (!y.dtype().equal(y_type_) || y.size() != (is_float ? args_.m : PaddedTokens(args_.m)) * w.n ||
        (y.flags() & py::array::c_style) == 0) {
      throw std::invalid_argument("y must be an array as new_output makes it");
    }
    QuantizedSpmmArgs args = args_;
    args.x = x.data();
    if (is_float) {
      args.y = static_cast<float*>(y.mutable_data());
      args.y_row_bytes = w.n * static_cast<int64_t>(sizeof(float));
    } else if (y_type_.kind() == 'i') {
      args.y_sums = static_cast<int32_t*>(y.mutable_data());
    } else {
      args.y_blocks = static_cast<uint8_t*>(y.mutable_data());
    }
    return args;
  }

  // One after the other.
  static void Run(const std::vector<const QuantizedSpmm*>& products, const Array<uint8_t>& x, py::array y) {
    std::vector<QuantizedSpmmArgs> args;
    for (const QuantizedSpmm* product : products) args.push_back(product->With(x, y));
    py::gil_scoped_release release;
    for (size_t i = 0; i < args.size(); ++i) products[i]->kernel_.multiply(args[i], 0, BitmapPanels(args[i].w.n));
  }

 private:
  std::vector<py::array> arrays_;  // that args_ points into
  const QuantizedSpmmKernel& kernel_;
  QuantizedSpmmArgs args_;
  std::vector<int32_t> sums_;
  py::dtype y_type_ = py::dtype::of<float>();
};

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

  module.def(
      "vnni_spmm_quantized_kernels", [] { return KernelList(QuantizedSpmmKernels()); },
      "The rows of the room's table of kernels between quantized layers, best first.");
  module.def("quantize_tokens", &QuantizeTokensArray, py::arg("x"), py::arg("scale"), py::arg("zero_point"),
             py::arg("kernel") = py::none(), "x [m, k] rounded to u8 token blocks (ops/vnni_spmm/quantized_tokens.h).");
  py::class_<QuantizedSpmm>(module, "QuantizedSpmm",
                            "Token blocks @ W + bias: float32 [m, n]; with y_scale u8 token blocks, through a table "
                            "[256]; or the int32 sums as token blocks.")
      .def(py::init<int64_t, float, int64_t, const Array<int8_t>&, const Array<uint16_t>&, const Array<int64_t>&,
                    const Array<float>&, int64_t, int64_t, const std::optional<CastArray<float>>&, std::optional<float>,
                    int64_t, const std::optional<Array<uint8_t>>&, bool, const std::optional<std::string>&>(),
           py::arg("m"), py::arg("x_scale"), py::arg("x_zero_point"), py::arg("values").noconvert(),
           py::arg("indices").noconvert(), py::arg("starts").noconvert(), py::arg("scales").noconvert(), py::arg("k"),
           py::arg("n"), py::arg("bias") = py::none(), py::arg("y_scale") = py::none(), py::arg("y_zero_point") = 0,
           py::arg("table").noconvert() = py::none(), py::arg("sums_only") = false, py::arg("kernel") = py::none())
      .def("new_output", &QuantizedSpmm::NewOutput)
      .def_static("run", &QuantizedSpmm::Run, py::arg("products"), py::arg("x").noconvert(), py::arg("y").noconvert(),
                  "Each product of x into y, one after the other, on one thread: what a benchmark measures.");
}

}  // namespace ortolan
