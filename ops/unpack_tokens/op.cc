// ORT adapter of UnpackTokens, the inverse of PackTokens.
//
//     Y[b, s] = X[0, i]    if kept[b, s] is nonzero, with i as in PackTokens; otherwise 0
//
//     kept int64 [B, S], X float [1, N, ...], with N the number of kept tokens -> Y [B, S, ...]
#include <algorithm>
#include <cstring>

#include "operators.h"
#include "ort/ort_op.h"
#include "pack_tokens/kept_input.h"

namespace ortolan {
namespace {

constexpr const char* kOpType = "UnpackTokens";

enum Input : size_t { kKept, kX, kInputCount };

class Kernel {
 public:
  explicit Kernel(const OrtKernelInfo& info) : node_(DescribeNode(info, kOpType)) {}

  void Compute(KernelContext& context, Host& host) const {
    const KeptTokens kept = ReadKept(context, kKept, node_, "kept");
    const Tensor x = context.Input(kX);
    std::vector<int64_t> shape = x.Shape();
    if (shape.size() < 2 || shape[0] != 1 || shape[1] != kept.Count()) {
      throw OpError(ErrorText(node_, ": X has shape ", ShapeText(shape), ", expected [1, ", kept.Count(),
                              ", ...], one row for each kept token"));
    }
    int64_t width = 1;
    for (size_t axis = 2; axis < shape.size(); ++axis) width *= shape[axis];
    shape[0] = kept.batch;
    shape[1] = kept.tokens;
    const char* const from = x.Data<char>();
    char* const to = context.Output(0, shape);
    const int64_t row_bytes = width * static_cast<int64_t>(sizeof(float));
    if (width == 0 || kept.tokens == 0) return;
    host.ParallelFor(kept.batch, [&](int64_t b) {
      const int64_t* const positions = kept.Positions(b);
      const int64_t count = kept.Count(b);
      char* const sequence = to + b * kept.tokens * row_bytes;
      int64_t next = 0;  // first position not yet written
      const auto zero_until = [&](int64_t position) {
        std::memset(sequence + next * row_bytes, 0, static_cast<size_t>((position - next) * row_bytes));
      };
      for (int64_t i = 0; i < count; ++i) {
        zero_until(positions[i]);
        std::memcpy(sequence + positions[i] * row_bytes, from + (kept.Begin(b) + i) * row_bytes,
                    static_cast<size_t>(row_bytes));
        next = positions[i] + 1;
      }
      zero_until(kept.tokens);
    });
  }

 private:
  std::string node_;
};

struct Op : OrtOp<Op, Kernel> {
  const char* GetName() const { return kOpType; }
  size_t GetInputTypeCount() const { return kInputCount; }
  size_t GetOutputTypeCount() const { return 1; }
  ONNXTensorElementDataType GetInputType(size_t index) const {
    return index == kKept ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  }
  ONNXTensorElementDataType GetOutputType(size_t) const { return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; }
  static void InferShape(OrtShapeInferContext*) {}  // kept may have dimensions without a symbolic name
};

}  // namespace

const OrtCustomOp* UnpackTokensOp() {
  static const Op op;
  return &op;
}

}  // namespace ortolan
