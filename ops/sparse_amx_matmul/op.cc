// ORT adapter of SparseAMXMatMul.
//
//     Y = activation(X W + bias) + residual
//
//     X float [..., k], masks u8, values bf16, int8 or u8 (int4), offsets i64, bias float [n], residual float, scales
//     -> Y float [..., n], broadcast with residual;   attributes k, n, format_version, weight_bits,
//     group_size, activation
//
// masks, values, offsets and scales are initializers: formats/bitmap.h and its like. The element type of values says
// which; masks and offsets without elements mean dense storage. bias and residual are optional, and scales for bf16,
// where they are 1; so are a bias of zeros and a residual of one zero. (An ONNX function cannot ask whether an input is
// there, and ONNX Runtime up to 1.21 crashes where one is left out in front of another: graph_passes fills them.)
#include <algorithm>
#include <cstring>

#include "epilogue/epilogue.h"
#include "sparse_amx_matmul/sparse_amx_matmul.h"
#include "sparse_amx_matmul/sparse_amx_matmul_int8.h"
#include "support/broadcast.h"
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
#define ORTOLAN_KERNEL(isa, name, row_block, least_rows) static_assert(kRowChunk % row_block == 0);
#define ORTOLAN_X86_KERNEL ORTOLAN_KERNEL
#include "sparse_amx_matmul/kernels_int8.inc"
#undef ORTOLAN_X86_KERNEL
#undef ORTOLAN_KERNEL

enum Input : size_t { kX, kMasks, kValues, kOffsets, kBias, kResidual, kScales, kInputCount };

// The format of the weight, by the element type of values.
const BitmapLayout& LayoutOf(ONNXTensorElementDataType values) {
  if (values == ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16) return kBf16Bitmap;
  return values == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8 ? kInt8Bitmap : kInt4Bitmap;
}

class Kernel {
 public:
  explicit Kernel(const OrtKernelInfo& info) : node_(DescribeNode(info, kOpType)) {
    CheckFormatVersion(info, kFormatVersion, node_);
    const ConstantTensor masks = ConstantInput(info, kMasks, "masks", {ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8}, node_);
    const ConstantTensor values =
        ConstantInput(info, kValues, "values",
                      {ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8,
                       ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8},
                      node_);
    const ConstantTensor offsets =
        ConstantInput(info, kOffsets, "offsets", {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64}, node_);
    // Copied: a file may place them at an odd address.
    offsets_.resize(static_cast<size_t>(offsets.count));
    std::copy_n(static_cast<const char*>(offsets.data), offsets.count * sizeof(int64_t),
                reinterpret_cast<char*>(offsets_.data()));
    layout_ = &LayoutOf(values.type);
    const int64_t weight_bits = IntAttributeOr(info, "weight_bits", layout_->value_bits);
    if (weight_bits != layout_->value_bits) {
      throw OpError(ErrorText(node_, ": weight_bits is ", weight_bits, ", but values '", values.name, "' hold ",
                              layout_->value_bits, "-bit weights. Optimize the original model again."));
    }
    const BitmapClaim claim{IntAttribute(info, "k", node_),
                            IntAttribute(info, "n", node_),
                            static_cast<const uint8_t*>(masks.data),
                            masks.count,
                            values.count,
                            offsets_.data(),
                            offsets.count};
    const std::string problem = ValidateBitmap(claim, *layout_);
    if (!problem.empty()) {
      throw OpError(ErrorText(node_, ": malformed weight in tensors '", masks.name, "', '", values.name, "', '",
                              offsets.name, "': ", problem, ". Optimize the original model again."));
    }
    w_ = claim.View(static_cast<const uint8_t*>(values.data));
    ReadScales(info);
    CheckConstantVector(info, kBias, "bias", w_.n, node_);
    const int64_t activation = IntAttributeOr(info, "activation", 0);
    if (!IsActivation(activation)) {
      throw OpError(ErrorText(node_, ": activation is ", activation,
                              ", expected 0 (none), 1 (ReLU), 2 (GELU by erf), 3 (GELU by tanh) or 4 (SiLU)"));
    }
    activation_ = static_cast<Activation>(activation);
    has_residual_ = HasInput(info, kResidual) && !IsConstantZero(info, kResidual);
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
    int64_t m = 1;
    for (size_t i = 0; i + 1 < shape.size(); ++i) m *= shape[i];
    const float* rows = x.GetTensorData<float>();
    EpilogueArgs epilogue;
    epilogue.n = w_.n;
    epilogue.activation = activation_;
    if (!has_residual_)
      return Product(context, rows, m, context.GetOutput(0, shape).GetTensorMutableData<float>(), epilogue);

    const Ort::ConstValue residual = context.GetInput(kResidual);
    const std::vector<int64_t> residual_shape = residual.GetTensorTypeAndShapeInfo().GetShape();
    const float* to_add = residual.GetTensorData<float>();
    const std::optional<std::vector<int64_t>> sum_shape = BroadcastShape(shape, residual_shape);
    if (!sum_shape) {
      throw OpError(ErrorText(node_, ": residual has shape ", ShapeText(residual_shape), ", which does not fit X W of ",
                              ShapeText(shape), ". Feed the model inputs of the shapes it was exported for."));
    }
    float* y = context.GetOutput(0, *sum_shape).GetTensorMutableData<float>();
    if (std::find(sum_shape->begin(), sum_shape->end(), 0) != sum_shape->end()) return;
    const bool same = residual_shape == shape;
    if (same || residual_shape == std::vector<int64_t>{w_.n}) {
      epilogue.residual = to_add;
      epilogue.residual_row_bytes = same ? RowBytes() : 0;
      return Product(context, rows, m, y, epilogue);
    }
    if (*sum_shape == shape) {
      Product(context, rows, m, y, epilogue);
      return BroadcastAdd(y, shape, to_add, residual_shape, y, shape);
    }
    const Scratch product(context, static_cast<size_t>(m * RowBytes()));
    Product(context, rows, m, static_cast<float*>(product.data()), epilogue);
    BroadcastAdd(static_cast<const float*>(product.data()), shape, to_add, residual_shape, y, *sum_shape);
  }

