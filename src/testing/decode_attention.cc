// ortolan._testing: the decode kernels of NoMADAttention and the kernels of its caches.
#include <limits>
#include <tuple>

#include "attention/decode.h"
#include "caches.h"
#include "testing.h"

namespace ortolan {
namespace {

void AppendKeysArray(Array<uint8_t>& cache, int64_t tokens, const CastArray<float>& keys,
                     const CastArray<float>& codebook, const KernelName& name) {
  AppendKeysTo(KernelByName(KvCacheKernels(), name), cache, tokens, keys, codebook);
}

Array<float> DecodeKeysArray(const Array<uint8_t>& cache, int64_t tokens, const CastArray<float>& codebook,
                             int64_t begin, std::optional<int64_t> end, const KernelName& name) {
  return DecodedKeys(KernelByName(KvCacheKernels(), name), cache, tokens, codebook, begin, end.value_or(tokens));
}

void AppendValuesArray(Array<uint8_t>& cache, int64_t tokens, const CastArray<float>& values, const KernelName& name) {
  AppendValuesTo(KernelByName(KvCacheKernels(), name), cache, tokens, values);
}

Array<float> DecodeValuesArray(const Array<uint8_t>& cache, int64_t tokens, int64_t begin, std::optional<int64_t> end,
                               const KernelName& name) {
  return DecodedValues(KernelByName(KvCacheKernels(), name), cache, tokens, begin, end.value_or(tokens));
}

Array<float> Rotate(const Array<float>& x, const Array<float>& cos, const Array<float>& sin, bool interleaved,
                    const KernelName& name) {
  Require(x.ndim() == 1 && x.size() == 2 * cos.size() && cos.size() == sin.size(),
          "x must be [head_dim], cos and sin [head_dim / 2]");
  Array<float> y(x.size());
  KernelByName(KvCacheKernels(), name)
      .rotate(x.data(), cos.data(), sin.data(), x.size(), interleaved, y.mutable_data());
  return y;
}

std::tuple<int64_t, int64_t, bool> VisibleOf(const Array<float>& mask, const KernelName& name) {
  const VisibleRange range = KernelByName(DecodeAttentionKernels(), name).visible(mask.data(), mask.size());
  return {range.begin, range.end, range.plain};
}

Array<uint8_t> KeyCodes(const Array<uint8_t>& cache, int64_t tokens, const CastArray<float>& codebook) {
  const KeyCodeLayout layout = CodebookLayout(codebook);
  CheckCache(cache, layout.RowBytes(), tokens);
  Array<uint8_t> codes({tokens, layout.SubQuantizers()});
  uint8_t* to = codes.mutable_data();
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t s = 0; s < layout.SubQuantizers(); ++s) {
      *to++ = static_cast<uint8_t>(KeyCode(layout, cache.data(), tokens, t, s));
    }
  }
  return codes;
}

// The arguments of a call, for each key-value head. They point into the arrays, which must outlive them.
class DecodeCall {
 public:
  // values: null if only scores are computed.
  DecodeCall(const Array<float>& q, float scale, const py::array& keys, const std::optional<Array<float>>& codebooks,
             int64_t first_key, const py::array* values, std::optional<int64_t> tokens, int64_t begin,
             std::optional<int64_t> end, float softcap, const KernelName& name)
      : kernel_(KernelByName(DecodeAttentionKernels(), name)) {
    Require(q.ndim() == 3 && q.shape(0) > 0 && q.shape(1) > 0,
            "q must be [kv_heads, heads, head_dim], each at least 1");
    kv_heads_ = q.shape(0);
    args_.heads = q.shape(1);
    args_.head_dim = q.shape(2);
    args_.q = q.data();
    args_.q_head_bytes = args_.head_dim * kFloat;
    args_.scale = scale;
    args_.softcap = softcap;
    RequireNoProblem(ValidateKeyCodeLayout({args_.head_dim, 1}));
    int64_t room = std::numeric_limits<int64_t>::max();  // capacity of the caches
    int64_t seen = room;                                 // end of the available keys
    if (codebooks) {
      Require(codebooks->ndim() == 4 && codebooks->shape(0) == kv_heads_,
              "codebooks must be [kv_heads, head_dim / d_sub, 16, d_sub]");
      const KeyCodeLayout layout = CodebookLayout(codebooks->shape(1), codebooks->shape(2), codebooks->shape(3));
      Require(layout.head_dim == args_.head_dim, "codebooks must have the head_dim of q");
      room = Take<uint8_t>(keys, layout.RowBytes(), "keys with codebooks");
      args_.d_sub = layout.d_sub;
      args_.codebook = codebooks->data();
      args_.key_codes = static_cast<const uint8_t*>(keys.data());
      key_head_bytes_ = room * layout.RowBytes();
    } else {
      args_.first_key = first_key;
      seen = first_key + Take<float>(keys, args_.head_dim, "keys without codebooks");
      args_.keys = static_cast<const float*>(keys.data());
      args_.key_row_bytes = args_.head_dim * kFloat;
      key_head_bytes_ = (seen - first_key) * args_.key_row_bytes;
    }
    if (values != nullptr) {
      int64_t value_room;
      if (py::isinstance<py::array_t<uint8_t>>(*values)) {
        value_room = Take<uint8_t>(*values, ValueRowBytes(args_.head_dim), "int8 values");
        args_.int8_values = static_cast<const uint8_t*>(values->data());
        value_head_bytes_ = value_room * ValueRowBytes(args_.head_dim);
      } else {
        value_room = Take<float>(*values, args_.head_dim, "values");
        args_.values = static_cast<const float*>(values->data());
        args_.value_row_bytes = args_.head_dim * kFloat;
        value_head_bytes_ = value_room * args_.value_row_bytes;
      }
      room = std::min(room, value_room);
    }
    args_.tokens = tokens.value_or(std::min(room, seen));
    begin_ = begin;
    end_ = end.value_or(args_.tokens);
    Require(first_key >= 0 && begin_ >= first_key && begin_ <= end_ && end_ <= std::min(args_.tokens, seen) &&
                args_.tokens <= room,
            "first_key <= begin <= end <= tokens must hold, with keys and values for all of them; found ", first_key,
            ", ", begin_, ", ", end_, ", ", args_.tokens);
  }

