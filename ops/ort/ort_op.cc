#include "ort/ort_op.h"

#include <algorithm>
#include <atomic>
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

std::atomic<const OrtApi*> api{nullptr};

// Call a function of the API that writes a text and its size.
template <typename Function, typename... Args>
std::string Text(Function* function, Args... args) {
  size_t size = 0;
  Check(Api(), function(args..., nullptr, &size));
  std::string text(size, '\0');
  Check(Api(), function(args..., text.data(), &size));
  text.resize(size - 1);  // the terminating 0
  return text;
}

// Return whether a call succeeded.
bool IsOk(OrtStatus* status) {
  if (status != nullptr) Api().ReleaseStatus(status);
  return status == nullptr;
}

}  // namespace

const OrtApi& Api() { return *api.load(std::memory_order_relaxed); }
void SetApi(const OrtApi& found) { api.store(&found, std::memory_order_relaxed); }

int64_t Tensor::Count() const {
  const OrtApi& ort = Api();
  const auto info = Make<&OrtApi::ReleaseTensorTypeAndShapeInfo>(ort, ort.GetTensorTypeAndShape, value_);
  return static_cast<int64_t>(Get<size_t>(ort, ort.GetTensorShapeElementCount, info.get()));
}

Tensor KernelContext::Input(size_t index) const {
  const OrtApi& ort = Api();
  if (index >= Get<size_t>(ort, ort.KernelContext_GetInputCount, context_)) return Tensor();
  return Tensor(Get<const OrtValue*>(ort, ort.KernelContext_GetInput, context_, index));
}

void* KernelContext::OutputData(size_t index, const std::vector<int64_t>& shape) {
  const OrtApi& ort = Api();
  OrtValue* const output =
      Get<OrtValue*>(ort, ort.KernelContext_GetOutput, context_, index, shape.data(), shape.size());
  return Get<void*>(ort, ort.GetTensorMutableData, output);
}

std::string DescribeNode(const OrtKernelInfo& info, const char* op_type) {
  return ErrorText(op_type, " node '", Text(Api().KernelInfo_GetNodeName, &info), "'");
}

std::string InputName(const OrtKernelInfo& info, size_t index) {
  if (index >= Get<size_t>(Api(), Api().KernelInfo_GetInputCount, &info)) return "";
  return Text(Api().KernelInfo_GetInputName, &info, index);
}

std::string OutputName(const OrtKernelInfo& info, size_t index) {
  if (index >= Get<size_t>(Api(), Api().KernelInfo_GetOutputCount, &info)) return "";
  return Text(Api().KernelInfo_GetOutputName, &info, index);
}

ONNXTensorElementDataType InputType(const OrtKernelInfo& info, size_t index) {
  const OrtApi& ort = Api();
  const auto type = Make<&OrtApi::ReleaseTypeInfo>(ort, ort.KernelInfo_GetInputTypeInfo, &info, index);
  const auto* const tensor = Get<const OrtTensorTypeAndShapeInfo*>(ort, ort.CastTypeInfoToTensorInfo, type.get());
  return Get<ONNXTensorElementDataType>(ort, ort.GetTensorElementType, tensor);
}

ConstantTensor ConstantOrNone(const OrtKernelInfo& info, size_t index) {
  ConstantTensor tensor;
  if (!HasInput(info, index)) return tensor;
  tensor.name = InputName(info, index);
  int is_constant = 0;
  const OrtValue* raw = nullptr;
  Check(Api(), Api().KernelInfoGetConstantInput_tensor(&info, index, &is_constant, &raw));
  if (is_constant == 0) return tensor;
  const Tensor value(raw);
  tensor.type = value.Type();
  tensor.shape = value.Shape();
  tensor.count = value.Count();
  tensor.data = value.Data();
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
  if (!IsOk(Api().KernelInfoGetAttribute_int64(&info, name, &value)))
    throw OpError(ErrorText(node, ": the integer attribute '", name, "' is missing"));
  return value;
}

int64_t IntAttributeOr(const OrtKernelInfo& info, const char* name, int64_t missing) {
  int64_t value = 0;
  return IsOk(Api().KernelInfoGetAttribute_int64(&info, name, &value)) ? value : missing;
}

float FloatAttributeOr(const OrtKernelInfo& info, const char* name, float missing) {
  float value = 0;
  return IsOk(Api().KernelInfoGetAttribute_float(&info, name, &value)) ? value : missing;
}

std::string StringAttributeOr(const OrtKernelInfo& info, const char* name, const std::string& missing) {
  size_t size = 0;  // with the terminating zero
  if (!IsOk(Api().KernelInfoGetAttribute_string(&info, name, nullptr, &size)) || size == 0) return missing;
  std::string value(size, '\0');
  Check(Api(), Api().KernelInfoGetAttribute_string(&info, name, value.data(), &size));
  value.resize(size - 1);
  return value;
}

std::vector<float> FloatsAttributeOr(const OrtKernelInfo& info, const char* name, const std::vector<float>& missing) {
  size_t size = 0;
  if (!IsOk(Api().KernelInfoGetAttributeArray_float(&info, name, nullptr, &size))) return missing;
  std::vector<float> values(size);
  if (size != 0) Check(Api(), Api().KernelInfoGetAttributeArray_float(&info, name, values.data(), &size));
  return values;
}

void CheckFormatVersion(const OrtKernelInfo& info, int64_t expected, const std::string& node) {
  const int64_t found = IntAttribute(info, "format_version", node);
  if (found != expected) {
    throw OpError(ErrorText(node, ": format_version is ", found, ", this library reads ", expected,
                            ". Upgrade ortolan, or optimize the original model again."));
  }
}

bool HasMoreInputs(const OrtShapeInferContext* context, size_t count) {
  return Get<size_t>(Api(), Api().ShapeInferContext_GetInputCount, context) > count;
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
  const OrtApi& ort = Api();
  OrtTensorTypeAndShapeInfo* input = nullptr;  // owned by the context
  if (!IsOk(ort.ShapeInferContext_GetInputTypeShape(context, index, &input)) || input == nullptr) return known;
  known.type = Get<ONNXTensorElementDataType>(ort, ort.GetTensorElementType, input);
  known.dimensions = DimensionsOf(ort, *input);
  known.names.resize(known.dimensions.size());
  if (known.names.empty()) return known;  // how ONNX Runtime reports an unknown rank
  Check(ort, ort.GetSymbolicDimensions(input, known.names.data(), known.names.size()));
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
  const OrtApi& ort = Api();
  const auto info = Make<&OrtApi::ReleaseTensorTypeAndShapeInfo>(ort, ort.CreateTensorTypeAndShapeInfo);
  Check(ort, ort.SetDimensions(info.get(), output.dimensions.data(), rank));
  Check(ort, ort.SetSymbolicDimensions(info.get(), output.names.data(), rank));
  Check(ort, ort.SetTensorElementType(info.get(), output.type));
  Check(ort, ort.ShapeInferContext_SetOutputTypeShape(context, 0, info.get()));
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
  const OrtOpAttr* attribute = nullptr;
  if (!IsOk(Api().ShapeInferContext_GetAttribute(context, name, &attribute))) return missing;
  int64_t value = 0;
  size_t size = 0;
  Check(Api(), Api().ReadOpAttr(attribute, ORT_OP_ATTR_INT, &value, sizeof(value), &size));
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

}  // namespace ortolan
