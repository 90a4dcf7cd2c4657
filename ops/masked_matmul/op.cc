// ORT adapter of MaskedMatMul. README.md lists inputs, outputs and attributes.
//
//     Y = A' B'        (A' and B': masked_matmul.h)
//
// B of bf16 or int8 is an initializer [k, n] without mask and threshold. b_scale, an initializer, is for int8: its row
// i / group_size scales row i of B; group_size 0 means one row for all. A b_scale of [[1]] and a mask of a single true
// mean the same as an omitted input, because an ONNX function cannot test whether an input is present.
//
// b_finite 1 promises that a computed B contains neither Inf nor NaN, so that few rows of A need not read all of it. An
// initializer is checked when the kernel is created.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>

#include "host/broadcast.h"
#include "isa/kernel_table.h"
#include "masked_matmul/plan.h"
#include "operators.h"
#include "ort/ort_op.h"

namespace ortolan {
namespace {

constexpr const char* kOpType = "MaskedMatMul";
constexpr int64_t kFormatVersion = 1;

enum Input : size_t { kA, kB, kBScale, kAMask, kBMask, kInputCount };

using Shape = std::vector<int64_t>;

// Returns whether no value is Inf or NaN, which have all `exponent` bits set. The values may be unaligned.
template <typename Bits>
bool AllFinite(const char* from, int64_t count, Bits exponent) {
  bool finite = true;
  for (int64_t i = 0; i < count; ++i) {
    Bits bits;
    std::memcpy(&bits, from + i * static_cast<int64_t>(sizeof(bits)), sizeof(bits));
    finite &= (bits & exponent) != exponent;
  }
  return finite;
}

class Kernel {
 public:
  explicit Kernel(const OrtKernelInfo& info) : node_(DescribeNode(info, kOpType)) {
    CheckFormatVersion(info, kFormatVersion, node_);
    a_threshold_ = Threshold(info, "a_threshold");
    b_threshold_ = Threshold(info, "b_threshold");
    KnownB known;
    known.group = IntAttributeOr(info, "group_size", 0);
    if (known.group < 0) throw OpError(ErrorText(node_, ": group_size is ", known.group, ", expected at least 0"));
    known.finite = IntAttributeOr(info, "b_finite", 0) != 0;
    a_ = AlignedConstant<float>(info, kA);
    ReadWeight(info, known);
    const MaskedMatMulKernel& kernel = SelectKernel(MaskedMatMulKernels(), ActiveFeatures());
    plan_ = MaskedMatMulPlan(kernel, ActiveTuning().masked, std::move(known));
    const char* names[] = {"T"};
    const ONNXTensorElementDataType types[] = {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT};
    dense_ =
        Make<&OrtApi::ReleaseOp>(Api(), Api().CreateOp, &info, "MatMul", "", 13, names, types, 1, nullptr, 0, 2, 1);
  }

  void Compute(KernelContext& context, Host& host) {
    CallMemory memory(host);
    const Tensor a = context.Input(kA);
    const Tensor b = context.Input(kB);
    const Shape a_shape = a.Shape();
    const Shape b_shape = b.Shape();
    const ONNXTensorElementDataType b_type = b.Type();
    if (b_type != weight_type_ &&
        !(weight_type_ == ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED && b_type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT)) {
      throw OpError(ErrorText(node_, ": B is neither float nor an initializer, expected one of the two"));
    }
    const Shape y_shape = OutputShape(a_shape, b_shape);
    const int64_t y_count = Count(y_shape, "Y");
    const int64_t a_count = Count(a_shape, "A");
    ProductSize size{a_shape[a_shape.size() - 2], a_shape.back(), b_shape.back()};
    if (size.k > std::numeric_limits<int32_t>::max()) {
      throw OpError(ErrorText(node_, ": A has shape ", ShapeText(a_shape),
                              ", its last dimension is too large, expected less than 2^31"));
    }
    float* y = context.Output<float>(0, y_shape);
    if (y_count == 0) return;
    if (size.k == 0) {
      std::fill_n(y, y_count, 0.0f);
      return;
    }
    const DenseProduct dense = [&](const ProductSize& of, const float* x, const float* weight, float* product) {
      MultiplyDense(context, of, x, weight, product);
    };
    const float* a_data = Masked(context, memory, a_.In(a), a_shape, kAMask, "a_mask", "A", a_threshold_);
    const void* b_data = packed_b_;
    if (b_type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT) {
      b_data = Masked(context, memory, b_.In(b), b_shape, kBMask, "b_mask", "B", b_threshold_);
    } else {
      CheckNoMask(context, kBMask);
    }
    if (b_shape.size() == 2) {
      size.m = a_count / size.k;
      plan_.Run({memory, dense, size, a_data, b_data, y});
      return;
    }
    const Shape batch(y_shape.begin(), y_shape.end() - 2);
    const Shape a_strides = BroadcastStrides(Leading(a_shape), batch);
    const Shape b_strides = BroadcastStrides(Leading(b_shape), batch);
    const int64_t y_size = size.m * size.n;
    for (int64_t i = 0; i < y_count / y_size; ++i) {
      CallMemory of_product(host);
      plan_.Run({of_product, dense, size, a_data + OffsetOf(i, batch, a_strides) * size.m * size.k,
                 static_cast<const float*>(b_data) + OffsetOf(i, batch, b_strides) * size.k * size.n, y + i * y_size});
    }
  }

