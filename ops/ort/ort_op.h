// The common base of all ONNX Runtime adapters; only this file uses ONNX Runtime's custom-op interface. An operator
// defines
//
//     class FooKernel { explicit FooKernel(const OrtKernelInfo&); void Compute(KernelContext&, Host&); };
//     struct FooOp : OrtOp<FooOp, FooKernel> {
//       GetName, GetInputTypeCount, GetInputType, …, static void InferShape(OrtShapeInferContext*)
//     };
//
// and reports errors by throwing OpError (or anything derived from std::exception). No exception crosses the C
// boundary.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "ort/ort_api.h"

namespace ortolan {

inline constexpr const char* kDomain = "ai.ortolan";

// The operators run on every host that has this API: ONNX Runtime 1.17 and later. They call no newer function
// (tests/provider/test_headers.py) and set no newer member of OrtCustomOp.
inline constexpr uint32_t kOperatorApi = 17;

// The last sentence of errors about nodes that no pass of this version writes.
inline constexpr const char* kOptimizeAgain = "Optimize the original model again.";

// The host's functions of version kOperatorApi.
const OrtApi& Api();
void SetApi(const OrtApi& api);

// A tensor of the host; false if an optional input is missing.
class Tensor {
 public:
  explicit Tensor(const OrtValue* value = nullptr) : value_(value) {}
  explicit operator bool() const { return value_ != nullptr; }
  std::vector<int64_t> Shape() const { return ShapeOf(Api(), *value_); }
  ONNXTensorElementDataType Type() const { return ElementTypeOf(Api(), *value_); }
  int64_t Count() const;  // elements; 0 if a dimension is 0, whatever the others are
  template <typename T = void>
  const T* Data() const {
    return static_cast<const T*>(Get<void*>(Api(), Api().GetTensorMutableData, const_cast<OrtValue*>(value_)));
  }

 private:
  const OrtValue* value_;
};

// The inputs and outputs of a call.
class KernelContext {
 public:
  explicit KernelContext(OrtKernelContext* context) : context_(context) {}
  OrtKernelContext* get() const { return context_; }
  // Missing if the input is omitted.
  Tensor Input(size_t index) const;
  template <typename T = char>
  T* Output(size_t index, const std::vector<int64_t>& shape) {
    return static_cast<T*>(OutputData(index, shape));
  }

 private:
  void* OutputData(size_t index, const std::vector<int64_t>& shape);

  OrtKernelContext* context_;
};

template <typename Op, typename Kernel>
struct OrtOp : OrtCustomOp {
  OrtOp() : OrtCustomOp{} {
    OrtCustomOp::version = kOperatorApi;
    OrtCustomOp::GetName = [](const OrtCustomOp* op) { return Self(op).GetName(); };
    OrtCustomOp::GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };  // CPU
    OrtCustomOp::GetInputTypeCount = [](const OrtCustomOp* op) { return Self(op).GetInputTypeCount(); };
    OrtCustomOp::GetInputType = [](const OrtCustomOp* op, size_t index) { return Self(op).GetInputType(index); };
    OrtCustomOp::GetInputMemoryType = [](const OrtCustomOp*, size_t) { return OrtMemTypeDefault; };
    OrtCustomOp::GetInputCharacteristic = [](const OrtCustomOp* op, size_t index) {
      return Self(op).GetInputCharacteristic(index);
    };
    OrtCustomOp::GetOutputTypeCount = [](const OrtCustomOp* op) { return Self(op).GetOutputTypeCount(); };
    OrtCustomOp::GetOutputType = [](const OrtCustomOp* op, size_t index) { return Self(op).GetOutputType(index); };
    OrtCustomOp::GetOutputCharacteristic = [](const OrtCustomOp* op, size_t index) {
      return Self(op).GetOutputCharacteristic(index);
    };
    OrtCustomOp::GetStartVersion = [](const OrtCustomOp*) { return 1; };
    OrtCustomOp::GetEndVersion = [](const OrtCustomOp*) { return std::numeric_limits<int>::max(); };
    OrtCustomOp::InferOutputShapeFn = [](const OrtCustomOp*, OrtShapeInferContext* context) {
      return Guarded(Api(), [&] { Op::InferShape(context); });
    };
    OrtCustomOp::CreateKernelV2 = [](const OrtCustomOp*, const OrtApi*, const OrtKernelInfo* info, void** kernel) {
      return Guarded(Api(), [&] { *kernel = new KernelInArena{Kernel(*info)}; });
    };
    OrtCustomOp::KernelComputeV2 = [](void* raw, OrtKernelContext* raw_context) {
      return Guarded(Api(), [&] {
        auto& [kernel, arena] = *static_cast<KernelInArena*>(raw);
        KernelContext context(raw_context);
        SessionHost host(Api(), *raw_context, arena);
        kernel.Compute(context, host);
      });
    };
    OrtCustomOp::KernelDestroy = [](void* kernel) { delete static_cast<KernelInArena*>(kernel); };
  }

  OrtCustomOpInputOutputCharacteristic GetInputCharacteristic(size_t) const { return INPUT_OUTPUT_REQUIRED; }
  OrtCustomOpInputOutputCharacteristic GetOutputCharacteristic(size_t) const { return INPUT_OUTPUT_REQUIRED; }

 private:
  struct KernelInArena {
    Kernel kernel;
    Arena arena{Api()};
  };
  static const Op& Self(const OrtCustomOp* op) { return *static_cast<const Op*>(op); }
};

// ---- kernel creation ------------------------------------------------------------------------------------------------

// "SparseAMXMatMul node 'encoder/…/MatMul'": the start of every error message.
std::string DescribeNode(const OrtKernelInfo& info, const char* op_type);

