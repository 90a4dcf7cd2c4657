// What ortolan._native and ortolan._testing share: arrays, and the checks that lie between them and packed formats.
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
#include "formats/key_code_cache.h"
#include "ort/error_text.h"

namespace py = pybind11;

namespace ortolan {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;
template <typename T>
using CastArray = py::array_t<T, py::array::c_style | py::array::forcecast>;

constexpr int64_t kFloat = sizeof(float);

// Throws ValueError with these parts as its text unless `holds`.
template <typename... Parts>
void Require(bool holds, const Parts&... parts) {
  if (!holds) throw std::invalid_argument(ErrorText(parts...));
}

inline void RequireNoProblem(const std::string& problem) { Require(problem.empty(), problem); }

// bf16, int8 and int4 in a bitmap differ in the types that NumPy shows, a layout and two functions.
struct Bf16Format {
  using Weights = CastArray<float>;
  using Value = uint16_t;
  static constexpr const char* kName = "w";
  static constexpr const BitmapLayout& kLayout = kBf16Bitmap;
  static constexpr auto* kPack = &PackBitmap;
  static constexpr auto kUnpack = [](const BitmapView& view, float* w, int64_t stride) {
    UnpackBitmap(view, w, stride);
  };
};

struct Int8Format {
  using Weights = Array<int8_t>;
  using Value = int8_t;
  static constexpr const char* kName = "q";
  static constexpr const BitmapLayout& kLayout = kInt8Bitmap;
  static constexpr auto* kPack = &PackBitmapInt8;
  static constexpr auto* kUnpack = &UnpackBitmapInt8;
};

struct Int4Format {
  using Weights = Array<int8_t>;
  using Value = uint8_t;
  static constexpr const char* kName = "q";
  static constexpr const BitmapLayout& kLayout = kInt4Bitmap;
  static constexpr auto* kPack = &PackBitmapInt4;
  static constexpr auto* kUnpack = &UnpackBitmapInt4;
};

// The one way from Python arrays to a view that kernels may use.
template <typename Format>
BitmapView CheckedBitmap(const Array<uint8_t>& masks, const Array<typename Format::Value>& values,
                         const Array<int64_t>& offsets, int64_t k, int64_t n) {
  const BitmapClaim claim{k, n, masks.data(), masks.size(), values.size(), offsets.data(), offsets.size()};
  RequireNoProblem(ValidateBitmap(claim, Format::kLayout));
  return claim.View(reinterpret_cast<const uint8_t*>(values.data()));
}

inline BlockSparseView CheckedBlockSparse(const Array<int8_t>& values, const Array<uint16_t>& indices,
                                          const Array<int64_t>& starts, int64_t k, int64_t n, int64_t scale_count) {
  const BlockSparseView view{k, n, values.data(), reinterpret_cast<const uint8_t*>(indices.data()), starts.data()};
  RequireNoProblem(ValidateBlockSparse({view, values.size(), indices.size(), starts.size(), scale_count}));
  return view;
}

// The layout of codebooks [S, 16, d_sub].
inline KeyCodeLayout CodebookLayout(int64_t sub_quantizers, int64_t centroids, int64_t d_sub) {
  const KeyCodeLayout layout{sub_quantizers * d_sub, d_sub};
  const std::string problem = ValidateKeyCodeLayout(layout);
  Require(centroids == kCentroids && problem.empty(), "codebook is ", sub_quantizers, " x ", centroids, " x ", d_sub,
          ", expected [head_dim / d_sub, 16, d_sub]; ", problem);
  return layout;
}

inline KeyCodeLayout CodebookLayout(const CastArray<float>& codebook) {
  Require(codebook.ndim() == 3, "codebook must be [head_dim / d_sub, 16, d_sub]");
  return CodebookLayout(codebook.shape(0), codebook.shape(1), codebook.shape(2));
}

inline void CheckCache(const py::array_t<uint8_t>& cache, int64_t row_bytes, int64_t tokens) {
  Require(cache.ndim() == 2 && cache.shape(1) == row_bytes && tokens >= 0 && tokens <= cache.shape(0),
          "cache must be uint8 [", tokens, " tokens or more, ", row_bytes, "] and tokens 0 or more");
}

// Of rows that are to be appended: how many there are.
inline int64_t CheckRows(const CastArray<float>& rows, int64_t head_dim, int64_t room) {
  Require(rows.ndim() == 2 && rows.shape(1) == head_dim && rows.shape(0) <= room, "expected rows of ", head_dim,
          " numbers, ", room, " at most: what the cache has room for");
  return rows.shape(0);
}

inline void AppendKeysTo(Array<uint8_t>& cache, int64_t tokens, const CastArray<float>& keys,
                         const CastArray<float>& codebook, EncodeKeysFn* encode) {
  const KeyCodeLayout layout = CodebookLayout(codebook);
  CheckCache(cache, layout.RowBytes(), tokens);
  const int64_t count = CheckRows(keys, layout.head_dim, cache.shape(0) - tokens);
  AppendKeys(layout, codebook.data(), keys.data(), layout.head_dim * kFloat, count, tokens, cache.mutable_data(),
             encode);
}

}  // namespace ortolan