 private:
  // Returns the element count: 0 if a dimension is 0, whatever the others are.
  int64_t Count(const Shape& shape, const char* name) const {
    if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
    int64_t count = sizeof(float);
    for (const int64_t size : shape) {
      if (__builtin_mul_overflow(count, size, &count)) {
        throw OpError(ErrorText(node_, ": ", name, " has shape ", ShapeText(shape), ", which is too large"));
      }
    }
    return count / static_cast<int64_t>(sizeof(float));
  }

  static Shape Leading(const Shape& shape) { return Shape(shape.begin(), shape.end() - 2); }

  float Threshold(const OrtKernelInfo& info, const char* name) const {
    const float threshold = FloatAttributeOr(info, name, 0.0f);
    if (!(threshold >= 0.0f && threshold <= std::numeric_limits<float>::max())) {
      throw OpError(ErrorText(node_, ": ", name, " is ", threshold, ", expected a finite value of at least 0"));
    }
    return threshold;
  }

  void ReadWeight(const OrtKernelInfo& info, KnownB& known) {
    if (!IsConstant(info, kB)) {
      if (known.group != 0)
        throw OpError(
            ErrorText(node_, ": group_size is ", known.group, ", expected 0 because B is not an initializer"));
      return;
    }
    const ConstantTensor b = ConstantInput(info, kB, "B",
                                           {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16,
                                            ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8},
                                           node_);
    weight_type_ = b.type;
    const bool is_float = b.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
    if (!is_float && b_threshold_ != 0.0f) {
      throw OpError(
          ErrorText(node_, ": b_threshold is ", b_threshold_, ", expected 0 because B '", b.name, "' is not float"));
    }
    if (is_float) b_ = AlignedConstant<float>(b);
    if (b.shape.size() != 2) {
      if (is_float) return;
      throw OpError(ErrorText(node_, ": B '", b.name, "' has shape ", ShapeText(b.shape), ", expected [k, n]"));
    }
    const int64_t k = b.shape[0];
    const int64_t n = b.shape[1];
    if (!is_float)
      known.element_type = b.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8 ? ElementType::kInt8 : ElementType::kBf16;
    if (b.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8) {
      packed_b_ = b.data;
      return ReadScales(info, k, n, known);
    }
    if (!is_float) packed_b_ = (bf16_b_ = AlignedConstant<uint16_t>(b)).data();
    if (known.group != 0)
      throw OpError(ErrorText(node_, ": group_size is ", known.group, ", expected 0 because B is not int8"));
    const int64_t row_bytes = n * (is_float ? 4 : 2);
    for (int64_t i = 0; i < k; ++i) {
      const char* row = static_cast<const char*>(b.data) + i * row_bytes;
      if (is_float ? AllFinite<uint32_t>(row, n, 0x7f800000) : AllFinite<uint16_t>(row, n, 0x7f80)) continue;
      known.always.resize(static_cast<size_t>(k));
      known.always[static_cast<size_t>(i)] = 1;
    }
    known.finite = true;  // except for the rows that are never skipped
  }

  void ReadScales(const OrtKernelInfo& info, int64_t k, int64_t n, KnownB& known) {
    const ConstantTensor scales = ConstantInput(info, kBScale, "b_scale", {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT}, node_);
    const Shape expected{known.group == 0 ? 1 : k / known.group + (k % known.group != 0 ? 1 : 0), n};
    CheckShape(scales, "b_scale", expected, node_, " (groups, n)");
    scales_ = AlignedConstant<float>(scales);
    known.scales = scales_.data();
    if (!std::all_of(known.scales, known.scales + scales.count, [](float scale) { return std::isfinite(scale); })) {
      throw OpError(ErrorText(node_, ": b_scale '", scales.name, "' contains Inf or NaN, expected finite values"));
    }
  }

