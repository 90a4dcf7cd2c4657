// ORT adapter of PackTokens.
//
//     Y[0, i] = X[b, s]    token s of sequence b is kept; i is the number of kept tokens before it
//
//     kept int64 [B, S]: nonzero for tokens to keep; X numeric or bool, [B or 1, S or 1, ...], broadcast
//     -> Y [1, N, ...], of X's type
#include <algorithm>
#include <cstring>

#include "operators.h"
#include "ort/ort_op.h"
#include "pack_tokens/kept_input.h"

namespace ortolan {
namespace {

constexpr const char* kOpType = "PackTokens";

enum Input : size_t { kKept, kX, kInputCount };

// Bytes copied per work item: a few microseconds, more than the cost of handing it to another thread.
constexpr int64_t kChunkBytes = int64_t{1} << 18;

// Returns the size of an element; 0 for unsupported types.
int64_t BytesOf(ONNXTensorElementDataType type) {
  switch (type) {
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL:
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8:
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8:
      return 1;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16:
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16:
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16:
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16:
      return 2;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT:
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32:
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT32:
      return 4;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE:
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64:
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT64:
      return 8;
    default:
      return 0;
  }
}

class Kernel {
 public:
  explicit Kernel(const OrtKernelInfo& info) : node_(DescribeNode(info, kOpType)) {}

  void Compute(KernelContext& context, Host& host) const {
    const KeptTokens kept = ReadKept(context, kKept, node_, "kept");
    const Tensor x = context.Input(kX);
    std::vector<int64_t> shape = x.Shape();
    const auto fits = [&](size_t axis, int64_t size) { return shape[axis] == size || shape[axis] == 1; };
    if (shape.size() < 2 || !fits(0, kept.batch) || !fits(1, kept.tokens)) {
      throw OpError(ErrorText(node_, ": X has shape ", ShapeText(shape), ", expected [", kept.batch, " or 1, ",
                              kept.tokens, " or 1, ...], like kept"));
    }
    int64_t row_bytes = BytesOf(x.Type());
    if (row_bytes == 0)
      throw OpError(ErrorText(node_, ": X has element type ", x.Type(), ", expected a numeric type or bool"));
    const int64_t batch_rows = shape[0] == 1 ? 0 : shape[1], token_rows = shape[1] == 1 ? 0 : 1;
    for (size_t axis = 2; axis < shape.size(); ++axis) row_bytes *= shape[axis];
    shape[0] = 1;
    shape[1] = kept.Count();
    const char* const from = x.Data<char>();
    char* const to = context.Output(0, shape);
    if (row_bytes == 0) return;
    const int64_t chunk = std::max<int64_t>(kChunkBytes / row_bytes, 1);
    host.ParallelFor((kept.Count() + chunk - 1) / chunk, [&](int64_t i) {
      const int64_t begin = i * chunk, end = std::min(begin + chunk, kept.Count());
      int64_t b = std::upper_bound(kept.begins.begin(), kept.begins.end(), begin) - kept.begins.begin() - 1;
      for (int64_t row = begin; row < end;) {
        while (kept.Begin(b + 1) <= row) ++b;
        for (const int64_t last = std::min(end, kept.Begin(b + 1)); row < last; ++row) {
          const int64_t position = b * batch_rows + kept.positions[static_cast<size_t>(row)] * token_rows;
          std::memcpy(to + row * row_bytes, from + position * row_bytes, static_cast<size_t>(row_bytes));
        }
      }
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
    return index == kKept ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 : ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  }
  ONNXTensorElementDataType GetOutputType(size_t) const { return ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED; }
  static void InferShape(OrtShapeInferContext*) {}  // the number of tokens has no symbolic name
};

}  // namespace

const OrtCustomOp* PackTokensOp() {
  static const Op op;
  return &op;
}

}  // namespace ortolan
