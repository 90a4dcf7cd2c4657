#include "nomad_attention/op_node.h"

#include <cmath>
#include <limits>

namespace ortolan {
namespace {

constexpr int64_t kMaxHeads = int64_t{1} << 16;

}  // namespace

AttentionNode::AttentionNode(const OrtKernelInfo& info, const char* op_type, size_t most_inputs, size_t most_outputs)
    : text(DescribeNode(info, op_type)) {
  for (size_t i = 0; i < most_inputs; ++i) inputs.push_back(InputName(info, i));
  for (size_t i = 0; i < most_outputs; ++i) outputs.push_back(OutputName(info, i));
}

void AttentionNode::ReadScores(const OrtKernelInfo& info, AttentionCall& call) {
  heads = IntAttribute(info, "num_heads", text);
  kv_heads = IntAttributeOr(info, "kv_num_heads", 0);
  if (kv_heads == 0) kv_heads = heads;
  if (heads < 1 || heads > kMaxHeads || kv_heads < 1 || heads % kv_heads != 0) {
    throw Error("num_heads is ", heads, " and kv_num_heads ", kv_heads, ", expected 1 to ", kMaxHeads,
                " heads, and kv_num_heads a divisor of num_heads");
  }
  call.heads = heads;
  call.kv_heads = kv_heads;
  call.scale = FloatAttributeOr(info, "scale", 0);
  if (!std::isfinite(call.scale)) throw Error("scale is ", call.scale, ", expected a finite value");
  call.softcap = FloatAttributeOr(info, "softcap", 0);
  if (!IsSoftcap(call.softcap)) {
    throw Error("softcap is ", call.softcap, ", expected 0, or ", kLeastSoftcap, " to ", kMostSoftcap);
  }
}

std::vector<float> AttentionNode::ReadSinks(const OrtKernelInfo& info) const {
  std::vector<float> sinks = FloatsAttributeOr(info, "head_sink", {});
  if (sinks.empty()) return sinks;
  if (static_cast<int64_t>(sinks.size()) != heads) {
    throw Error("head_sink has ", sinks.size(), " elements, expected ", heads, ", one a head");
  }
  for (const float sink : sinks) {
    if (std::isnan(sink) || sink == std::numeric_limits<float>::infinity()) {
      throw Error("head_sink contains ", sink, ", expected finite values or -Inf");
    }
  }
  return sinks;
}

bool AttentionNode::IsPacked(const OrtKernelInfo& info, size_t key, size_t value) const {
  const bool packed = !HasValues(info, key);
  if (packed == HasValues(info, value)) {
    throw Error("only one of the inputs key and value is given, expected both, or neither and a packed query ",
                "[B, S, (num_heads + 2 kv_num_heads) D]");
  }
  return packed;
}

bool AttentionNode::Flag(const OrtKernelInfo& info, const char* name) const {
  const int64_t flag = IntAttributeOr(info, name, 0);
  if (flag != 0 && flag != 1) throw Error(name, " is ", flag, ", expected 0 or 1");
  return flag == 1;
}

int64_t AttentionNode::Tokens(const OrtKernelInfo& info, const char* name) const {
  const int64_t count = IntAttributeOr(info, name, 0);
  if (count >= 0 && count <= kMaxTokens) return count;
  throw Error(name, " is ", count, ", expected 0 to ", kMaxTokens, " tokens");
}

OpError AttentionNode::WrongShape(const KernelContext& context, size_t input, const char* meaning,
                                  const std::string& expected) const {
  return Error(meaning, " '", inputs[input], "' has shape ", ShapeText(ShapeOf(context, input)), ", expected ",
               expected, ". Feed the model inputs of the shapes it was exported for.");
}

void InferAttention(OrtShapeInferContext* context, size_t query, size_t key) {
  if (Rank(context, query) != 3) return;
  int64_t width = LastDimension(context, query);
  if (width < 0) return;
  if (Rank(context, key) < 2) {
    // Either query is packed, or the shape of key is unknown.
    const bool packed = !HasMoreInputs(context, key) || HasOneElement(context, key);
    if (!packed) return;
    const int64_t heads = ShapeAttributeOr(context, "num_heads", 1);
    int64_t kv_heads = ShapeAttributeOr(context, "kv_num_heads", 0);
    if (kv_heads == 0) kv_heads = heads;
    for (const int64_t count : {heads, kv_heads}) {
      if (count < 1 || count > kMaxHeads) return;  // the kernel reports the error
    }
    if (width % (heads + 2 * kv_heads) != 0) return;
    width = width / (heads + 2 * kv_heads) * heads;
  }
  CopyShape(context, width);
}

}  // namespace ortolan
