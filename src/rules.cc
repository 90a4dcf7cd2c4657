// ortolan._native: rules that the passes and the execution provider share, so that an optimized model and the original
// model on the provider give the same answers.
#include <pybind11/stl.h>

#include "arrays.h"
#include "formats/bitmap_int4.h"
#include "formats/bitmap_int8.h"
#include "matmul/block_int8_weight.h"
#include "matmul/int8_weight.h"
#include "matmul/storage.h"

namespace ortolan {
namespace {

template <typename Code>
std::pair<int, int> Int8Range(const Array<Code>& codes, const Array<int16_t>& zero_points, bool transposed) {
  Require(codes.ndim() == 2, "codes have ", codes.ndim(), " dimensions, expected 2");
  Int8Weight w;
  w.k = codes.shape(transposed ? 1 : 0);
  w.n = codes.shape(transposed ? 0 : 1);
  Require(zero_points.size() == w.n, "zero_points has ", zero_points.size(), " elements, expected ", w.n);
  w.codes = reinterpret_cast<const uint8_t*>(codes.data());
  w.is_signed = std::is_signed_v<Code>;
  w.transposed = transposed;
  w.zero_points.assign(zero_points.data(), zero_points.data() + w.n);
  py::gil_scoped_release release;
  const ValueRange range = RangeOf(w);
  return {range.least, range.most};
}

const BitmapLayout& LayoutOf(int64_t bits) {
  Require(bits == 16 || bits == 8 || bits == 4, "bits is ", bits, ", expected 16, 8 or 4");
  return bits == 16 ? kBf16Bitmap : bits == 8 ? kInt8Bitmap : kInt4Bitmap;
}

}  // namespace

void BindRules(py::module_& module) {
  module.attr("LEAST_ZERO_BLOCKS") = kLeastZeroBlocks;
  module.def(
      "int8_range", &Int8Range<int8_t>, py::arg("codes").noconvert(), py::arg("zero_points"), py::arg("transposed"),
      "Return the minimum and maximum of codes - zero_points. codes: int8 or uint8 [k, n], or [n, k] if transposed.");
  module.def("int8_range", &Int8Range<uint8_t>, py::arg("codes").noconvert(), py::arg("zero_points"),
             py::arg("transposed"));
  module.def(
      "why_not_int8",
      [](int64_t k, int64_t n, std::pair<int, int> range) { return WhyNotValues(k, n, {range.first, range.second}); },
      py::arg("k"), py::arg("n"), py::arg("range"),
      "Return why int8 weights minus zero points with this range cannot be kept exactly, or an empty string: "
      "ops/matmul/int8_weight.h.");
  module.def(
      "why_not_scales",
      [](const CastArray<float>& scales) { return WhyNotScales({scales.data(), static_cast<size_t>(scales.size())}); },
      py::arg("scales"), "Return why these scales of int8 weights cannot be kept exactly, or an empty string.");
  module.def(
      "bitmaps_are_fast", [](int64_t bits) { return BitmapsAreFast(LayoutOf(bits)); }, py::arg("bits"),
      "Return whether this CPU multiplies faster by a bitmap of 16-, 8- or 4-bit weights than by dense ones.");
  module.def("gains_from_pairs", &GainsFromPairs,
             "Return whether the kernels of this CPU are faster with int8 weights of a reduced range.");
  module.def(
      "is_worth_bitmap",
      [](int64_t bits, int64_t k, int64_t n, int64_t stored) { return IsWorthBitmap(LayoutOf(bits), k, n, stored); },
      py::arg("bits"), py::arg("k"), py::arg("n"), py::arg("stored"),
      "Return whether a bitmap is the better storage for this number of stored weights, if bitmaps are fast on this "
      "CPU: ops/matmul/storage.h.");
}

}  // namespace ortolan