 private:
  // Work below this many multiply-adds is not worth handing to another thread.
  static constexpr int64_t kMinChunkMacs = int64_t{1} << 19;
  // Expanding a weight costs about this many multiply-adds, once per chunk of rows.
  static constexpr int64_t kExpandMacs = 4;
  static constexpr int64_t kPackChunkFloats = int64_t{1} << 16;

  int64_t RowBytes() const { return w_.n * static_cast<int64_t>(sizeof(float)); }

  void ReadScales(const OrtKernelInfo& info) {
    group_ = IntAttributeOr(info, "group_size", kWholeColumn);
    const bool is_int4 = layout_ == &kInt4Bitmap;
    if (is_int4 ? !IsInt4Group(group_) : group_ != kWholeColumn) {
      throw OpError(ErrorText(node_, ": group_size is ", group_, ", expected ",
                              is_int4 ? "32, 64 or 128 for int4 weights" : "0 for weights that are not int4"));
    }
    const bool is_bf16 = layout_ == &kBf16Bitmap;
    if (is_bf16 && !HasInput(info, kScales)) return;
    const ConstantTensor scales =
        ConstantInput(info, kScales, "scales",
                      {is_int4 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16 : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT}, node_);
    const std::vector<int64_t> expected{BitmapPanels(w_.n), ScaleRows(w_.k, group_), kPanelColumns};
    if (scales.shape != expected) {
      throw OpError(ErrorText(node_, ": scales '", scales.name, "' has shape ", ShapeText(scales.shape), ", expected ",
                              ShapeText(expected), " (panels, groups, columns). Optimize the original model again."));
    }
    scales_ = scales.data;
    if (!is_bf16) return;
    for (int64_t i = 0; i < scales.count; ++i) {
      float scale;
      std::memcpy(&scale, static_cast<const char*>(scales.data) + i * sizeof(scale), sizeof(scale));
      if (scale != 1.0f) {
        throw OpError(ErrorText(node_, ": scales '", scales.name, "' holds ", scale,
                                ", expected 1 everywhere for bf16 weights. Optimize the original model again."));
      }
    }
  }

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

  // y [m, n] = the layer's output for m rows of x; `epilogue` lacks only what a chunk of y adds.
  void Product(const Ort::KernelContext& context, const float* x, int64_t m, float* y,
               const EpilogueArgs& epilogue) const {
    if (m == 0) return;
    const float* bias = Bias(context);
    if (layout_ == &kBf16Bitmap) {
      const SparseMatMulKernel& kernel = SelectSparseMatMul(ActiveIsa(), m);
      SparseMatMulArgs args;
      args.w = w_;
      args.bias = bias;
      Run(context, {x, m, y, kernel.row_block, kernel.PackedBytes(m, w_.k), kernel.PackedRowBytes(w_.k)}, args,
          kernel.multiply, epilogue,
          [&](const float* rows, int64_t count, char* to) { kernel.pack(rows, XRowBytes(), count, w_.k, to); });
    } else {
      const SparseInt8MatMulKernel& kernel = SelectSparseInt8MatMul(ActiveIsa(), m);
      SparseInt8MatMulArgs args;
      args.w = w_;
      args.bias = bias;
      args.group = group_;
      args.scales = scales_;
      Run(context,
          {x, m, y, kernel.row_block, kernel.PackedBytes(m, w_.k, group_), kernel.PackedRowBytes(w_.k, group_)}, args,
          layout_ == &kInt8Bitmap ? kernel.multiply_int8 : kernel.multiply_int4, epilogue,
          [&](const float* rows, int64_t count, char* to) { kernel.pack(rows, XRowBytes(), count, w_.k, group_, to); });
    }
  }

