#include <cstring>

#include "isa/kernel_table.h"
#include "nomad_attention/nomad_attention.h"

namespace ortolan {

AttentionArgs ArgsOf(const AttentionCall& call, int64_t batch, int64_t kv_head, int64_t first, int64_t count) {
  const int64_t head = kv_head * call.Group();
  AttentionArgs args;
  args.heads = call.Group();
  args.queries = count;
  args.keys = call.keys;
  args.head_dim = call.head_dim;
  args.q = call.q.At(batch, head, first);
  args.q_head_bytes = call.q.head_bytes;
  args.q_row_bytes = call.q.row_bytes;
  args.k = call.k.At(batch, kv_head, 0);
  args.k_row_bytes = call.k.row_bytes;
  args.v = call.v.At(batch, kv_head, 0);
  args.v_row_bytes = call.v.row_bytes;
  if (call.mask.data != nullptr) {
    args.mask = call.mask.At(batch, head, first);
    args.mask_head_stride = args.heads > 1 ? call.mask.strides[1] : 0;
    args.mask_query_stride = call.mask.strides[2];
    args.mask_key_stride = call.mask.strides[3];
  }
  args.scale = call.scale;
  args.causal = call.causal;
  args.zero_hidden_rows = call.zero_hidden_rows;
  args.y = call.Y(batch, head, first);
  args.y_head_bytes = call.head_dim * static_cast<int64_t>(sizeof(float));
  args.y_row_bytes = call.heads * args.y_head_bytes;
  return args;
}

AttentionPlan::AttentionPlan(int precision)
    : kernel_(SelectKernel(AttentionKernels(), ActiveFeatures(), {.precision = precision})) {}

void AttentionPlan::Run(Host& host, const AttentionCall& call) const {
  if (call.batch == 0 || call.queries == 0) return;
  if (call.keys == 0) {  // sums of nothing
    std::memset(call.y, 0, static_cast<size_t>(call.batch * call.queries * call.heads * call.head_dim) * sizeof(float));
    return;
  }
  AttendHeads(host, kernel_, call.batch * call.kv_heads, call.Group() * call.queries, call.keys, call.head_dim,
              [&](int64_t head) { return ArgsOf(call, head / call.kv_heads, head % call.kv_heads, 0, call.queries); });
}

}  // namespace ortolan
