// Reads the input `kept` of operators on packed tokens, for their ORT adapters.
#pragma once

#include <string>

#include "attention/kept_tokens.h"
#include "ort/ort_op.h"

namespace ortolan {

// Reads int64 [batch, tokens]. Throws OpError.
inline KeptTokens ReadKept(const KernelContext& context, size_t input, const std::string& node,
                           const std::string& name) {
  const Tensor value = context.Input(input);
  const std::vector<int64_t> shape = value.Shape();
  if (shape.size() != 2) {
    throw OpError(ErrorText(node, ": kept '", name, "' has shape ", ShapeText(shape), ", expected [batch, tokens]"));
  }
  constexpr int64_t kMostSequences = int64_t{1} << 24;
  if (shape[0] > kMostSequences) {
    throw OpError(
        ErrorText(node, ": kept '", name, "' has ", shape[0], " sequences, expected at most ", kMostSequences));
  }
  return {value.Data(), shape[0], shape[1]};
}

}  // namespace ortolan