  int64_t XRowBytes() const { return w_.k * static_cast<int64_t>(sizeof(float)); }

  struct Rows {
    const float* x;
    int64_t m;
    float* y;
    int64_t row_block;  // these three are the kernel's
    int64_t packed_bytes;
    int64_t packed_row_bytes;
  };

  // Packs the rows, then multiplies and ends them chunk by chunk. pack(x, rows, to); Args and multiply are those of a
  // kernel.
  template <typename Args, typename Pack>
  void Run(const Ort::KernelContext& context, const Rows& rows, Args args,
           void (*multiply)(const Args&, int64_t panel_begin, int64_t panel_end), const EpilogueArgs& epilogue,
           const Pack& pack) const {
    const Scratch scratch(context, static_cast<size_t>(rows.packed_bytes));
    char* packed = static_cast<char*>(scratch.data());
    const int64_t pack_rows = std::max<int64_t>(1, kPackChunkFloats / (w_.k * rows.row_block)) * rows.row_block;
    ParallelFor(context, (rows.m + pack_rows - 1) / pack_rows, [&](int64_t chunk) {
      const int64_t begin = chunk * pack_rows;
      pack(rows.x + begin * w_.k, std::min(pack_rows, rows.m - begin), packed + begin * rows.packed_row_bytes);
    });

    const bool ends = epilogue.activation != Activation::kNone || epilogue.residual != nullptr;
    EpilogueFn* const end = ends ? SelectEpilogue(ActiveIsa()).run : nullptr;
    const int64_t panels = BitmapPanels(w_.n);
    const int64_t row_chunks = (rows.m + kRowChunk - 1) / kRowChunk;
    const int64_t panel_macs = layout_->PaddedK(w_.k) * kPanelColumns * (kExpandMacs + std::min(rows.m, kRowChunk));
    const int64_t most_chunks = std::clamp<int64_t>(panels * panel_macs / kMinChunkMacs, 1, panels);
    const int64_t chunk_panels = (panels + most_chunks - 1) / most_chunks;
    const int64_t panel_chunks = (panels + chunk_panels - 1) / chunk_panels;
    args.m = rows.m;
    args.x = packed;
    args.y = rows.y;
    args.y_row_bytes = RowBytes();
    ParallelFor(context, row_chunks * panel_chunks, [&](int64_t chunk) {
      const int64_t row = chunk / panel_chunks * kRowChunk;
      const int64_t panel = chunk % panel_chunks * chunk_panels;
      const int64_t panel_end = std::min(panel + chunk_panels, panels);
      const Args part = RowsOf(args, row, kRowChunk, rows.packed_row_bytes);
      multiply(part, panel, panel_end);
      if (end == nullptr) return;
      EpilogueArgs tile = epilogue;
      const int64_t column = panel * kPanelColumns;
      tile.m = part.m;
      tile.n = std::min(panel_end * kPanelColumns, w_.n) - column;
      tile.y = part.y + column;
      tile.y_row_bytes = RowBytes();
      if (tile.residual != nullptr) {
        tile.residual = reinterpret_cast<const float*>(reinterpret_cast<const char*>(tile.residual) +
                                                       row * tile.residual_row_bytes) +
                        column;
      }
      end(tile);
    });
  }

  std::string node_;
  std::string x_name_;
  const BitmapLayout* layout_ = nullptr;
  std::vector<int64_t> offsets_;
  BitmapView w_;
  int64_t group_ = kWholeColumn;
  const void* scales_ = nullptr;
  Activation activation_ = Activation::kNone;
  bool has_residual_ = false;
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
      case kScales:
        return ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;  // one of several: the kernel looks
      case kOffsets:
        return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
      default:
        return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
    }
  }
  ONNXTensorElementDataType GetOutputType(size_t) const { return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; }
  OrtCustomOpInputOutputCharacteristic GetInputCharacteristic(size_t index) const {
    return index >= kBias ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
  }
  static void InferShape(OrtShapeInferContext* context) {
    // Broadcasting with a residual may add dimensions, except where it is one number, which stands for none.
    if (!HasMoreInputs(context, kResidual) || IsOneNumber(context, kResidual)) InferLastDimension(context, "n");
  }
};

}  // namespace

const OrtCustomOp* SparseAMXMatMulOp() {
  static const Op op;
  return &op;
}

}  // namespace ortolan
