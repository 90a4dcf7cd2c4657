// ortolan._testing: the exact kernels of NoMADAttention.
#include "attention/attention.h"

#include "nomad_attention/nomad_attention.h"
#include "testing.h"
#include "testing/host.h"

namespace ortolan {
namespace {

Array<float> NomadAttention(const CastArray<float>& q, const CastArray<float>& k, const CastArray<float>& v,
                            float scale, const std::optional<CastArray<float>>& mask, bool causal,
                            bool zero_hidden_rows, int precision, float softcap, int64_t window,
                            const std::optional<CastArray<float>>& sinks, const KernelName& name) {
  Require(q.ndim() == 3 && k.ndim() == 2 && q.shape(2) > 0 && k.shape(1) == q.shape(2) && k.shape(0) > 0 &&
              v.ndim() == 2 && v.shape(0) == k.shape(0) && v.shape(1) == k.shape(1),
          "q must be [heads, queries, head_dim], k and v [keys, head_dim], with keys and head_dim at least 1");
  AttentionArgs args;
  args.heads = q.shape(0);
  args.queries = q.shape(1);
  args.keys = k.shape(0);
  args.head_dim = q.shape(2);
  Require(!causal || args.keys >= args.queries, "causal needs at least one key for each query");
  args.q = q.data();
  args.k = k.data();
  args.v = v.data();
  args.q_row_bytes = args.k_row_bytes = args.v_row_bytes = args.y_row_bytes = args.head_dim * kFloat;
  args.q_head_bytes = args.y_head_bytes = args.queries * args.head_dim * kFloat;
  if (mask) {
    const int64_t full[] = {args.heads, args.queries, args.keys};
    int64_t* const strides[] = {&args.mask_head_stride, &args.mask_query_stride, &args.mask_key_stride};
    for (int i = 0; i < 3; ++i) {
      Require(mask->ndim() == 3 && (mask->shape(i) == full[i] || mask->shape(i) == 1),
              "mask must broadcast to [heads, queries, keys]");
      *strides[i] = mask->shape(i) == 1 ? 0 : mask->strides(i) / kFloat;
    }
    args.mask = mask->data();
  }
  args.scale = scale;
  args.softcap = softcap;
  Require(window == 0 || (window > 0 && causal), "a window must be positive, and causal");
  Require(!sinks || (sinks->ndim() == 1 && sinks->size() == args.heads), "sinks must be [heads]");
  args.window = window;
  args.sinks = sinks ? sinks->data() : nullptr;
  args.causal = causal;
  args.zero_hidden_rows = zero_hidden_rows;
  const AttentionKernel& kernel = name ? KernelByName(AttentionKernels(), name) : FindAttentionKernel(precision, true);
  Array<float> y({args.heads, args.queries, args.head_dim});
  args.y = y.mutable_data();
  py::gil_scoped_release release;
  AlignedBytes scratch(kernel.scratch_bytes(args.head_dim));
  const int64_t rows = args.heads * args.queries;
  for (int64_t row = 0; row < rows; row += kAttentionRows) {
    kernel.run(args, row, std::min(rows, row + kAttentionRows), scratch.data());
  }
  return y;
}

// Describes rows [batch, rows, heads, head_dim], as linear layers output them.
HeadRows RowsOf(const Array<float>& rows) {
  const int64_t row_bytes = rows.shape(2) * rows.shape(3) * kFloat;
  return {rows.data(), rows.shape(1) * row_bytes, rows.shape(3) * kFloat, row_bytes};
}

Array<float> RunPlan(const Array<float>& q, const Array<float>& k, const Array<float>& v, float scale, bool causal,
                     int precision, bool reproducible, int threads, std::optional<int64_t> most_bytes) {
  Require(q.ndim() == 4 && k.ndim() == 4 && v.ndim() == 4 && std::equal(k.shape(), k.shape() + 4, v.shape()) &&
              q.shape(0) == k.shape(0) && q.shape(3) == k.shape(3) && q.shape(3) > 0 && k.shape(2) > 0 &&
              q.shape(2) % k.shape(2) == 0 && (!causal || q.shape(1) <= k.shape(1)),
          "q must be [batch, queries, heads, head_dim], k and v [batch, keys, kv_heads, head_dim]");
  AttentionCall call;
  call.batch = q.shape(0);
  call.queries = q.shape(1);
  call.heads = q.shape(2);
  call.head_dim = q.shape(3);
  call.keys = k.shape(1);
  call.kv_heads = k.shape(2);
  call.scale = scale;
  call.causal = causal;
  call.q = RowsOf(q);
  call.k = RowsOf(k);
  call.v = RowsOf(v);
  Array<float> y({call.batch, call.queries, call.heads, call.head_dim});
  call.y = y.mutable_data();
  py::gil_scoped_release release;
  TestHost host(threads, most_bytes.value_or(INT64_MAX));
  AttentionPlan(precision, reproducible).Run(host, call);
  return y;
}

}  // namespace

void BindAttention(py::module_& module) {
  DefineKernelList(module, "nomad_attention", &AttentionKernels);
  module.def("nomad_attention", &NomadAttention, py::arg("q"), py::arg("k"), py::arg("v"), py::arg("scale"),
             py::arg("mask") = py::none(), py::arg("causal") = false, py::arg("zero_hidden_rows") = false,
             py::arg("precision") = 32, py::arg("softcap") = 0.0f, py::arg("window") = 0, py::arg("sinks") = py::none(),
             py::arg("kernel") = py::none());
  module.def("run_attention_plan", &RunPlan, py::arg("q"), py::arg("k"), py::arg("v"), py::arg("scale"),
             py::arg("causal") = false, py::arg("precision") = 32, py::arg("reproducible") = false,
             py::arg("threads") = 1, py::arg("most_bytes") = py::none());
}

}  // namespace ortolan