  Shape OutputShape(const Shape& a, const Shape& b) const {
    const auto refuse = [&](const char* expected) {
      throw OpError(ErrorText(node_, ": A has shape ", ShapeText(a), " and B ", ShapeText(b), ", expected ", expected));
    };
    if (a.size() < 2 || b.size() < 2) refuse("at least two dimensions of each");
    if (a.back() != b[b.size() - 2]) refuse("[..., m, k] and [..., k, n]");
    std::optional<Shape> y = BroadcastShape(Leading(a), Leading(b));
    if (!y) refuse("leading dimensions that broadcast");
    y->insert(y->end(), {a[a.size() - 2], b.back()});
    return *y;
  }

  // Read as bytes: a file may hold any byte, but a bool must be 0 or 1.
  static const uint8_t* BytesOf(const Tensor& mask) { return mask.Data<uint8_t>(); }

  static bool IsOneTrue(const Tensor& mask) { return mask.Count() == 1 && *BytesOf(mask) != 0; }

  void CheckNoMask(const KernelContext& context, size_t index) const {
    const Tensor mask = context.Input(index);
    if (mask && !IsOneTrue(mask)) throw OpError(ErrorText(node_, ": b_mask requires a floating-point B; remove it"));
  }

  // Returns the matrix with masked and small elements set to zero: x itself, or a copy.
  const float* Masked(const KernelContext& context, CallMemory& memory, const float* x, const Shape& shape,
                      size_t index, const char* mask_name, const char* x_name, float threshold) const {
    Tensor mask = context.Input(index);
    Shape strides;
    if (mask) {
      const Shape mask_shape = mask.Shape();
      if (BroadcastShape(shape, mask_shape) != shape) {
        throw OpError(ErrorText(node_, ": ", mask_name, " has shape ", ShapeText(mask_shape),
                                ", expected a shape that broadcasts to ", x_name, "'s, ", ShapeText(shape)));
      }
      if (IsOneTrue(mask)) mask = Tensor();
      strides = BroadcastStrides(mask_shape, shape);
    }
    if (!mask && threshold == 0.0f) return x;
    return MaskedCopy(memory, x, shape, threshold, mask ? BytesOf(mask) : nullptr, strides);
  }

  void MultiplyDense(const KernelContext& context, const ProductSize& size, const float* a, const float* b, float* y) {
    const auto [m, k, n] = size;
    const OrtApi& ort = Api();
    const auto cpu = Make<&OrtApi::ReleaseMemoryInfo>(ort, ort.CreateCpuMemoryInfo, OrtDeviceAllocator, OrtMemTypeCPU);
    const auto tensor = [&](const float* data, int64_t rows, int64_t columns) {
      const int64_t shape[] = {rows, columns};
      return Make<&OrtApi::ReleaseValue>(ort, ort.CreateTensorWithDataAsOrtValue, cpu.get(), const_cast<float*>(data),
                                         static_cast<size_t>(rows * columns) * sizeof(float), shape, 2,
                                         ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT);
    };
    const auto left = tensor(a, m, k), right = tensor(b, k, n), answer = tensor(y, m, n);
    const OrtValue* const given[] = {left.get(), right.get()};
    OrtValue* const answers[] = {answer.get()};
    Check(ort, ort.InvokeOp(context.get(), dense_.get(), given, 2, answers, 1));
  }

  std::string node_;
  float a_threshold_ = 0.0f;
  float b_threshold_ = 0.0f;
  ONNXTensorElementDataType weight_type_ = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;  // of an initializer B
  AlignedConstant<float> a_, b_, scales_;                                            // if they are constants
  AlignedConstant<uint16_t> bf16_b_;
  const void* packed_b_ = nullptr;  // B if it is int8 or bf16
  MaskedMatMulPlan plan_;
  Owned<&OrtApi::ReleaseOp> dense_;
};

struct Op : OrtOp<Op, Kernel> {
  const char* GetName() const { return kOpType; }
  size_t GetInputTypeCount() const { return kInputCount; }
  size_t GetOutputTypeCount() const { return 1; }
  ONNXTensorElementDataType GetInputType(size_t index) const {
    if (index == kB) return ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;  // one of several types; the kernel checks
    if (index >= kAMask) return ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL;
    return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  }
  ONNXTensorElementDataType GetOutputType(size_t) const { return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; }
  OrtCustomOpInputOutputCharacteristic GetInputCharacteristic(size_t index) const {
    return index >= kBScale ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
  }
  static void InferShape(OrtShapeInferContext* context) {
    const int64_t n = LastDimension(context, kB);
    if (Rank(context, kB) == 2 && n > 0) CopyShape(context, n);
  }
};

}  // namespace

const OrtCustomOp* MaskedMatMulOp() {
  static const Op op;
  return &op;
}

}  // namespace ortolan