// Return the name of an input or output; "" if the node omits it.
std::string InputName(const OrtKernelInfo& info, size_t index);
std::string OutputName(const OrtKernelInfo& info, size_t index);

// Return the element type of a tensor input, as the graph declares it.
ONNXTensorElementDataType InputType(const OrtKernelInfo& info, size_t index);

// A constant input at its place in memory; with external data, in the mapped file or where the caller holds it.
struct ConstantTensor {
  std::string name;
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  std::vector<int64_t> shape;
  const void* data = nullptr;
  int64_t count = 0;  // elements
};

// Return whether the node has this input. Optional inputs may be left out, at the end or by an empty name.
inline bool HasInput(const OrtKernelInfo& info, size_t index) { return !InputName(info, index).empty(); }

// Return the input if it is constant, else a tensor of undefined type.
ConstantTensor ConstantOrNone(const OrtKernelInfo& info, size_t index);

// Return whether the input is constant.
bool IsConstant(const OrtKernelInfo& info, size_t index);

// Return a constant input. Throws OpError if it is missing, not constant, or of another element type.
ConstantTensor ConstantInput(const OrtKernelInfo& info, size_t index, const char* meaning,
                             std::initializer_list<ONNXTensorElementDataType> types, const std::string& node);

// Throw OpError, naming the tensor, if it has another shape. axes: for example " (rows, columns)", added to the
// message.
void CheckShape(const ConstantTensor& tensor, const char* meaning, const std::vector<int64_t>& expected,
                const std::string& node, const char* axes = "");

// Throw OpError, naming the tensors, if `problem` (the result of a format's Validate function) is not empty.
void CheckWeight(std::initializer_list<const ConstantTensor*> tensors, const std::string& problem,
                 const std::string& node);

// The value of a tensor of one element, at any address.
template <typename T>
T ScalarIn(const ConstantTensor& tensor) {
  T value;
  std::memcpy(&value, tensor.data, sizeof(value));
  return value;
}

// The elements of a constant tensor, aligned for T: the tensor's own memory, or a copy if a model file stores it
// unaligned.
template <typename T>
class AlignedConstant {
 public:
  AlignedConstant() = default;
  explicit AlignedConstant(const ConstantTensor& tensor) : data_(static_cast<const T*>(tensor.data)) {
    if (reinterpret_cast<uintptr_t>(tensor.data) % alignof(T) == 0) return;
    copy_.reset(new T[static_cast<size_t>(tensor.count)]);
    std::memcpy(copy_.get(), tensor.data, static_cast<size_t>(tensor.count) * sizeof(T));
    data_ = copy_.get();
  }
  // Reads an input with elements T. Empty if the input is missing or computed at run time.
  AlignedConstant(const OrtKernelInfo& info, size_t index) : AlignedConstant(ConstantOrNone(info, index)) {}
  const T* data() const { return data_; }  // null if empty
  // The elements of the input in a call, constant or computed.
  const T* In(const Tensor& input) const { return data_ == nullptr ? input.Data<T>() : data_; }

 private:
  std::unique_ptr<T[]> copy_;
  const T* data_ = nullptr;
};

// Return whether the input is a constant scalar, or vector of one element, that is 0 (float, float16, u8 or i8): it
// replaces a missing summand. (A 0 with more dimensions would still change the shape of the sum.)
bool IsConstantZero(const OrtKernelInfo& info, size_t index);

// Return whether the input is a constant without elements, which replaces a missing input.
bool IsEmptyConstant(const OrtKernelInfo& info, size_t index);

// Throws OpError if the attribute is missing.
int64_t IntAttribute(const OrtKernelInfo& info, const char* name, const std::string& node);

// Return the attribute, or `missing` if the node lacks it.
int64_t IntAttributeOr(const OrtKernelInfo& info, const char* name, int64_t missing);
float FloatAttributeOr(const OrtKernelInfo& info, const char* name, float missing);
std::string StringAttributeOr(const OrtKernelInfo& info, const char* name, const std::string& missing);
std::vector<float> FloatsAttributeOr(const OrtKernelInfo& info, const char* name, const std::vector<float>& missing);

// Throw OpError unless the attribute format_version is the one this operator reads. (ONNX Runtime does not tell a
// kernel which version of the domain the model imports.)
void CheckFormatVersion(const OrtKernelInfo& info, int64_t expected, const std::string& node);

// ---- shape inference ------------------------------------------------------------------------------------------------

// Give output 0 the shape of input 0 with its last dimension replaced by an attribute; return false if that is missing
// or 0. The output's shape stays unknown if a dimension of the input has neither value nor name: passed on, its -1
// would be taken literally.
bool InferLastDimension(OrtShapeInferContext* context, const char* attribute);

// Give output 0 the shape of input 0, unknown under the same condition, and the element type of another input.
void InferSameShape(OrtShapeInferContext* context, size_t type_from);
// Give output 0 the shape of input 0 with another last dimension; unknown under the same condition.
void CopyShape(OrtShapeInferContext* context, int64_t last);

// Return the last dimension of an input, or -1 if it is unknown.
int64_t LastDimension(const OrtShapeInferContext* context, size_t index);

// Return the node's integer attribute, or `missing` if it has none.
int64_t ShapeAttributeOr(const OrtShapeInferContext* context, const char* name, int64_t missing);

// Return whether the node has more than `count` inputs, counting those with an empty name.
bool HasMoreInputs(const OrtShapeInferContext* context, size_t count);

// Return the rank of an input; 0 if it is unknown or the input is missing.
size_t Rank(const OrtShapeInferContext* context, size_t index);

// Return whether the input is known to have the shape [1].
bool HasOneElement(const OrtShapeInferContext* context, size_t index);

}  // namespace ortolan
