#include "support/ort_op.h"

namespace ortolan {

std::string DescribeNode(const OrtKernelInfo& info, const char* op_type) {
  return ErrorText(op_type, " node '", Ort::ConstKernelInfo(&info).GetNodeName(), "'");
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return text + "]";
}

ConstantTensor ConstantInput(const OrtKernelInfo& info, size_t index, const char* meaning,
                             ONNXTensorElementDataType type, const std::string& node) {
  const Ort::ConstKernelInfo kernel_info(&info);
  if (index >= kernel_info.GetInputCount())
    throw OpError(ErrorText(node, ": input ", index, " (", meaning, ") is missing"));
  ConstantTensor tensor;
  tensor.name = kernel_info.GetInputName(index);
  int is_constant = 0;
  const Ort::ConstValue value = kernel_info.GetTensorConstantInput(index, &is_constant);
  if (is_constant == 0) {
    throw OpError(ErrorText(node, ": input ", index, " (", meaning, ") '", tensor.name,
                            "' is computed at run time, expected an initializer"));
  }
  const Ort::TensorTypeAndShapeInfo type_and_shape = value.GetTensorTypeAndShapeInfo();
  if (type_and_shape.GetElementType() != type) {
    throw OpError(ErrorText(node, ": ", meaning, " '", tensor.name, "' has ONNX element type ",
                            type_and_shape.GetElementType(), ", expected ", type));
  }
  tensor.shape = type_and_shape.GetShape();
  tensor.count = static_cast<int64_t>(type_and_shape.GetElementCount());
  tensor.data = value.GetTensorRawData();
  return tensor;
}

int64_t IntAttribute(const OrtKernelInfo& info, const char* name, const std::string& node) {
  int64_t value = 0;
  const Ort::Status status(Ort::GetApi().KernelInfoGetAttribute_int64(&info, name, &value));
  if (!status.IsOK()) throw OpError(ErrorText(node, ": the integer attribute '", name, "' is missing"));
  return value;
}

void InferLastDimension(OrtShapeInferContext* context, const char* attribute) {
  const OrtApi& api = Ort::GetApi();
  OrtTensorTypeAndShapeInfo* input = nullptr;
  Ort::ThrowOnError(api.ShapeInferContext_GetInputTypeShape(context, 0, &input));  // owned by the context
  size_t rank = 0;
  Ort::ThrowOnError(api.GetDimensionsCount(input, &rank));
  if (rank == 0) return;  // ORT's way of saying that the rank is unknown
  std::vector<int64_t> dimensions(rank);
  std::vector<const char*> names(rank);
  Ort::ThrowOnError(api.GetDimensions(input, dimensions.data(), rank));
  Ort::ThrowOnError(api.GetSymbolicDimensions(input, names.data(), rank));

  const OrtOpAttr* attribute_handle = nullptr;
  Ort::ThrowOnError(api.ShapeInferContext_GetAttribute(context, attribute, &attribute_handle));
  int64_t last = 0;
  size_t size = 0;
  Ort::ThrowOnError(api.ReadOpAttr(attribute_handle, ORT_OP_ATTR_INT, &last, sizeof(last), &size));
  dimensions[rank - 1] = last;
  names[rank - 1] = "";
  for (size_t i = 0; i < rank; ++i) {
    const bool named = names[i] != nullptr && *names[i] != '\0';
    if (!named) names[i] = "";
    if (dimensions[i] < 0 && !named) return;
  }

  OrtTensorTypeAndShapeInfo* raw = nullptr;
  Ort::ThrowOnError(api.CreateTensorTypeAndShapeInfo(&raw));
  const Ort::TensorTypeAndShapeInfo output(raw);
  Ort::ThrowOnError(api.SetDimensions(raw, dimensions.data(), rank));
  Ort::ThrowOnError(api.SetSymbolicDimensions(raw, names.data(), rank));
  Ort::ThrowOnError(api.ShapeInferContext_SetOutputTypeShape(context, 0, raw));
}

Scratch::Scratch(const Ort::KernelContext& context, size_t bytes) {
  const Ort::MemoryInfo cpu = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  allocator_ = context.GetAllocator(*cpu);
  data_ = allocator_->Alloc(allocator_, bytes);
  if (data_ == nullptr && bytes > 0) throw std::bad_alloc();
}

Scratch::~Scratch() { allocator_->Free(allocator_, data_); }

}  // namespace ortolan
