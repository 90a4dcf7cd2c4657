// ortolan._native: formats and kernels of SparseAMXMatMul.
#include <algorithm>
#include <cstring>

#include "bindings.h"
#include "formats/bitmap.h"
#include "formats/bitmap_int4.h"
#include "formats/bitmap_int8.h"
#include "formats/scales.h"
#include "sparse_amx_matmul/sparse_amx_matmul.h"
#include "sparse_amx_matmul/sparse_amx_matmul_int8.h"

namespace ortolan {
namespace {

constexpr Storage StorageOf(bool dense) { return dense ? Storage::kDense : Storage::kBitmap; }

// [panels, tiles, bytes of a tile]; [0] if the storage is dense.
template <typename T>
Array<uint8_t> MaskArray(const std::vector<T>& masks, const BitmapLayout& layout, int64_t k, int64_t n) {
  std::vector<py::ssize_t> shape{BitmapPanels(n), layout.Tiles(k), layout.TileMaskBytes()};
  if (masks.empty()) shape = {0};
  Array<uint8_t> array(std::move(shape));
  if (!masks.empty()) std::memcpy(array.mutable_data(), masks.data(), masks.size() * sizeof(T));
  return array;
}

py::tuple PackBitmapArray(const CastArray<float>& w, bool dense) {
  if (w.ndim() != 2) throw std::invalid_argument(ErrorText("w has ", w.ndim(), " dimensions, expected 2: [k, n]"));
  const int64_t k = w.shape(0);
  const int64_t n = w.shape(1);
  if (k < 1 || n < 1 || k > kMaxDimension || n > kMaxDimension) {
    throw std::invalid_argument(ErrorText("w is ", k, " x ", n, ", expected 1 to ", kMaxDimension, " each"));
  }
  const BitmapMatrix packed = [&] {
    py::gil_scoped_release release;
    return PackBitmap(w.data(), n, k, n, StorageOf(dense));
  }();
  return py::make_tuple(MaskArray(packed.masks, kBf16Bitmap, k, n),
                        ToArray(packed.values, {static_cast<py::ssize_t>(packed.values.size())}),
                        ToArray(packed.offsets, {static_cast<py::ssize_t>(packed.offsets.size())}));
}

// The one way from Python arrays to a view that kernels may use.
BitmapView CheckedView(const Array<uint8_t>& masks, const Array<uint16_t>& values, const Array<int64_t>& offsets,
                       int64_t k, int64_t n) {
  const BitmapClaim claim{k, n, masks.data(), masks.size(), values.size(), offsets.data(), offsets.size()};
  const std::string problem = ValidateBitmap(claim);
  if (!problem.empty()) throw std::invalid_argument(problem);
  return claim.View(reinterpret_cast<const uint8_t*>(values.data()));
}

Array<float> UnpackBitmapArray(const Array<uint8_t>& masks, const Array<uint16_t>& values,
                               const Array<int64_t>& offsets, int64_t k, int64_t n) {
  const BitmapView view = CheckedView(masks, values, offsets, k, n);
  Array<float> w({k, n});
  float* out = w.mutable_data();
  py::gil_scoped_release release;
  UnpackBitmap(view, out, n);
  return w;
}

// int8 and int4 differ in a layout, the type that NumPy shows values as, and two functions.
struct Int8Format {
  using Value = int8_t;
  static constexpr const BitmapLayout& kLayout = kInt8Bitmap;
  static constexpr int kLeast = -128, kMost = 127;
  static constexpr auto* kPack = &PackBitmapInt8;
  static constexpr auto* kUnpack = &UnpackBitmapInt8;
};

struct Int4Format {
  using Value = uint8_t;
  static constexpr const BitmapLayout& kLayout = kInt4Bitmap;
  static constexpr int kLeast = -8, kMost = 7;
  static constexpr auto* kPack = &PackBitmapInt4;
  static constexpr auto* kUnpack = &UnpackBitmapInt4;
};

template <typename Format>
py::tuple PackQuantizedArray(const Array<int8_t>& q, bool dense) {
  if (q.ndim() != 2) throw std::invalid_argument(ErrorText("q has ", q.ndim(), " dimensions, expected 2: [k, n]"));
  const int64_t k = q.shape(0);
  const int64_t n = q.shape(1);
  if (k < 1 || n < 1 || k > Format::kLayout.max_k || n > kMaxDimension) {
    throw std::invalid_argument(
        ErrorText("q is ", k, " x ", n, ", expected 1 to ", Format::kLayout.max_k, " x 1 to ", kMaxDimension));
  }
  const int8_t* data = q.data();
  const auto outside = std::find_if(data, data + q.size(),
                                    [](int8_t weight) { return weight < Format::kLeast || weight > Format::kMost; });
  if (outside != data + q.size()) {
    throw std::invalid_argument(
        ErrorText("q holds ", static_cast<int>(*outside), ", expected ", Format::kLeast, " to ", Format::kMost));
  }
  const QuantizedBitmapMatrix packed = [&] {
    py::gil_scoped_release release;
    return Format::kPack(data, n, k, n, StorageOf(dense));
  }();
  Array<typename Format::Value> values(static_cast<py::ssize_t>(packed.values.size()));
  std::memcpy(values.mutable_data(), packed.values.data(), packed.values.size());
  return py::make_tuple(MaskArray(packed.masks, Format::kLayout, k, n), values,
                        ToArray(packed.offsets, {static_cast<py::ssize_t>(packed.offsets.size())}));
}

template <typename Format>
BitmapView CheckedQuantizedView(const Array<uint8_t>& masks, const Array<typename Format::Value>& values,
                                const Array<int64_t>& offsets, int64_t k, int64_t n) {
  const BitmapClaim claim{k, n, masks.data(), masks.size(), values.size(), offsets.data(), offsets.size()};
  const std::string problem = ValidateBitmap(claim, Format::kLayout);
  if (!problem.empty()) throw std::invalid_argument(problem);
  return claim.View(reinterpret_cast<const uint8_t*>(values.data()));
}

template <typename Format>
Array<int8_t> UnpackQuantizedArray(const Array<uint8_t>& masks, const Array<typename Format::Value>& values,
                                   const Array<int64_t>& offsets, int64_t k, int64_t n) {
  const BitmapView view = CheckedQuantizedView<Format>(masks, values, offsets, k, n);
  Array<int8_t> q({k, n});
  int8_t* out = q.mutable_data();
  py::gil_scoped_release release;
  Format::kUnpack(view, out, n);
  return q;
}

py::array PackScalesArray(const CastArray<float>& scales, bool bf16) {
  if (scales.ndim() != 2 || scales.shape(0) < 1 || scales.shape(1) < 1) {
    throw std::invalid_argument("scales must be [groups, n], both 1 or more");
  }
  const int64_t groups = scales.shape(0);
  const int64_t n = scales.shape(1);
  const auto pack = [&](auto packed) {
    PackScales(scales.data(), groups, n, packed.mutable_data());
    return packed;
  };
  const std::vector<py::ssize_t> shape{BitmapPanels(n), groups, kPanelColumns};
  if (bf16) return pack(Array<uint16_t>(shape));
  return pack(Array<float>(shape));
}

Array<float> SparseAmxMatMul(const CastArray<float>& x, const Array<uint8_t>& masks, const Array<uint16_t>& values,
                             const Array<int64_t>& offsets, int64_t k, int64_t n,
                             const std::optional<CastArray<float>>& bias,
                             const std::optional<std::string>& kernel_name) {
  SparseMatMulArgs args;
  args.w = CheckedView(masks, values, offsets, k, n);
  CheckActivations(x, bias, k, n);
  args.m = x.shape(0);
  const SparseMatMulKernel& kernel =
      KernelByName(SparseMatMulKernels(), SelectSparseMatMul(ActiveFeatures(), args.m), kernel_name);
  args.bias = bias ? bias->data() : nullptr;
  Array<float> y({args.m, n});
  args.y = y.mutable_data();
  args.y_row_bytes = n * static_cast<int64_t>(sizeof(float));
  py::gil_scoped_release release;
  std::vector<char> packed(static_cast<size_t>(kernel.PackedBytes(args.m, k)));
  kernel.pack(x.data(), k * static_cast<int64_t>(sizeof(float)), args.m, k, packed.data());
  args.x = packed.data();
  kernel.multiply(args, 0, BitmapPanels(n));
  return y;
}

template <typename T>
Array<float> SparseInt8MatMul(SparseInt8MatMulArgs& args, const CastArray<float>& x, const Array<T>& scales,
                              const std::optional<CastArray<float>>& bias,
                              const std::optional<std::string>& kernel_name) {
  const int64_t k = args.w.k;
  const int64_t n = args.w.n;
  CheckActivations(x, bias, k, n);
  const int64_t panels = BitmapPanels(n);
  const int64_t groups = ScaleRows(k, args.group);
  if (scales.ndim() != 3 || scales.shape(0) != panels || scales.shape(1) != groups ||
      scales.shape(2) != kPanelColumns) {
    throw std::invalid_argument(
        ErrorText("scales must be [", panels, ", ", groups, ", ", kPanelColumns, "]: pack_scales makes them"));
  }
  args.scales = scales.data();
  args.m = x.shape(0);
  const SparseInt8MatMulKernel& kernel =
      KernelByName(SparseInt8MatMulKernels(), SelectSparseInt8MatMul(ActiveFeatures(), args.m), kernel_name);
  args.bias = bias ? bias->data() : nullptr;
  Array<float> y({args.m, n});
  args.y = y.mutable_data();
  args.y_row_bytes = n * static_cast<int64_t>(sizeof(float));
  py::gil_scoped_release release;
  std::vector<char> packed(static_cast<size_t>(kernel.PackedBytes(args.m, k, args.group)));
  kernel.pack(x.data(), k * static_cast<int64_t>(sizeof(float)), args.m, k, args.group, packed.data());
  args.x = packed.data();
  (args.group == kWholeColumn ? kernel.multiply_int8 : kernel.multiply_int4)(args, 0, BitmapPanels(n));
  return y;
}

Array<float> SparseAmxMatMulInt8(const CastArray<float>& x, const Array<uint8_t>& masks, const Array<int8_t>& values,
                                 const Array<int64_t>& offsets, const Array<float>& scales, int64_t k, int64_t n,
                                 const std::optional<CastArray<float>>& bias,
                                 const std::optional<std::string>& kernel) {
  SparseInt8MatMulArgs args;
  args.w = CheckedQuantizedView<Int8Format>(masks, values, offsets, k, n);
  return SparseInt8MatMul(args, x, scales, bias, kernel);
}

Array<float> SparseAmxMatMulInt4(const CastArray<float>& x, const Array<uint8_t>& masks, const Array<uint8_t>& values,
                                 const Array<int64_t>& offsets, const Array<uint16_t>& scales, int64_t group_size,
                                 int64_t k, int64_t n, const std::optional<CastArray<float>>& bias,
                                 const std::optional<std::string>& kernel) {
  SparseInt8MatMulArgs args;
  args.w = CheckedQuantizedView<Int4Format>(masks, values, offsets, k, n);
  if (!IsInt4Group(group_size)) {
    throw std::invalid_argument(ErrorText("group_size is ", group_size, ", expected 32, 64 or 128"));
  }
  args.group = group_size;
  return SparseInt8MatMul(args, x, scales, bias, kernel);
}

}  // namespace

void BindSparseAMXMatMul(py::module_& module) {
  module.def("pack_bitmap", &PackBitmapArray, py::arg("w"), py::arg("dense") = false,
             "Round w [k, n] to bf16 and pack it: masks u8 [panels, tiles, 64], values u16 (bf16 bits), offsets i64; "
             "dense: every weight is stored, masks and offsets are [0].");
  module.def("unpack_bitmap", &UnpackBitmapArray, py::arg("masks").noconvert(), py::arg("values").noconvert(),
             py::arg("offsets").noconvert(), py::arg("k"), py::arg("n"),
             "The dense float32 [k, n] matrix. Raises ValueError if the tensors are malformed.");

  module.def("pack_bitmap_int8", &PackQuantizedArray<Int8Format>, py::arg("q"), py::arg("dense") = false,
             "Pack int8 q [k, n]: masks u8 [panels, tiles, 128], values i8, offsets i64; dense as in pack_bitmap.");
  module.def("unpack_bitmap_int8", &UnpackQuantizedArray<Int8Format>, py::arg("masks").noconvert(),
             py::arg("values").noconvert(), py::arg("offsets").noconvert(), py::arg("k"), py::arg("n"),
             "The dense int8 [k, n] matrix. Raises ValueError if the tensors are malformed.");
  module.def("pack_bitmap_int4", &PackQuantizedArray<Int4Format>, py::arg("q"), py::arg("dense") = false,
             "Pack int8 q [k, n] that holds -8 to 7: masks u8 [panels, tiles, 128], values u8 (nibbles), offsets i64; "
             "dense as in pack_bitmap.");
  module.def("unpack_bitmap_int4", &UnpackQuantizedArray<Int4Format>, py::arg("masks").noconvert(),
             py::arg("values").noconvert(), py::arg("offsets").noconvert(), py::arg("k"), py::arg("n"),
             "The dense int8 [k, n] matrix. Raises ValueError if the tensors are malformed.");

  module.def("pack_scales", &PackScalesArray, py::arg("scales"), py::arg("bf16"),
             "Scales [groups, n] as [panels, groups, 16]: float32, or bf16 bits (u16) rounded to nearest even.");

  module.def(
      "sparse_amx_matmul_kernels", [] { return KernelList(SparseMatMulKernels()); },
      "The rows of the room's kernel table, best first.");
  module.def("sparse_amx_matmul", &SparseAmxMatMul, py::arg("x"), py::arg("masks").noconvert(),
             py::arg("values").noconvert(), py::arg("offsets").noconvert(), py::arg("k"), py::arg("n"),
             py::arg("bias") = py::none(), py::arg("kernel") = py::none(),
             "y [m, n] = bf16(x) [m, k] @ W + bias on one thread, by the named kernel or the best one.");

  module.def(
      "sparse_amx_matmul_int8_kernels", [] { return KernelList(SparseInt8MatMulKernels()); },
      "The rows of the room's kernel table for int8 and int4 weights, best first.");
  module.def(
      "sparse_amx_matmul_int8", &SparseAmxMatMulInt8, py::arg("x"), py::arg("masks").noconvert(),
      py::arg("values").noconvert(), py::arg("offsets").noconvert(), py::arg("scales").noconvert(), py::arg("k"),
      py::arg("n"), py::arg("bias") = py::none(), py::arg("kernel") = py::none(),
      "y [m, n] = quantized x [m, k] @ (W scales) + bias on one thread, by the named kernel or the best one; scales "
      "float32 [panels, 1, 16].");
  module.def("sparse_amx_matmul_int4", &SparseAmxMatMulInt4, py::arg("x"), py::arg("masks").noconvert(),
             py::arg("values").noconvert(), py::arg("offsets").noconvert(), py::arg("scales").noconvert(),
             py::arg("group_size"), py::arg("k"), py::arg("n"), py::arg("bias") = py::none(),
             py::arg("kernel") = py::none(),
             "The same with int4 weights and bf16 scales (u16 bits) [panels, ceil(k / group_size), 16].");
}

}  // namespace ortolan