  int64_t kv_heads() const { return kv_heads_; }
  const DecodeAttentionArgs& args() const { return args_; }
  int64_t count() const { return end_ - begin_; }

  template <typename Run>
  void ForEachHead(const Run& run) {
    AlignedBytes scratch(kernel_.scratch_bytes(args_.heads, args_.head_dim));
    const DecodeAttentionArgs first = args_;
    for (int64_t g = 0; g < kv_heads_; ++g) {
      args_.q = first.q + g * args_.heads * args_.head_dim;
      if (args_.keys != nullptr) args_.keys = first.keys + g * key_head_bytes_ / kFloat;
      if (args_.key_codes != nullptr) args_.key_codes = first.key_codes + g * key_head_bytes_;
      if (args_.codebook != nullptr) args_.codebook = first.codebook + g * kCentroids * args_.head_dim;
      if (args_.values != nullptr) args_.values = first.values + g * value_head_bytes_ / kFloat;
      if (args_.int8_values != nullptr) args_.int8_values = first.int8_values + g * value_head_bytes_;
      run(kernel_, g, begin_, end_, scratch.data());
    }
  }

 private:
  // Checks that the array is a contiguous [kv_heads, rows, row] of T, and returns rows.
  template <typename T>
  int64_t Take(const py::array& array, int64_t row, const char* what) const {
    Require(
        py::isinstance<Array<T>>(array) && array.ndim() == 3 && array.shape(0) == kv_heads_ && array.shape(2) == row,
        what, " must be ", sizeof(T) == 1 ? "uint8" : "float32", " [", kv_heads_, ", tokens, ", row, "], C-contiguous");
    return array.shape(1);
  }

  const DecodeAttentionKernel& kernel_;
  int64_t kv_heads_ = 0;
  DecodeAttentionArgs args_;
  int64_t key_head_bytes_ = 0;
  int64_t value_head_bytes_ = 0;
  int64_t begin_ = 0;
  int64_t end_ = 0;
};

using PartialArrays = std::tuple<Array<float>, Array<float>, Array<float>>;

PartialArrays DecodeAttention(const Array<float>& q, float scale, const py::array& keys, const py::array& values,
                              const std::optional<Array<float>>& codebooks, std::optional<int64_t> tokens,
                              int64_t begin, std::optional<int64_t> end, int64_t first_key, float softcap,
                              const KernelName& name) {
  DecodeCall call(q, scale, keys, codebooks, first_key, &values, tokens, begin, end, softcap, name);
  const int64_t heads = call.args().heads;
  const int64_t head_dim = call.args().head_dim;
  Array<float> most({call.kv_heads(), heads});
  Array<float> sum({call.kv_heads(), heads});
  Array<float> y({call.kv_heads(), heads, head_dim});
  const DecodePartial partial{most.mutable_data(), sum.mutable_data(), y.mutable_data()};
  {
    py::gil_scoped_release release;
    call.ForEachHead([&](const DecodeAttentionKernel& kernel, int64_t g, int64_t from, int64_t to, void* scratch) {
      kernel.run(call.args(), from, to,
                 {partial.max + g * heads, partial.sum + g * heads, partial.y + g * heads * head_dim}, scratch);
    });
  }
  return {most, sum, y};
}

