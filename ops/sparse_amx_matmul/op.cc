// ORT adapter of SparseAMXMatMul.
//
//     X float [..., k], masks u8 [panels, tiles, 64], values bf16, offsets i64 [panels + 1], bias float [n] (optional)
//     -> Y float [..., n];   attributes k, n, format_version;   masks, values and offsets are initializers
//     (formats/bitmap.h)
#include <algorithm>

#include "sparse_amx_matmul/sparse_amx_matmul.h"
#include "support/ort_op.h"
#include "support/rooms.h"

namespace ortolan {
namespace {

constexpr const char* kOpType = "SparseAMXMatMul";
constexpr int64_t kFormatVersion = 1;

// A chunk of rows expands a panel anew, so it must be long; it is short enough for many threads to share a wide X.
constexpr int64_t kRowChunk = 256;
#define ORTOLAN_KERNEL(isa, name, activation_bytes, row_block, least_rows) static_assert(kRowChunk % row_block == 0);
#define ORTOLAN_X86_KERNEL ORTOLAN_KERNEL
#include "sparse_amx_matmul/kernels.inc"
#undef ORTOLAN_X86_KERNEL
#undef ORTOLAN_KERNEL

enum Input : size_t { kX, kMasks, kValues, kOffsets, kBias, kInputCount };

class Kernel {
 public:
  explicit Kernel(const OrtKernelInfo& info) : node_(DescribeNode(info, kOpType)) {
    CheckFormatVersion(info, kFormatVersion, node_);
    const ConstantTensor masks = ConstantInput(info, kMasks, "masks", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8, node_);
    const ConstantTensor values = ConstantInput(info, kValues, "values", ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16, node_);
    const ConstantTensor offsets = ConstantInput(info, kOffsets, "offsets", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, node_);
    // Copied: a file may place them at an odd address.
    offsets_.resize(static_cast<size_t>(offsets.count));
    std::copy_n(static_cast<const char*>(offsets.data), offsets.count * sizeof(int64_t),
                reinterpret_cast<char*>(offsets_.data()));
    const BitmapClaim claim{IntAttribute(info, "k", node_),
                            IntAttribute(info, "n", node_),
                            static_cast<const uint8_t*>(masks.data),
                            masks.count,
                            values.count,
                            offsets_.data(),
                            offsets.count};
    const std::string problem = ValidateBitmap(claim);
    if (!problem.empty()) {
      throw OpError(ErrorText(node_, ": malformed weight in tensors '", masks.name, "', '", values.name, "', '",
                              offsets.name, "': ", problem, ". Optimize the original model again."));
    }
    w_ = claim.View(static_cast<const uint8_t*>(values.data));
    CheckConstantVector(info, kBias, "bias", w_.n, node_);
    x_name_ = Ort::ConstKernelInfo(&info).GetInputName(kX);
  }

  void Compute(Ort::KernelContext& context) {
    const Ort::ConstValue x = context.GetInput(kX);
    std::vector<int64_t> shape = x.GetTensorTypeAndShapeInfo().GetShape();
    if (shape.empty() || shape.back() != w_.k) {
      throw OpError(ErrorText(node_, ": X '", x_name_, "' has shape ", ShapeText(shape), ", expected [..., ", w_.k,
                              "]. Feed the model inputs of the shapes it was exported for."));
    }
    shape.back() = w_.n;
    SparseMatMulArgs args;
    args.w = w_;
    args.bias = Bias(context);
    args.m = 1;
    for (size_t i = 0; i + 1 < shape.size(); ++i) args.m *= shape[i];
    args.y = context.GetOutput(0, shape).GetTensorMutableData<float>();
    args.y_row_bytes = w_.n * static_cast<int64_t>(sizeof(float));
    if (args.m == 0) return;

    const SparseMatMulKernel& kernel = SelectSparseMatMul(ActiveIsa(), args.m);
    const Scratch packed(context, static_cast<size_t>(kernel.PackedBytes(args.m, w_.k)));
    Pack(context, kernel, x.GetTensorData<float>(), args.m, static_cast<char*>(packed.data()));
    args.x = packed.data();
    Multiply(context, kernel, args);
  }

