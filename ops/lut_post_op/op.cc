// ORT adapter of LutPostOp. README.md lists inputs, outputs and attributes.
//
// table is a one-dimensional initializer (lut_post_op.h). ORT allows one input of variable type, from which the
// output's type follows: here the table. So the operator is registered once for each type of X.
#include <algorithm>

#include "isa/kernel_table.h"
#include "lut_post_op/lut_post_op.h"
#include "operators.h"
#include "ort/ort_op.h"

namespace ortolan {
namespace {

constexpr const char* kOpType = "LutPostOp";
constexpr int64_t kFormatVersion = 1;

// Bytes read and written per work item: a few microseconds, more than the cost of handing it to another thread.
constexpr int64_t kChunkBytes = int64_t{1} << 19;

enum Input : size_t { kX, kTable, kInputCount };

constexpr int64_t BytesOf(ONNXTensorElementDataType type) {
  switch (type) {
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8:
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8:
      return 1;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16:
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16:
      return 2;
    default:
      return sizeof(float);
  }
}

template <ONNXTensorElementDataType kXType>
class Kernel {
 public:
  explicit Kernel(const OrtKernelInfo& info) {
    const std::string node = DescribeNode(info, kOpType);
    CheckFormatVersion(info, kFormatVersion, node);
    const ConstantTensor table = ConstantInput(
        info, kTable, "table",
        {ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8, ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16,
         ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT},
        node);
    CheckShape(table, "table", {LutEntries(kXBytes)}, node, kXBytes == 1 ? " for 8-bit X" : " for 16-bit X");
    table_ = table.data;
    entry_bytes_ = BytesOf(table.type);
    run_ = SelectKernel(LutKernels(), ActiveFeatures()).For(kXBytes, entry_bytes_);
  }

  void Compute(KernelContext& context, Host& host) const {
    const Tensor x = context.Input(kX);
    const int64_t count = x.Count();
    const char* from = x.Data<char>();
    char* to = context.Output(0, x.Shape());
    const int64_t chunk = kChunkBytes / (kXBytes + entry_bytes_);
    host.ParallelFor((count + chunk - 1) / chunk, [&](int64_t i) {
      const int64_t begin = i * chunk;
      run_({from + begin * kXBytes, table_, to + begin * entry_bytes_, std::min(chunk, count - begin)});
    });
  }

 private:
  static constexpr int64_t kXBytes = BytesOf(kXType);

  const void* table_;
  int64_t entry_bytes_;
  LutFn* run_;
};

template <ONNXTensorElementDataType kXType>
struct Op : OrtOp<Op<kXType>, Kernel<kXType>> {
  const char* GetName() const { return kOpType; }
  size_t GetInputTypeCount() const { return kInputCount; }
  size_t GetOutputTypeCount() const { return 1; }
  ONNXTensorElementDataType GetInputType(size_t index) const {
    return index == kX ? kXType : ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  }
  ONNXTensorElementDataType GetOutputType(size_t) const { return ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED; }
  static void InferShape(OrtShapeInferContext* context) { InferSameShape(context, kTable); }
};

template <ONNXTensorElementDataType kXType>
const OrtCustomOp* OpFor() {
  static const Op<kXType> op;
  return &op;
}

}  // namespace

const OrtCustomOp* LutPostOpOp() { return OpFor<ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8>(); }
const OrtCustomOp* LutPostOpInt8Op() { return OpFor<ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8>(); }
const OrtCustomOp* LutPostOpUint16Op() { return OpFor<ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16>(); }
const OrtCustomOp* LutPostOpInt16Op() { return OpFor<ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16>(); }

}  // namespace ortolan
