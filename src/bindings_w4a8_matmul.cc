// ortolan._native: format and kernels of W4A8MatMul.
#include <algorithm>

#include "bindings.h"
#include "formats/int4_group.h"
#include "w4a8_matmul/w4a8_matmul.h"

namespace ortolan {
namespace {

Array<uint8_t> PackInt4GroupArray(const Array<uint8_t>& q) {
  if (q.ndim() != 2) throw std::invalid_argument(ErrorText("q has ", q.ndim(), " dimensions, expected 2: [k, n]"));
  const int64_t k = q.shape(0);
  const int64_t n = q.shape(1);
  if (k < 1 || n < 1 || k > kInt4Bitmap.max_k || n > kMaxDimension) {
    throw std::invalid_argument(
        ErrorText("q is ", k, " x ", n, ", expected 1 to ", kInt4Bitmap.max_k, " x 1 to ", kMaxDimension));
  }
  const uint8_t* end = q.data() + q.size();
  const uint8_t* outside = std::find_if(q.data(), end, [](uint8_t weight) { return weight > kLargestInt4; });
  if (outside != end) {
    throw std::invalid_argument(ErrorText("q holds ", static_cast<int>(*outside), ", expected 0 to ", kLargestInt4));
  }
  const std::vector<uint8_t> packed = [&] {
    py::gil_scoped_release release;
    return PackInt4Group(q.data(), n, k, n);
  }();
  return ToArray(packed, {BitmapPanels(n), kInt4Bitmap.Tiles(k) * kTileRows / 2, 64});
}

Array<uint8_t> UnpackInt4GroupArray(const Array<uint8_t>& weights, int64_t k, int64_t n) {
  if (k < 1 || n < 1 || k > kInt4Bitmap.max_k || n > kMaxDimension || weights.size() != Int4GroupWeightBytes(k, n)) {
    throw std::invalid_argument(ErrorText("weights of ", weights.size(), " bytes are not those of ", k, " x ", n));
  }
  Array<uint8_t> q({k, n});
  uint8_t* out = q.mutable_data();
  py::gil_scoped_release release;
  UnpackInt4Group(weights.data(), k, n, out, n);
  return q;
}

template <typename T>
Array<T> PackGroupRowsArray(const Array<T>& rows) {
  if (rows.ndim() != 2 || rows.shape(0) < 1 || rows.shape(1) < 1) {
    throw std::invalid_argument("rows must be [groups, n], both 1 or more");
  }
  Array<T> packed({BitmapPanels(rows.shape(1)), static_cast<int64_t>(rows.shape(0)), kPanelColumns});
  PackGroupRows(rows.data(), rows.shape(0), rows.shape(1), packed.mutable_data());
  return packed;
}

// scales: float32, or the bits of float16.
template <typename ScaleBits>
Array<float> W4A8MatMul(const CastArray<float>& x, const Array<uint8_t>& weights, const Array<ScaleBits>& scales,
                        int64_t group_size, int64_t k, int64_t n, const std::optional<Array<uint8_t>>& zero_points,
                        const std::optional<CastArray<float>>& bias, const std::optional<std::string>& kernel_name) {
  W4A8MatMulArgs args;
  const std::string problem =
      ValidateInt4Group({k, n, group_size, weights.size(), scales.size(), zero_points ? zero_points->data() : nullptr,
                         zero_points ? zero_points->size() : 0});
  if (!problem.empty()) throw std::invalid_argument(problem);
  CheckActivations(x, bias, k, n);
  args.w = {k,
            n,
            group_size,
            weights.data(),
            reinterpret_cast<const uint8_t*>(scales.data()),
            sizeof(ScaleBits) == 4 ? ScaleType::kFloat32 : ScaleType::kFloat16,
            zero_points && zero_points->size() > 0 ? zero_points->data() : nullptr};
  args.m = x.shape(0);
  const W4A8MatMulKernel& kernel =
      KernelByName(W4A8MatMulKernels(), SelectW4A8MatMul(ActiveFeatures(), args.m), kernel_name);
  args.bias = bias ? bias->data() : nullptr;
  Array<float> y({args.m, n});
  args.y = y.mutable_data();
  args.y_row_bytes = n * static_cast<int64_t>(sizeof(float));
  py::gil_scoped_release release;
  std::vector<char> packed(static_cast<size_t>(kernel.PackedBytes(args.m, k, group_size)));
  kernel.pack(x.data(), k * static_cast<int64_t>(sizeof(float)), args.m, k, group_size, packed.data());
  args.x = packed.data();
  kernel.multiply(args, 0, BitmapPanels(n));
  return y;
}

}  // namespace

void BindW4A8MatMul(py::module_& module) {
  module.def("pack_int4_group", &PackInt4GroupArray, py::arg("q").noconvert(),
             "Pack uint8 q [k, n] that holds 0 to 15: weights u8 [panels, pairs of rows, 64].");
  module.def("unpack_int4_group", &UnpackInt4GroupArray, py::arg("weights").noconvert(), py::arg("k"), py::arg("n"),
             "The uint8 [k, n] matrix of pack_int4_group.");
  module.def("pack_group_rows", &PackGroupRowsArray<float>, py::arg("rows").noconvert(),
             "Rows [groups, n] as [panels, groups, 16]: float32, u16 (bits of a 16-bit float) or u8.");
  module.def("pack_group_rows", &PackGroupRowsArray<uint16_t>, py::arg("rows").noconvert());
  module.def("pack_group_rows", &PackGroupRowsArray<uint8_t>, py::arg("rows").noconvert());
  module.def(
      "w4a8_matmul_kernels", [] { return KernelList(W4A8MatMulKernels()); },
      "The rows of the room's kernel table, best first.");
  const auto define_w4a8 = [&](auto* function) {
    module.def("w4a8_matmul", function, py::arg("x"), py::arg("weights").noconvert(), py::arg("scales").noconvert(),
               py::arg("group_size"), py::arg("k"), py::arg("n"), py::arg("zero_points").noconvert() = py::none(),
               py::arg("bias") = py::none(), py::arg("kernel") = py::none(),
               "y [m, n] = x [m, k] quantized group by group @ W + bias on one thread, by the named or best kernel.");
  };
  define_w4a8(&W4A8MatMul<float>);
  define_w4a8(&W4A8MatMul<uint16_t>);
}

}  // namespace ortolan