 private:
  // Work below this many multiply-adds is not worth handing to another thread.
  static constexpr int64_t kMinChunkMacs = int64_t{1} << 19;
  // Expanding a weight costs about this many multiply-adds, once per chunk of rows.
  static constexpr int64_t kExpandMacs = 4;
  static constexpr int64_t kPackChunkFloats = int64_t{1} << 16;

  const float* Bias(const Ort::KernelContext& context) const {
    if (context.GetInputCount() <= kBias) return nullptr;
    const Ort::ConstValue bias = context.GetInput(kBias);
    if (!bias) return nullptr;
    const std::vector<int64_t> shape = bias.GetTensorTypeAndShapeInfo().GetShape();
    if (shape != std::vector<int64_t>{w_.n}) {
      throw OpError(ErrorText(node_, ": bias has shape ", ShapeText(shape), ", expected [", w_.n, "]"));
    }
    return bias.GetTensorData<float>();
  }

  void Pack(const Ort::KernelContext& context, const SparseMatMulKernel& kernel, const float* x, int64_t m,
            char* packed) const {
    const int64_t packed_row_bytes = BitmapPaddedK(w_.k) * kernel.activation_bytes;
    const int64_t blocks = std::max<int64_t>(1, kPackChunkFloats / (w_.k * kernel.row_block));
    const int64_t rows = blocks * kernel.row_block;
    const int64_t x_row_bytes = w_.k * static_cast<int64_t>(sizeof(float));
    ParallelFor(context, (m + rows - 1) / rows, [&](int64_t chunk) {
      const int64_t begin = chunk * rows;
      kernel.pack(x + begin * w_.k, x_row_bytes, std::min(rows, m - begin), w_.k, packed + begin * packed_row_bytes);
    });
  }

  void Multiply(const Ort::KernelContext& context, const SparseMatMulKernel& kernel,
                const SparseMatMulArgs& args) const {
    const int64_t packed_row_bytes = BitmapPaddedK(w_.k) * kernel.activation_bytes;
    const int64_t panels = BitmapPanels(w_.n);
    const int64_t row_chunks = (args.m + kRowChunk - 1) / kRowChunk;
    const int64_t panel_macs = BitmapPaddedK(w_.k) * kPanelColumns * (kExpandMacs + std::min(args.m, kRowChunk));
    const int64_t most_chunks = std::clamp<int64_t>(panels * panel_macs / kMinChunkMacs, 1, panels);
    const int64_t chunk_panels = (panels + most_chunks - 1) / most_chunks;
    const int64_t panel_chunks = (panels + chunk_panels - 1) / chunk_panels;
    ParallelFor(context, row_chunks * panel_chunks, [&](int64_t chunk) {
      const int64_t row = chunk / panel_chunks * kRowChunk;
      const int64_t panel = chunk % panel_chunks * chunk_panels;
      SparseMatMulArgs rows = args;
      rows.m = std::min(kRowChunk, args.m - row);
      rows.x = static_cast<const char*>(args.x) + row * packed_row_bytes;
      rows.y = args.y + row * w_.n;
      kernel.multiply(rows, panel, std::min(panel + chunk_panels, panels));
    });
  }

  std::string node_;
  std::string x_name_;
  std::vector<int64_t> offsets_;
  BitmapView w_;
};

struct Op : OrtOp<Op, Kernel> {
  const char* GetName() const { return kOpType; }
  size_t GetInputTypeCount() const { return kInputCount; }
  size_t GetOutputTypeCount() const { return 1; }
  ONNXTensorElementDataType GetInputType(size_t index) const {
    switch (index) {
      case kMasks:
        return ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;
      case kValues:
        return ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16;
      case kOffsets:
        return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
      default:
        return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
    }
  }
  ONNXTensorElementDataType GetOutputType(size_t) const { return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; }
  OrtCustomOpInputOutputCharacteristic GetInputCharacteristic(size_t index) const {
    return index == kBias ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
  }
  static void InferShape(OrtShapeInferContext* context) { InferLastDimension(context, "n"); }
};

}  // namespace

const OrtCustomOp* SparseAMXMatMulOp() {
  static const Op op;
  return &op;
}

}  // namespace ortolan
