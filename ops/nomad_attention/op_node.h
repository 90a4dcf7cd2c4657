// Shared by the ORT adapters of attention: names and attributes of a node, error messages, and shape inference.
#pragma once

#include <string>
#include <vector>

#include "nomad_attention/nomad_attention.h"
#include "ort/ort_op.h"

namespace ortolan {

using Shape = std::vector<int64_t>;

inline Shape ShapeOf(const KernelContext& context, size_t input) { return context.Input(input).Shape(); }

// The parts of a node that all adapters need, and its error messages.
struct AttentionNode {
  std::string text;                          // prefix of each error
  std::vector<std::string> inputs, outputs;  // names; empty if omitted
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int precision = 32;
  bool reproducible = false;

  // Reads the names of up to this number of inputs and outputs.
  AttentionNode(const OrtKernelInfo& info, const char* op_type, size_t most_inputs, size_t most_outputs);

  bool HasInput(size_t input) const { return input < inputs.size() && !inputs[input].empty(); }
  bool HasOutput(size_t output) const { return output < outputs.size() && !outputs[output].empty(); }
  // Whether the input is given and is not the constant 0 that replaces an omitted input.
  bool HasValues(const OrtKernelInfo& info, size_t input) const {
    return HasInput(input) && !IsConstantZero(info, input);
  }
  // Reads num_heads, kv_num_heads, scale (0: default for the head size) and softcap. Throws OpError.
  void ReadScores(const OrtKernelInfo& info, AttentionCall& call);
  // Reads head_sink, one number for each head; empty if missing. Call ReadScores first. Throws OpError.
  std::vector<float> ReadSinks(const OrtKernelInfo& info) const;
  // Whether query holds key and value, too, because both inputs are missing. Throws OpError if only one is missing.
  bool IsPacked(const OrtKernelInfo& info, size_t key, size_t value) const;
  // Read attributes; 0 if missing. Throw OpError.
  bool Flag(const OrtKernelInfo& info, const char* name) const;
  int64_t Tokens(const OrtKernelInfo& info, const char* name) const;

  template <typename... Parts>
  OpError Error(const Parts&... parts) const {
    return OpError(ErrorText(text, ": ", parts...));
  }
  OpError WrongShape(const KernelContext& context, size_t input, const char* meaning,
                     const std::string& expected) const;
};

// Infers the shape of output 0 from a query with three dimensions, which is packed if the input `key` is missing.
// Present caches are not inferred: their number of tokens has no symbolic name.
void InferAttention(OrtShapeInferContext* context, size_t query, size_t key);

}  // namespace ortolan
