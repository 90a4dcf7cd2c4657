// ortolan._native: caches of keys as codes and of values as int8.
#include "arrays.h"
#include "attention/kv_cache/kv_cache.h"
#include "formats/value_cache.h"
#include "isa/kernel_table.h"

namespace ortolan {
namespace {

void AppendKeysArray(Array<uint8_t>& cache, int64_t tokens, const CastArray<float>& keys,
                     const CastArray<float>& codebook) {
  AppendKeysTo(cache, tokens, keys, codebook, SelectKernel(KvCacheKernels(), ActiveFeatures()).encode_keys);
}

Array<float> DecodeKeysArray(const Array<uint8_t>& cache, int64_t tokens, const CastArray<float>& codebook) {
  const KeyCodeLayout layout = CodebookLayout(codebook);
  CheckCache(cache, layout.RowBytes(), tokens);
  Array<float> keys({tokens, layout.head_dim});
  DecodeKeys(layout, codebook.data(), cache.data(), tokens, 0, tokens, keys.mutable_data(), layout.head_dim * kFloat);
  return keys;
}

// Of a cache [tokens, 2 + head_dim].
int64_t ValueHeadDim(const py::array_t<uint8_t>& cache) {
  const int64_t head_dim = cache.ndim() == 2 ? cache.shape(1) - kValueScaleBytes : 0;
  const std::string problem = ValidateKeyCodeLayout({head_dim, 1});
  Require(problem.empty(), "cache must be uint8 [tokens, 2 + head_dim]; ", problem);
  return head_dim;
}

void AppendValuesArray(Array<uint8_t>& cache, int64_t tokens, const CastArray<float>& values) {
  const int64_t head_dim = ValueHeadDim(cache);
  CheckCache(cache, ValueRowBytes(head_dim), tokens);
  const int64_t count = CheckRows(values, head_dim, cache.shape(0) - tokens);
  AppendValues(head_dim, values.data(), head_dim * kFloat, count, tokens, cache.mutable_data());
}

Array<float> DecodeValuesArray(const Array<uint8_t>& cache, int64_t tokens) {
  const int64_t head_dim = ValueHeadDim(cache);
  CheckCache(cache, ValueRowBytes(head_dim), tokens);
  Array<float> values({tokens, head_dim});
  DecodeValues(head_dim, cache.data(), tokens, 0, tokens, values.mutable_data(), head_dim * kFloat);
  return values;
}

}  // namespace

void BindCaches(py::module_& module) {
  module.def("append_keys", &AppendKeysArray, py::arg("cache").noconvert(), py::arg("tokens"), py::arg("keys"),
             py::arg("codebook"), "Append keys to a cache of codes, in place.");
  module.def("decode_keys", &DecodeKeysArray, py::arg("cache").noconvert(), py::arg("tokens"), py::arg("codebook"),
             "The centroids of a cache's codes.");
  module.def("append_values", &AppendValuesArray, py::arg("cache").noconvert(), py::arg("tokens"), py::arg("values"),
             "Append values to a cache of int8 numbers, in place.");
  module.def("decode_values", &DecodeValuesArray, py::arg("cache").noconvert(), py::arg("tokens"),
             "The values of a cache.");
}

}  // namespace ortolan
