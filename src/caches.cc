// ortolan._native: caches of keys as codes and of values as int8.
#include "caches.h"

#include "isa/kernel_table.h"

namespace ortolan {
namespace {

const KvCacheKernel& Best() { return SelectKernel(KvCacheKernels(), ActiveFeatures()); }

void AppendKeysArray(Array<uint8_t>& cache, int64_t tokens, const CastArray<float>& keys,
                     const CastArray<float>& codebook) {
  AppendKeysTo(Best(), cache, tokens, keys, codebook);
}

Array<float> DecodeKeysArray(const Array<uint8_t>& cache, int64_t tokens, const CastArray<float>& codebook) {
  return DecodedKeys(Best(), cache, tokens, codebook, 0, tokens);
}

void AppendValuesArray(Array<uint8_t>& cache, int64_t tokens, const CastArray<float>& values) {
  AppendValuesTo(Best(), cache, tokens, values);
}

Array<float> DecodeValuesArray(const Array<uint8_t>& cache, int64_t tokens) {
  return DecodedValues(Best(), cache, tokens, 0, tokens);
}

}  // namespace

void BindCaches(py::module_& module) {
  module.def("append_keys", &AppendKeysArray, py::arg("cache").noconvert(), py::arg("tokens"), py::arg("keys"),
             py::arg("codebook"), "Append keys to a cache of codes, in place.");
  module.def("decode_keys", &DecodeKeysArray, py::arg("cache").noconvert(), py::arg("tokens"), py::arg("codebook"),
             "Return the keys decoded from a cache of codes.");
  module.def("append_values", &AppendValuesArray, py::arg("cache").noconvert(), py::arg("tokens"), py::arg("values"),
             "Append values to a cache of int8 values, in place.");
  module.def("decode_values", &DecodeValuesArray, py::arg("cache").noconvert(), py::arg("tokens"),
             "Return the values decoded from a cache of int8 values.");
}

}  // namespace ortolan
