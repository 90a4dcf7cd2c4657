// ortolan._native: packers, kernels for tests and benchmarks, CPU information. Arrays only; Python puts bf16 on top.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "epilogue/epilogue.h"
#include "formats/bitmap.h"
#include "formats/bitmap_int4.h"
#include "formats/bitmap_int8.h"
#include "formats/int4_group.h"
#include "formats/scales.h"
#include "isa/isa.h"
#include "nomad_attention/nomad_attention.h"
#include "sparse_amx_matmul/sparse_amx_matmul.h"
#include "sparse_amx_matmul/sparse_amx_matmul_int8.h"
#include "stream_read.h"
#include "support/error_text.h"
#include "w4a8_matmul/w4a8_matmul.h"

namespace py = pybind11;

namespace ortolan {
namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;
template <typename T>
using CastArray = py::array_t<T, py::array::c_style | py::array::forcecast>;
template <typename T>
using StridedArray = py::array_t<T, py::array::forcecast>;

template <typename T>
Array<T> ToArray(const std::vector<T>& values, std::vector<py::ssize_t> shape) {
  Array<T> array(std::move(shape));
  std::copy(values.begin(), values.end(), array.mutable_data());
  return array;
}

py::dict CpuInfo() {
  py::dict info;
  info["name"] = CpuName();
  info["isa"] = IsaName(ActiveIsa());
  info["detected_isa"] = IsaName(DetectedIsa());
  info["isa_problem"] = IsaProblem();
  return info;
}

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

template <typename Kernel>
const Kernel& KernelByName(std::span<const Kernel> kernels, const Kernel& best,
                           const std::optional<std::string>& name) {
  if (!name) return best;
  std::string known;
  for (const Kernel& kernel : kernels) {
    known += (known.empty() ? "" : ", ") + std::string(kernel.name);
    if (*name != kernel.name) continue;
    if (kernel.isa > DetectedIsa()) {
      throw std::invalid_argument(
          ErrorText("kernel ", *name, " needs ", IsaName(kernel.isa), ", this CPU has ", IsaName(DetectedIsa())));
    }
    return kernel;
  }
  throw std::invalid_argument(ErrorText("no kernel is called '", *name, "', expected one of: ", known));
}

template <typename Kernel>
py::list KernelList(std::span<const Kernel> kernels) {
  py::list rows;
  for (const Kernel& kernel : kernels) {
    py::dict row;
    row["name"] = kernel.name;
    row["isa"] = IsaName(kernel.isa);
    row["runs_here"] = kernel.isa <= DetectedIsa();
    rows.append(row);
  }
  return rows;
}

void CheckActivations(const CastArray<float>& x, const std::optional<CastArray<float>>& bias, int64_t k, int64_t n) {
  if (x.ndim() != 2 || x.shape(1) != k) {
    throw std::invalid_argument(ErrorText("x must be [m, ", k, "]"));
  }
  if (bias && (bias->ndim() != 1 || bias->shape(0) != n)) {
    throw std::invalid_argument(ErrorText("bias must be [", n, "]"));
  }
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
      KernelByName(SparseMatMulKernels(), SelectSparseMatMul(ActiveIsa(), args.m), kernel_name);
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
      KernelByName(SparseInt8MatMulKernels(), SelectSparseInt8MatMul(ActiveIsa(), args.m), kernel_name);
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

// y and residual may have gaps between their rows: the kernel sees the row strides of both.
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
  const EpilogueKernel& kernel = KernelByName(EpilogueKernels(), SelectEpilogue(ActiveIsa()), kernel_name);
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
      KernelByName(W4A8MatMulKernels(), SelectW4A8MatMul(ActiveIsa(), args.m), kernel_name);
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

Array<float> NomadAttention(const CastArray<float>& q, const CastArray<float>& k, const CastArray<float>& v,
                            float scale, const std::optional<CastArray<float>>& mask, bool causal,
                            bool zero_hidden_rows, int precision, const std::optional<std::string>& kernel_name) {
  if (q.ndim() != 3 || k.ndim() != 2 || q.shape(2) < 1 || k.shape(1) != q.shape(2) || k.shape(0) < 1 || v.ndim() != 2 ||
      v.shape(0) != k.shape(0) || v.shape(1) != k.shape(1)) {
    throw std::invalid_argument(
        "expected q [heads, queries, head_dim], k and v [keys, head_dim], keys and head_dim 1 or "
        "more");
  }
  AttentionArgs args;
  args.heads = q.shape(0);
  args.queries = q.shape(1);
  args.keys = k.shape(0);
  args.head_dim = q.shape(2);
  if (causal && args.keys < args.queries) throw std::invalid_argument("causal needs as many keys as queries, or more");
  constexpr int64_t kFloat = sizeof(float);
  args.q = q.data();
  args.k = k.data();
  args.v = v.data();
  args.q_row_bytes = args.k_row_bytes = args.v_row_bytes = args.y_row_bytes = args.head_dim * kFloat;
  args.q_head_bytes = args.y_head_bytes = args.queries * args.head_dim * kFloat;
  if (mask) {
    const int64_t full[] = {args.heads, args.queries, args.keys};
    int64_t* const strides[] = {&args.mask_head_stride, &args.mask_query_stride, &args.mask_key_stride};
    if (mask->ndim() != 3) throw std::invalid_argument("mask must be [heads, queries, keys], each of them or 1");
    for (int i = 0; i < 3; ++i) {
      if (mask->shape(i) != full[i] && mask->shape(i) != 1) {
        throw std::invalid_argument("mask must be [heads, queries, keys], each of them or 1");
      }
      *strides[i] = mask->shape(i) == 1 ? 0 : mask->strides(i) / kFloat;
    }
    args.mask = mask->data();
  }
  args.scale = scale;
  args.causal = causal;
  args.zero_hidden_rows = zero_hidden_rows;
  const AttentionKernel& kernel =
      KernelByName(AttentionKernels(), SelectAttention(ActiveIsa(), precision), kernel_name);
  Array<float> y({args.heads, args.queries, args.head_dim});
  args.y = y.mutable_data();
  py::gil_scoped_release release;
  std::vector<char> scratch(static_cast<size_t>(kernel.scratch_bytes(args.keys, args.head_dim)) + 64);
  char* aligned = scratch.data() + (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64);
  const int64_t rows = args.heads * args.queries;
  for (int64_t row = 0; row < rows; row += kAttentionRows) {
    kernel.run(args, row, std::min(rows, row + kAttentionRows), aligned);
  }
  return y;
}

// Reads the buffer once, an equal part a thread.
uint64_t StreamReadArray(const Array<uint8_t>& buffer, int threads, size_t prefetch_bytes) {
  constexpr int kMostThreads = 256;
  if (threads < 1 || threads > kMostThreads) {
    throw std::invalid_argument(ErrorText("threads is ", threads, ", expected 1 to ", kMostThreads));
  }
  const uint8_t* data = buffer.data();
  const size_t part = static_cast<size_t>(buffer.size()) / static_cast<size_t>(threads) / 128 * 128;
  py::gil_scoped_release release;
  std::vector<uint64_t> sums(static_cast<size_t>(threads));
  std::vector<std::thread> others;
  for (size_t t = 1; t < sums.size(); ++t) {
    others.emplace_back([&, t] { sums[t] = StreamRead(data + t * part, part, prefetch_bytes); });
  }
  sums[0] = StreamRead(data, part, prefetch_bytes);
  for (std::thread& other : others) other.join();
  uint64_t total = 0;
  for (const uint64_t sum : sums) total += sum;
  return total;
}

}  // namespace
}  // namespace ortolan

