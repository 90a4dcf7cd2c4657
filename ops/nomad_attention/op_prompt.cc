#include "nomad_attention/op_prompt.h"

#include <algorithm>
#include <cstring>

#include "formats/key_code_cache.h"

namespace ortolan {
namespace {

constexpr int64_t kMaxTokens = int64_t{1} << 24;
constexpr size_t kMatrixInputs = 3;

// masks, values and offsets of a [k, n] matrix from an input on; the offsets are copied, as a file may place them at an
// odd address. Throws OpError.
BitmapView ReadMatrix(const OrtKernelInfo& info, size_t input, const std::string& meaning, int64_t k, int64_t n,
                      std::vector<int64_t>& copied_offsets, const std::string& node) {
  const auto read = [&](size_t index, const char* part, ONNXTensorElementDataType type) {
    return ConstantInput(info, input + index, (meaning + part).c_str(), {type}, node);
  };
  const ConstantTensor masks = read(0, "_masks", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8);
  const ConstantTensor values = read(1, "_values", ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16);
  const ConstantTensor offsets = read(2, "_offsets", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64);
  copied_offsets.resize(static_cast<size_t>(offsets.count));
  std::copy_n(static_cast<const char*>(offsets.data), offsets.count * sizeof(int64_t),
              reinterpret_cast<char*>(copied_offsets.data()));
  const BitmapClaim claim{
      k, n, static_cast<const uint8_t*>(masks.data), masks.count, values.count, copied_offsets.data(), offsets.count};
  const std::string problem = ValidateBitmap(claim);
  if (!problem.empty()) {
    throw OpError(ErrorText(node, ": malformed ", meaning, " in tensors '", masks.name, "', '", values.name, "', '",
                            offsets.name, "': ", problem, ". Optimize the original model again."));
  }
  for (int64_t i = 0; i < values.count; ++i) {
    uint16_t bits;
    std::memcpy(&bits, static_cast<const char*>(values.data) + i * kValueBytes, sizeof bits);
    if ((bits & 0x7f80) != 0x7f80) continue;
    throw OpError(ErrorText(node, ": ", meaning, " '", values.name, "' holds NaN or infinity at ", i,
                            ", expected finite numbers. Optimize the original model again."));
  }
  return claim.View(static_cast<const uint8_t*>(values.data));
}

}  // namespace

CachedPrompt::CachedPrompt(const OrtKernelInfo& info, const std::string& node, size_t first_input, int64_t kv_heads) {
  const int64_t tokens = IntAttributeOr(info, "prompt_tokens", 0);
  if (tokens < 0 || tokens > kMaxTokens) {
    throw OpError(ErrorText(node, ": prompt_tokens is ", tokens, ", expected a number of tokens, 0 to ", kMaxTokens));
  }
  if (tokens == 0) {
    const Ort::ConstKernelInfo names(&info);
    for (size_t i = first_input; i < first_input + 2 * kMatrixInputs; ++i) {
      if (!HasInput(info, i)) continue;
      throw OpError(ErrorText(node, ": input ", i, " '", names.GetInputName(i),
                              "' is of a prompt, but prompt_tokens is 0, expected the number of its tokens"));
    }
    return;
  }
  cache_.head_dim = IntAttribute(info, "prompt_head_dim", node);
  if (!ValidateKeyCodeLayout({cache_.head_dim, 1}).empty()) {
    throw OpError(ErrorText(node, ": prompt_head_dim is ", cache_.head_dim, ", expected a multiple of 16 from 16 to ",
                            kMaxHeadDim));
  }
  cache_.tokens = tokens;
  cache_.kv_heads = kv_heads;
  cache_.keys = ReadMatrix(info, first_input, "prompt_key", cache_.head_dim, cache_.KeyColumns(), key_offsets_, node);
  cache_.values = ReadMatrix(info, first_input + kMatrixInputs, "prompt_value", cache_.ChunkTokens(),
                             cache_.ValueColumns(), value_offsets_, node);
}

}  // namespace ortolan
