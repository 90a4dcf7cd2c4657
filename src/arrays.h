// Shared by ortolan._native and ortolan._testing: NumPy array types, and checks of packed formats.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "formats/bitmap_int4.h"
#include "formats/bitmap_int8.h"
#include "formats/block_sparse_4x1.h"
#include "formats/two_four.h"
#include "host/error_text.h"

namespace py = pybind11;

namespace ortolan {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;
template <typename T>
using CastArray = py::array_t<T, py::array::c_style | py::array::forcecast>;

constexpr int64_t kFloat = sizeof(float);

// Throws ValueError with the concatenated parts as its text unless `holds`.
template <typename... Parts>
void Require(bool holds, const Parts&... parts) {
  if (!holds) throw std::invalid_argument(ErrorText(parts...));
}

inline void RequireNoProblem(const std::string& problem) { Require(problem.empty(), problem); }

// Traits of the bf16, int8 and int4 bitmap formats: the NumPy types, the layout and the functions.
template <typename WeightArray, typename ValueType, const BitmapLayout& layout, auto pack, auto unpack,
          auto pack_two_four, auto unpack_two_four>
struct BitmapFormat {
  using Weights = WeightArray;
  using Value = ValueType;
  static constexpr const BitmapLayout& kLayout = layout;
  static constexpr auto kPack = pack;
  static constexpr auto kUnpack = unpack;
  static constexpr auto kPackTwoFour = pack_two_four;
  static constexpr auto kUnpackTwoFour = unpack_two_four;
};
using Bf16Format =
    BitmapFormat<CastArray<float>, uint16_t, kBf16Bitmap, &PackBitmap,
                 [](const BitmapView& view, float* w, int64_t row_stride) { UnpackBitmap(view, w, row_stride); },
                 &PackTwoFour, &UnpackTwoFour>;
using Int8Format = BitmapFormat<Array<int8_t>, int8_t, kInt8Bitmap, &PackBitmapInt8, &UnpackBitmapInt8,
                                &PackTwoFourInt8, &UnpackTwoFourInt8>;
using Int4Format = BitmapFormat<Array<int8_t>, uint8_t, kInt4Bitmap, &PackBitmapInt4, &UnpackBitmapInt4,
                                &PackTwoFourInt4, &UnpackTwoFourInt4>;

// Validates Python arrays and returns a view for kernels.
template <typename Format>
BitmapView CheckedBitmap(const Array<uint8_t>& masks, const Array<typename Format::Value>& values,
                         const Array<int64_t>& offsets, int64_t k, int64_t n) {
  const BitmapClaim claim{k, n, masks.data(), masks.size(), values.size(), offsets.data(), offsets.size()};
  RequireNoProblem(ValidateStored(claim, Format::kLayout));
  return claim.View(reinterpret_cast<const uint8_t*>(values.data()));
}

inline BlockSparseView CheckedBlockSparse(const Array<int8_t>& values, const Array<uint16_t>& indices,
                                          const Array<int64_t>& starts, int64_t k, int64_t n, int64_t scale_count) {
  const BlockSparseView view{k, n, values.data(), reinterpret_cast<const uint8_t*>(indices.data()), starts.data()};
  RequireNoProblem(ValidateBlockSparse({view, values.size(), indices.size(), starts.size(), scale_count}));
  return view;
}

}  // namespace ortolan