PYBIND11_MODULE(_native, module) {
  using namespace ortolan;
  module.doc() = "Native core of Ortolan: packers, kernels for tests and benchmarks, CPU information.";
  module.def("cpu_info", &CpuInfo,
             "The CPU's name, the ISA tier in use, the one detected, and what is wrong with ORTOLAN_ISA.");

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

  module.def(
      "epilogue_kernels", [] { return KernelList(EpilogueKernels()); },
      "The rows of the epilogue's kernel table, best first.");
  module.def("epilogue", &Epilogue, py::arg("y"), py::arg("activation"), py::arg("residual") = py::none(),
             py::arg("factor") = py::none(), py::arg("kernel") = py::none(),
             "activation(y) factor + residual [m, n] as a new array, by the named kernel or the best one.");

  module.def(
      "nomad_attention_kernels", [] { return KernelList(AttentionKernels()); },
      "The rows of the room's kernel table, best first.");
  module.def("nomad_attention", &NomadAttention, py::arg("q"), py::arg("k"), py::arg("v"), py::arg("scale"),
             py::arg("mask") = py::none(), py::arg("causal") = false, py::arg("zero_hidden_rows") = false,
             py::arg("precision") = 32, py::arg("kernel") = py::none(),
             "softmax(scale q k^T + mask) v of heads that share k and v, on one thread, by the named or best kernel.");

  module.def("stream_read", &StreamReadArray, py::arg("buffer").noconvert(), py::arg("threads") = 1,
             py::arg("prefetch_bytes") = 4096, "Read a uint8 buffer once and return a checksum: the memory's rate.");
}
