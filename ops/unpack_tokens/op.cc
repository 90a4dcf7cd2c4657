// ORT adapter of UnpackTokens: what PackTokens has packed, in its places.
//
//     Y[b, s] = X[0, i]    where kept[b, s] is not 0, i as in PackTokens; else 0
//
//     kept int64 [B, S], X float [1, N, ...], N tokens being kept -> Y [B, S, ...]
#include <algorithm>
#include <cstring>

#include "ort/ort_op.h"
#include "pack_tokens/kept_input.h"
#include "rooms.h"

namespace ortolan {
namespace {

constexpr const char* kOpType = "UnpackTokens";

enum Input : size_t { kKept, kX, kInputCount };

class Kernel {
 public:
  explicit Kernel(const OrtKernelInfo& info) : node_(DescribeNode(info, kOpType)), kept_(info, kKept), x_(info, kX) {}

  void Compute(Ort::KernelContext& context, Host& host) const {
    const KeptTokens kept = ReadKept(context, kKept, kept_, node_, "kept");
    const Ort::ConstValue x = context.GetInput(kX);
    std::vector<int64_t> shape = x.GetTensorTypeAndShapeInfo().GetShape();
    if (shape.size() < 2 || shape[0] != 1 || shape[1] != kept.Count()) {
      throw OpError(ErrorText(node_, ": X has shape ", ShapeText(shape), ", expected [1, ", kept.Count(),
                              ", ...], a row for each token that is kept"));
    }
    int64_t width = 1;
    for (size_t axis = 2; axis < shape.size(); ++axis) width *= shape[axis];
    shape[0] = kept.batch;
    shape[1] = kept.tokens;
    const float* const from = x_.In(x);
    float* const to = context.GetOutput(0, shape).GetTensorMutableData<float>();
    const size_t row_bytes = static_cast<size_t>(width) * sizeof(float);
    if (width == 0 || kept.tokens == 0) return;
    host.ParallelFor(kept.batch, [&](int64_t b) {
      const int64_t* const places = kept.Places(b);
      const int64_t count = kept.Count(b);
      float* const sequence = to + b * kept.tokens * width;
      int64_t next = 0;  // of the sequence, not yet written
      for (int64_t i = 0; i < count; ++i) {
        std::memset(sequence + next * width, 0, static_cast<size_t>(places[i] - next) * row_bytes);
        std::memcpy(sequence + places[i] * width, from + (kept.Begin(b) + i) * width, row_bytes);
        next = places[i] + 1;
      }
      std::memset(sequence + next * width, 0, static_cast<size_t>(kept.tokens - next) * row_bytes);
    });
  }

 private:
  std::string node_;
  AlignedConstant<int64_t> kept_;
  AlignedConstant<float> x_;
};

struct Op : OrtOp<Op, Kernel> {
  const char* GetName() const { return kOpType; }
  size_t GetInputTypeCount() const { return kInputCount; }
  size_t GetOutputTypeCount() const { return 1; }
  ONNXTensorElementDataType GetInputType(size_t index) const {
    return index == kKept ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  }
  ONNXTensorElementDataType GetOutputType(size_t) const { return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; }
  static void InferShape(OrtShapeInferContext*) {}  // kept may have dimensions without a name
};

}  // namespace

const OrtCustomOp* UnpackTokensOp() {
  static const Op op;
  return &op;
}

}  // namespace ortolan