Array<float> DecodeScores(const Array<float>& q, float scale, const py::array& keys,
                          const std::optional<Array<float>>& codebooks, std::optional<int64_t> tokens, int64_t begin,
                          std::optional<int64_t> end, int64_t first_key, float softcap, const KernelName& name) {
  DecodeCall call(q, scale, keys, codebooks, first_key, nullptr, tokens, begin, end, softcap, name);
  Array<float> scores({call.kv_heads(), call.args().heads, call.count()});
  float* to = scores.mutable_data();
  py::gil_scoped_release release;
  call.ForEachHead(
      [&](const DecodeAttentionKernel& kernel, int64_t g, int64_t from, int64_t end_of_range, void* scratch) {
        kernel.scores(call.args(), from, end_of_range, to + g * call.args().heads * call.count(), scratch);
      });
  return scores;
}

DecodePartial Writable(PartialArrays& partial) {
  auto& [most, sum, y] = partial;
  return {most.mutable_data(), sum.mutable_data(), y.mutable_data()};
}

void CheckPartial(const PartialArrays& partial) {
  const auto& [most, sum, y] = partial;
  Require(y.ndim() == 3 && most.ndim() == 2 && sum.ndim() == 2 && most.size() == sum.size() &&
              most.size() * y.shape(2) == y.size(),
          "max and sum must be [kv_heads, heads] and y [kv_heads, heads, head_dim]");
}

PartialArrays MergePartials(PartialArrays a, PartialArrays b, const KernelName& name) {
  CheckPartial(a);
  CheckPartial(b);
  const auto copy = [](const Array<float>& from) { return Array<float>(from.request()); };
  PartialArrays result{copy(std::get<0>(b)), copy(std::get<1>(b)), copy(std::get<2>(b))};
  Require(std::get<2>(a).size() == std::get<2>(b).size(), "a and b must have the same shape");
  KernelByName(DecodeAttentionKernels(), name)
      .merge(std::get<0>(a).size(), std::get<2>(a).shape(2), Writable(a), Writable(result));
  return result;
}

Array<float> Finish(PartialArrays partial, const KernelName& name) {
  CheckPartial(partial);
  const Array<float>& y = std::get<2>(partial);
  Array<float> result({y.shape(0), y.shape(1), y.shape(2)});
  KernelByName(DecodeAttentionKernels(), name)
      .finish(std::get<0>(partial).size(), y.shape(2), Writable(partial), result.mutable_data(), y.shape(2) * kFloat);
  return result;
}

}  // namespace

void BindDecodeAttention(py::module_& module) {
  DefineKernelList(module, "decode_attention", &DecodeAttentionKernels);
  DefineKernelList(module, "kv_cache", &KvCacheKernels);
  DefineKernelList(module, "softmax", &DecodeAttentionKernels);
  module.def("decode_keys", &DecodeKeysArray, py::arg("cache").noconvert(), py::arg("tokens"), py::arg("codebook"),
             py::arg("begin") = 0, py::arg("end") = py::none(), py::arg("kernel") = py::none());
  module.def("append_values", &AppendValuesArray, py::arg("cache").noconvert(), py::arg("tokens"), py::arg("values"),
             py::arg("kernel") = py::none());
  module.def("decode_values", &DecodeValuesArray, py::arg("cache").noconvert(), py::arg("tokens"), py::arg("begin") = 0,
             py::arg("end") = py::none(), py::arg("kernel") = py::none());
  module.def("rotate", &Rotate, py::arg("x"), py::arg("cos"), py::arg("sin"), py::arg("interleaved") = false,
             py::arg("kernel") = py::none());
  module.def("visible_range", &VisibleOf, py::arg("mask"), py::arg("kernel") = py::none());
  module.def("append_keys", &AppendKeysArray, py::arg("cache").noconvert(), py::arg("tokens"), py::arg("keys"),
             py::arg("codebook"), py::arg("kernel") = py::none());
  module.def("key_codes", &KeyCodes, py::arg("cache").noconvert(), py::arg("tokens"), py::arg("codebook"));
  module.def("decode_attention", &DecodeAttention, py::arg("q"), py::arg("scale"), py::arg("keys"), py::arg("values"),
             py::arg("codebooks") = py::none(), py::arg("tokens") = py::none(), py::arg("begin") = 0,
             py::arg("end") = py::none(), py::arg("first_key") = 0, py::arg("softcap") = 0.0f,
             py::arg("kernel") = py::none());
  module.def("decode_scores", &DecodeScores, py::arg("q"), py::arg("scale"), py::arg("keys"),
             py::arg("codebooks") = py::none(), py::arg("tokens") = py::none(), py::arg("begin") = 0,
             py::arg("end") = py::none(), py::arg("first_key") = 0, py::arg("softcap") = 0.0f,
             py::arg("kernel") = py::none());
  module.def("merge_decode", &MergePartials, py::arg("a"), py::arg("b"), py::arg("kernel") = py::none());
  module.def("finish_decode", &Finish, py::arg("partial"), py::arg("kernel") = py::none());
}

}  // namespace ortolan
