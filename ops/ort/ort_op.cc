#include "ort/ort_op.h"

#include <algorithm>
#include <utility>

namespace ortolan {
namespace {

std::string TypeName(ONNXTensorElementDataType type) {
  constexpr std::pair<ONNXTensorElementDataType, const char*> kNames[] = {
      {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, "float"},      {ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8, "uint8"},
      {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8, "int8"},        {ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16, "uint16"},
      {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16, "int16"},      {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32, "int32"},
      {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, "int64"},      {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, "float16"},
      {ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16, "bfloat16"}};
  for (const auto& [named, name] : kNames) {
    if (named == type) return name;
  }
  return "of another element type";
}

}  // namespace

std::string DescribeNode(const OrtKernelInfo& info, const char* op_type) {
  return ErrorText(op_type, " node '", Ort::ConstKernelInfo(&info).GetNodeName(), "'");
}

bool HasInput(const OrtKernelInfo& info, size_t index) {
  const Ort::ConstKernelInfo kernel_info(&info);
  return index < kernel_info.GetInputCount() && !kernel_info.GetInputName(index).empty();
}

ConstantTensor ConstantOrNone(const OrtKernelInfo& info, size_t index) {
  ConstantTensor tensor;
  if (!HasInput(info, index)) return tensor;
  const Ort::ConstKernelInfo kernel_info(&info);
  tensor.name = kernel_info.GetInputName(index);
  int is_constant = 0;
  const Ort::ConstValue value = kernel_info.GetTensorConstantInput(index, &is_constant);
  if (is_constant == 0) return tensor;
  const Ort::TensorTypeAndShapeInfo type_and_shape = value.GetTensorTypeAndShapeInfo();
  tensor.type = type_and_shape.GetElementType();
  tensor.shape = type_and_shape.GetShape();
  tensor.count = static_cast<int64_t>(type_and_shape.GetElementCount());
  tensor.data = value.GetTensorRawData();
  return tensor;
}

ConstantTensor ConstantInput(const OrtKernelInfo& info, size_t index, const char* meaning,
                             std::initializer_list<ONNXTensorElementDataType> types, const std::string& node) {
  if (!HasInput(info, index)) throw OpError(ErrorText(node, ": input ", index, " (", meaning, ") is missing"));
  ConstantTensor tensor = ConstantOrNone(info, index);
  if (tensor.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED) {
    throw OpError(ErrorText(node, ": input ", index, " (", meaning, ") '", tensor.name,
                            "' is computed at run time, expected an initializer"));
  }
  if (std::find(types.begin(), types.end(), tensor.type) == types.end()) {
    std::string expected;
    for (const ONNXTensorElementDataType type : types) expected += (expected.empty() ? "" : " or ") + TypeName(type);
    throw OpError(
        ErrorText(node, ": ", meaning, " '", tensor.name, "' is ", TypeName(tensor.type), ", expected ", expected));
  }
  return tensor;
}

bool IsEmptyConstant(const OrtKernelInfo& info, size_t index) {
  const ConstantTensor tensor = ConstantOrNone(info, index);
  return tensor.type != ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED && tensor.count == 0;
}

bool IsConstantZero(const OrtKernelInfo& info, size_t index) {
  const ConstantTensor tensor = ConstantOrNone(info, index);
  if (tensor.shape.size() > 1 || tensor.count != 1) return false;
  if (tensor.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT) return ScalarIn<float>(tensor) == 0.0f;
  if (tensor.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16) return ScalarIn<uint16_t>(tensor) == 0;
  const bool is_byte =
      tensor.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8 || tensor.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8;
  return is_byte && ScalarIn<uint8_t>(tensor) == 0;
}

bool IsConstant(const OrtKernelInfo& info, size_t index) {
  return ConstantOrNone(info, index).type != ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
}

void CheckShape(const ConstantTensor& tensor, const char* meaning, const std::vector<int64_t>& expected,
                const std::string& node, const char* axes) {
  if (tensor.shape == expected) return;
  throw OpError(ErrorText(node, ": ", meaning, " '", tensor.name, "' has shape ", ShapeText(tensor.shape),
                          ", expected ", ShapeText(expected), axes, ". ", kOptimizeAgain));
}

void CheckWeight(std::initializer_list<const ConstantTensor*> tensors, const std::string& problem,
                 const std::string& node) {
  if (problem.empty()) return;
  std::string names;
  for (const ConstantTensor* tensor : tensors) names += (names.empty() ? "'" : ", '") + tensor->name + "'";
  throw OpError(ErrorText(node, ": malformed weight in tensors ", names, ": ", problem, ". ", kOptimizeAgain));
}

int64_t IntAttribute(const OrtKernelInfo& info, const char* name, const std::string& node) {
  int64_t value = 0;
  const Ort::Status status(Ort::GetApi().KernelInfoGetAttribute_int64(&info, name, &value));
  if (!status.IsOK()) throw OpError(ErrorText(node, ": the integer attribute '", name, "' is missing"));
  return value;
}

int64_t IntAttributeOr(const OrtKernelInfo& info, const char* name, int64_t missing) {
  int64_t value = 0;
  const Ort::Status status(Ort::GetApi().KernelInfoGetAttribute_int64(&info, name, &value));
  return status.IsOK() ? value : missing;
}

float FloatAttributeOr(const OrtKernelInfo& info, const char* name, float missing) {
  float value = 0;
  const Ort::Status status(Ort::GetApi().KernelInfoGetAttribute_float(&info, name, &value));
  return status.IsOK() ? value : missing;
}

void CheckFormatVersion(const OrtKernelInfo& info, int64_t expected, const std::string& node) {
  const int64_t found = IntAttribute(info, "format_version", node);
  if (found != expected) {
    throw OpError(ErrorText(node, ": format_version is ", found, ", this library reads ", expected,
                            ". Upgrade ortolan, or optimize the original model again."));
  }
}

bool HasMoreInputs(const OrtShapeInferContext* context, size_t count) {
  size_t found = 0;
  Ort::ThrowOnError(Ort::GetApi().ShapeInferContext_GetInputCount(context, &found));
  return found > count;
}

namespace {

// A tensor during shape inference. Without dimensions, its rank is unknown or the tensor is missing.
struct KnownTensor {
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  std::vector<int64_t> dimensions;
  std::vector<const char*> names;  // of the dimensions
};

KnownTensor KnownInput(const OrtShapeInferContext* context, size_t index) {
  KnownTensor known;
  if (!HasMoreInputs(context, index)) return known;
  const OrtApi& api = Ort::GetApi();
  OrtTensorTypeAndShapeInfo* input = nullptr;
  const Ort::Status status(api.ShapeInferContext_GetInputTypeShape(context, index, &input));  // owned by the context
  if (!status.IsOK() || input == nullptr) return known;
  Ort::ThrowOnError(api.GetTensorElementType(input, &known.type));
  size_t rank = 0;
  Ort::ThrowOnError(api.GetDimensionsCount(input, &rank));
  if (rank == 0) return known;  // how ONNX Runtime reports an unknown rank
  known.dimensions.resize(rank);
  known.names.resize(rank);
  Ort::ThrowOnError(api.GetDimensions(input, known.dimensions.data(), rank));
  Ort::ThrowOnError(api.GetSymbolicDimensions(input, known.names.data(), rank));
  return known;
}

// Leave the output's shape unknown if a dimension has neither value nor name.
void SetOutput(OrtShapeInferContext* context, KnownTensor output) {
  const size_t rank = output.dimensions.size();
  if (rank == 0) return;
  for (size_t i = 0; i < rank; ++i) {
    if (output.names[i] == nullptr) output.names[i] = "";
    if (output.dimensions[i] < 0 && *output.names[i] == '\0') return;
  }
  const OrtApi& api = Ort::GetApi();
  OrtTensorTypeAndShapeInfo* raw = nullptr;
  Ort::ThrowOnError(api.CreateTensorTypeAndShapeInfo(&raw));
  const Ort::TensorTypeAndShapeInfo info(raw);
  Ort::ThrowOnError(api.SetDimensions(raw, output.dimensions.data(), rank));
  Ort::ThrowOnError(api.SetSymbolicDimensions(raw, output.names.data(), rank));
  Ort::ThrowOnError(api.SetTensorElementType(raw, output.type));
  Ort::ThrowOnError(api.ShapeInferContext_SetOutputTypeShape(context, 0, raw));
}

}  // namespace

size_t Rank(const OrtShapeInferContext* context, size_t index) { return KnownInput(context, index).dimensions.size(); }

bool HasOneElement(const OrtShapeInferContext* context, size_t index) {
  return KnownInput(context, index).dimensions == std::vector<int64_t>{1};
}

int64_t LastDimension(const OrtShapeInferContext* context, size_t index) {
  const KnownTensor input = KnownInput(context, index);
  return input.dimensions.empty() ? -1 : input.dimensions.back();
}

int64_t ShapeAttributeOr(const OrtShapeInferContext* context, const char* name, int64_t missing) {
  const OrtApi& api = Ort::GetApi();
  const OrtOpAttr* attribute = nullptr;
  const Ort::Status has_attribute(api.ShapeInferContext_GetAttribute(context, name, &attribute));
  if (!has_attribute.IsOK()) return missing;
  int64_t value = 0;
  size_t size = 0;
  Ort::ThrowOnError(api.ReadOpAttr(attribute, ORT_OP_ATTR_INT, &value, sizeof(value), &size));
  return value;
}

bool InferLastDimension(OrtShapeInferContext* context, const char* attribute) {
  const int64_t last = ShapeAttributeOr(context, attribute, 0);
  if (last == 0) return false;
  CopyShape(context, last);
  return true;
}

void CopyShape(OrtShapeInferContext* context, int64_t last) {
  KnownTensor output = KnownInput(context, 0);
  if (output.dimensions.empty()) return;
  output.type = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  output.dimensions.back() = last;
  output.names.back() = "";
  SetOutput(context, std::move(output));
}

void InferSameShape(OrtShapeInferContext* context, size_t type_from) {
  KnownTensor output = KnownInput(context, 0);
  output.type = KnownInput(context, type_from).type;
  SetOutput(context, std::move(output));
}

void OrtHost::RunTasks(int64_t count, Task* task, const void* user) {
  struct Call {
    Task* task;
    const void* user;
  } call{task, user};
  const auto run = [](void* of, size_t i) {
    const Call& all = *static_cast<const Call*>(of);
    all.task(all.user, static_cast<int64_t>(i));
  };
  context_.ParallelFor(run, static_cast<size_t>(count), 0, &call);
}

void* OrtHost::Allocate(size_t bytes) {
  OrtAllocator* const allocator = memory_.Allocator(context_);
  void* const data = allocator->Alloc(allocator, bytes);
  if (data == nullptr) throw std::bad_alloc();
  return data;
}

void OrtHost::Free(void* data) noexcept {
  OrtAllocator* const allocator = memory_.Allocator(context_);
  allocator->Free(allocator, data);
}

KernelMemory::~KernelMemory() {
  if (OrtAllocator* const allocator = allocator_.load()) Ort::GetApi().ReleaseAllocator(allocator);
}

OrtAllocator* KernelMemory::Allocator(const Ort::KernelContext& context) {
  OrtAllocator* held = allocator_.load();
  if (held != nullptr) return held;
  const Ort::MemoryInfo cpu = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  OrtAllocator* const found = context.GetAllocator(*cpu);
  if (allocator_.compare_exchange_strong(held, found)) return found;
  Ort::GetApi().ReleaseAllocator(found);  // another call was faster
  return held;
}

}  // namespace ortolan
