#include "nomad_attention/cached_prompt.h"

#include <algorithm>
#include <cstring>

#include "isa/kernel_table.h"
#include "nomad_attention/cached_op.h"
#include "ort/thread_scratch.h"

namespace ortolan {
namespace {

constexpr int64_t kFloat = sizeof(float);
constexpr int64_t kMaxTokens = int64_t{1} << 24;
constexpr size_t kMatrixInputs = 3;
// Enough pieces of work for the threads of a server.
constexpr int64_t kPieces = 64;

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

CachedPrompt::Partials::Partials(const Ort::KernelContext& context, const std::string& node, const CachedPrompt& prompt,
                                 const AttentionCall& call)
    : call_(call),
      rows_(call.batch * call.queries * (call.heads / call.kv_heads)),
      parts_(std::clamp<int64_t>(kPieces / (call.kv_heads * ((rows_ + kPromptRows - 1) / kPromptRows)), 1,
                                 prompt.cache().Chunks())),
      item_floats_(Aligned(std::min(rows_, kPromptRows) * (2 + call.head_dim) * kFloat) / kFloat),
      memory_(context, static_cast<size_t>((rows_ + kPromptRows - 1) / kPromptRows * call.kv_heads * parts_ *
                                           item_floats_ * kFloat)) {
  const PromptCache& cache = prompt.cache();
  const Features features = ActiveFeatures();
  const int64_t head_dim = call.head_dim, group = call.heads / call.kv_heads;
  const int64_t most = std::min(rows_, kPromptRows), blocks = (rows_ + kPromptRows - 1) / kPromptRows;
  // Of the last block, another kernel may be the best.
  const int64_t kernel_bytes =
      Aligned(std::max(PromptScratchBytes(cache, features, most),
                       PromptScratchBytes(cache, features, rows_ - (blocks - 1) * kPromptRows)));
  const int64_t query_floats = Aligned(most * head_dim * kFloat) / kFloat;
  // The kernel's, the queries, a chunk's partial result.
  const int64_t bytes = kernel_bytes + (query_floats + item_floats_) * kFloat;
  ForEachWithScratch(context, node, blocks * call.kv_heads * parts_, bytes, [&](int64_t item, char* scratch) {
    const int64_t part = item % parts_, kv_head = item / parts_ % call.kv_heads;
    const int64_t first = item / parts_ / call.kv_heads * kPromptRows, count = std::min(most, rows_ - first);
    float* q = reinterpret_cast<float*>(scratch + kernel_bytes);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = (first + i) / group;
      const float* from = call.q.At(row / call.queries, kv_head * group + (first + i) % group, row % call.queries);
      std::memcpy(q + i * head_dim, from, static_cast<size_t>(head_dim * kFloat));
    }
    const DecodePartial whole = At(item, 0);
    float* rest = q + query_floats;
    const DecodePartial more{rest, rest + most, rest + 2 * most};
    const int64_t begin = cache.Chunks() * part / parts_, end = cache.Chunks() * (part + 1) / parts_;
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      AttendPrompt(cache, features, kv_head, chunk, q, count, call.scale, chunk == begin ? whole : more, scratch);
      if (chunk != begin) SelectKernel(SoftmaxKernels(), ActiveFeatures()).merge(count, head_dim, more, whole);
    }
  });
}

DecodePartial CachedPrompt::Partials::At(int64_t item, int64_t row) const {
  const int64_t most = std::min(rows_, kPromptRows);
  float* floats = static_cast<float*>(memory_.data()) + item * item_floats_;
  return {floats + row, floats + most + row, floats + 2 * most + row * call_.head_dim};
}

void CachedPrompt::Partials::MergeInto(const DecodePartial& whole, int64_t batch, int64_t kv_head,
                                       int64_t query) const {
  const int64_t group = call_.heads / call_.kv_heads;
  for (int64_t h = 0; h < group; ++h) {
    const int64_t row = (batch * call_.queries + query) * group + h;
    const DecodePartial into{whole.max + h, whole.sum + h, whole.y + h * call_.head_dim};
    for (int64_t part = 0; part < parts_; ++part) {
      const int64_t item = (row / kPromptRows * call_.kv_heads + kv_head) * parts_ + part;
      SelectKernel(SoftmaxKernels(), ActiveFeatures()).merge(1, call_.head_dim, At(item, row % kPromptRows), into);
    }
  }
}

}  // namespace ortolan
