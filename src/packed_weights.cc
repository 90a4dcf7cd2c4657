// ortolan._native: packs and unpacks weights.
#include <cstring>

#include "arrays.h"
#include "formats/int4_group.h"
#include "formats/int8_group.h"
#include "formats/scales.h"

namespace ortolan {
namespace {

template <typename T>
Array<T> ToArray(const std::vector<T>& values, std::vector<py::ssize_t> shape) {
  Array<T> array(std::move(shape));
  std::copy(values.begin(), values.end(), array.mutable_data());
  return array;
}

template <typename T>
Array<T> ToArray(const std::vector<T>& values) {
  return ToArray(values, {static_cast<py::ssize_t>(values.size())});
}

template <typename Function>
auto WithoutGil(const Function& function) {
  py::gil_scoped_release release;
  return function();
}

// Throws unless the array is a matrix of 1 to most_k rows and 1 to most_n columns.
void CheckMatrix(const char* name, const py::array& matrix, int64_t most_k, int64_t most_n = kMaxDimension) {
  Require(matrix.ndim() == 2, name, " has ", matrix.ndim(), " dimensions, expected 2: [k, n]");
  const int64_t k = matrix.shape(0);
  const int64_t n = matrix.shape(1);
  Require(k >= 1 && n >= 1 && k <= most_k && n <= most_n, name, " is ", k, " x ", n, ", expected 1 to ", most_k,
          " x 1 to ", most_n);
}

template <typename T>
void CheckValues(const Array<T>& q, int least, int most) {
  const T* const end = q.data() + q.size();
  const T* const outside = std::find_if(q.data(), end, [=](T weight) { return weight < least || weight > most; });
  if (outside != end) Require(false, "q holds ", static_cast<int>(*outside), ", expected ", least, " to ", most);
}

// The name of the argument in Python: w for floats, q for integers.
template <typename Format>
constexpr const char* kNameOf = Format::kLayout.value_bits == 16 ? "w" : "q";

template <typename Format>
void CheckWeights(const typename Format::Weights& w) {
  CheckMatrix(kNameOf<Format>, w, Format::kLayout.max_k);
  if constexpr (Format::kLayout.value_bits == 4) CheckValues(w, -kInt4Bias, 15 - kInt4Bias);
}

// Returns (masks, values, offsets); masks are [panels, tiles, bytes of a tile], or [0].
template <typename Format, typename Packed>
py::tuple ToTuple(const Packed& packed, int64_t k, int64_t n) {
  std::vector<py::ssize_t> shape{BitmapPanels(n), Format::kLayout.Tiles(k), Format::kLayout.TileMaskBytes()};
  if (packed.masks.empty()) shape = {0};
  Array<uint8_t> masks(std::move(shape));
  if (!packed.masks.empty()) {
    std::memcpy(masks.mutable_data(), packed.masks.data(), static_cast<size_t>(masks.nbytes()));
  }
  Array<typename Format::Value> values(static_cast<py::ssize_t>(packed.values.size()));
  std::memcpy(values.mutable_data(), packed.values.data(), static_cast<size_t>(values.nbytes()));
  return py::make_tuple(masks, values, ToArray(packed.offsets));
}

template <typename Format>
py::tuple PackBitmapArray(const typename Format::Weights& w, bool dense) {
  CheckWeights<Format>(w);
  const int64_t k = w.shape(0);
  const int64_t n = w.shape(1);
  const Storage storage = dense ? Storage::kDense : Storage::kBitmap;
  return ToTuple<Format>(WithoutGil([&] { return Format::kPack(w.data(), n, k, n, storage); }), k, n);
}

template <typename Format>
py::tuple PackTwoFourArray(const typename Format::Weights& w) {
  CheckWeights<Format>(w);
  const int64_t k = w.shape(0);
  const int64_t n = w.shape(1);
  RequireNoProblem(WithoutGil([&] { return CheckTwoFour(w.data(), n, k, n); }));
  return ToTuple<Format>(WithoutGil([&] { return Format::kPackTwoFour(w.data(), n, k, n); }), k, n);
}

template <typename Format>
auto UnpackBitmapArray(const Array<uint8_t>& masks, const Array<typename Format::Value>& values,
                       const Array<int64_t>& offsets, int64_t k, int64_t n) {
  const BitmapView view = CheckedBitmap<Format>(masks, values, offsets, k, n);
  typename Format::Weights w({k, n});
  auto* out = w.mutable_data();
  py::gil_scoped_release release;
  if (view.StoredAs() == Storage::kTwoFour) {
    Format::kUnpackTwoFour(view, out, n);
  } else {
    Format::kUnpack(view, out, n);
  }
  return w;
}

template <typename Format>
void DefineBitmap(py::module_& module, const std::string& suffix) {
  module.def(("pack_bitmap" + suffix).c_str(), &PackBitmapArray<Format>, py::arg(kNameOf<Format>),
             py::arg("dense") = false, "Pack [k, n] into masks u8 [panels, tiles, bytes], values, offsets i64.");
  module.def(("pack_two_four" + suffix).c_str(), &PackTwoFourArray<Format>, py::arg(kNameOf<Format>),
             "Pack a 2:4 sparse [k, n] into masks u8 [panels, tiles, bytes], values, offsets i64 [0].");
  module.def(("unpack_bitmap" + suffix).c_str(), &UnpackBitmapArray<Format>, py::arg("masks").noconvert(),
             py::arg("values").noconvert(), py::arg("offsets").noconvert(), py::arg("k"), py::arg("n"),
             "Return the dense [k, n] matrix. Raises ValueError if the tensors are malformed.");
}

template <typename To>
py::array PackScalesTo(const CastArray<float>& scales) {
  Array<To> packed({BitmapPanels(scales.shape(1)), static_cast<int64_t>(scales.shape(0)), kPanelColumns});
  PackScales(scales.data(), scales.shape(0), scales.shape(1), packed.mutable_data());
  return packed;
}

py::array PackScalesArray(const CastArray<float>& scales, bool bf16) {
  Require(scales.ndim() == 2 && scales.size() > 0, "scales must be [groups, n], both at least 1");
  return bf16 ? PackScalesTo<uint16_t>(scales) : PackScalesTo<float>(scales);
}

Array<uint8_t> PackInt4GroupArray(const Array<uint8_t>& q) {
  CheckMatrix("q", q, kInt4Bitmap.max_k);
  CheckValues(q, 0, kLargestInt4);
  const int64_t k = q.shape(0);
  const int64_t n = q.shape(1);
  const std::vector<uint8_t> packed = WithoutGil([&] { return PackInt4Group(q.data(), n, k, n); });
  return ToArray(packed, {BitmapPanels(n), kInt4Bitmap.Tiles(k) * kTileRows / 2, 64});
}

Array<int8_t> PackInt8GroupArray(const Array<int8_t>& q) {
  CheckMatrix("q", q, kInt8Bitmap.max_k);
  const int64_t k = q.shape(0);
  const int64_t n = q.shape(1);
  const QuantizedBitmapMatrix packed = WithoutGil([&] { return PackBitmapInt8(q.data(), n, k, n, Storage::kDense); });
  Array<int8_t> weights({BitmapPanels(n), kInt8Bitmap.Tiles(k) * kTileRows, kPanelColumns, kInt8Bitmap.row_inputs});
  std::memcpy(weights.mutable_data(), packed.values.data(), static_cast<size_t>(weights.nbytes()));
  return weights;
}

// Throws unless k x n weights take this number of bytes.
void CheckGroupWeights(const BitmapLayout& layout, int64_t bytes, int64_t k, int64_t n) {
  Require(k >= 1 && n >= 1 && k <= layout.max_k && n <= kMaxDimension && bytes == GroupWeightBytes(layout, k, n),
          "weights have ", bytes, " bytes, which does not match ", k, " x ", n, " weights");
}

Array<uint8_t> UnpackInt4GroupArray(const Array<uint8_t>& weights, int64_t k, int64_t n) {
  CheckGroupWeights(kInt4Bitmap, weights.size(), k, n);
  Array<uint8_t> q({k, n});
  uint8_t* out = q.mutable_data();
  py::gil_scoped_release release;
  UnpackInt4Group(weights.data(), k, n, out, n);
  return q;
}

Array<int8_t> UnpackInt8GroupArray(const Array<int8_t>& weights, int64_t k, int64_t n) {
  CheckGroupWeights(kInt8Bitmap, weights.size(), k, n);
  Array<int8_t> q({k, n});
  int8_t* out = q.mutable_data();
  py::gil_scoped_release release;
  UnpackInt8Group(reinterpret_cast<const uint8_t*>(weights.data()), k, n, out, n);
  return q;
}

Array<uint8_t> PackHighBitsArray(const Array<uint8_t>& q, int64_t bits) {
  CheckMatrix("q", q, kInt4Bitmap.max_k);
  Require(bits == 5 || bits == 6, "bits is ", bits, ", expected 5 or 6");
  CheckValues(q, 0, (1 << bits) - 1);
  const int64_t k = q.shape(0);
  const int64_t n = q.shape(1);
  const std::vector<uint8_t> packed = WithoutGil([&] { return PackHighBits(q.data(), n, k, n, bits); });
  return ToArray(packed, {BitmapPanels(n), kInt4Bitmap.Tiles(k), 128 * (bits - 4)});
}

template <typename T>
Array<T> PackGroupRowsArray(const Array<T>& rows) {
  Require(rows.ndim() == 2 && rows.size() > 0, "rows must be [groups, n], both at least 1");
  Array<T> packed({BitmapPanels(rows.shape(1)), static_cast<int64_t>(rows.shape(0)), kPanelColumns});
  PackGroupRows(rows.data(), rows.shape(0), rows.shape(1), packed.mutable_data());
  return packed;
}

py::tuple PackBlockSparseArray(const Array<int8_t>& q) {
  CheckMatrix("q", q, kMostSparseInputs, kMostSparseOutputs);
  const BlockSparseMatrix packed =
      WithoutGil([&] { return PackBlockSparse(q.data(), q.shape(1), q.shape(0), q.shape(1)); });
  const int64_t quads = packed.starts.back();
  return py::make_tuple(ToArray(packed.values, {quads, kGroupOutputs, kQuadInputs}),
                        ToArray(packed.indices, {quads, kQuadInputs}), ToArray(packed.starts));
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

}  // namespace

void BindPackedWeights(py::module_& module) {
  DefineBitmap<Bf16Format>(module, "");
  DefineBitmap<Int8Format>(module, "_int8");
  DefineBitmap<Int4Format>(module, "_int4");
  module.def("pack_scales", &PackScalesArray, py::arg("scales"), py::arg("bf16"),
             "Pack scales [groups, n] into [panels, groups, 16]: float32, or bf16 bits (u16) rounded to nearest even.");
  module.def("pack_int4_group", &PackInt4GroupArray, py::arg("q").noconvert(),
             "Pack uint8 q [k, n], each 0 to 15, into weights u8 [panels, pairs of rows, 64].");
  module.def("unpack_int4_group", &UnpackInt4GroupArray, py::arg("weights").noconvert(), py::arg("k"), py::arg("n"),
             "Return the uint8 [k, n] matrix of pack_int4_group.");
  module.def(
      "pack_high_bits", &PackHighBitsArray, py::arg("q").noconvert(), py::arg("bits"),
      "Pack the bits above the low 4 of uint8 q [k, n], 5 or 6 bits each, into u8 [panels, tiles, 128 (bits - 4)].");
  module.def("pack_int8_group", &PackInt8GroupArray, py::arg("q").noconvert(),
             "Pack int8 q [k, n] into weights i8 [panels, rows, 16, 4].");
  module.def("unpack_int8_group", &UnpackInt8GroupArray, py::arg("weights").noconvert(), py::arg("k"), py::arg("n"),
             "Return the int8 [k, n] matrix of pack_int8_group.");
  module.def("pack_group_rows", &PackGroupRowsArray<float>, py::arg("rows").noconvert(),
             "Pack rows [groups, n] into [panels, groups, 16]: float32, u16 (bits of a 16-bit float) or u8.");
  module.def("pack_group_rows", &PackGroupRowsArray<uint16_t>, py::arg("rows").noconvert());
  module.def("pack_group_rows", &PackGroupRowsArray<uint8_t>, py::arg("rows").noconvert());
  module.def(
      "pack_block_sparse", &PackBlockSparseArray, py::arg("q").noconvert(),
      "Pack int8 q [k, n] in blocks of 4 outputs x 1 input into values i8 [quads, 4, 4], indices u16 [quads, 4], "
      "starts i64.");
  module.def("unpack_block_sparse", &UnpackBlockSparseArray, py::arg("values").noconvert(),
             py::arg("indices").noconvert(), py::arg("starts").noconvert(), py::arg("k"), py::arg("n"),
             "Return the dense int8 [k, n] matrix. Raises ValueError if the tensors are malformed.");
}

}  // namespace ortolan
