#include "provider/call_values.h"

#include <memory>

namespace ortolan::provider {
namespace {

std::optional<size_t> FindPlace(const HostApi& host, const std::vector<Value>& values, Value value) {
  const std::string name = NameOf(host, value);
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i] != nullptr && NameOf(host, values[i]) == name) return i;
  }
  return std::nullopt;
}

}  // namespace

Shape ShapeOf(const OrtApi& ort, const OrtValue& value) {
  OrtTensorTypeAndShapeInfo* info = nullptr;
  Check(ort, ort.GetTensorTypeAndShape(&value, &info));
  const std::unique_ptr<OrtTensorTypeAndShapeInfo, decltype(ort.ReleaseTensorTypeAndShapeInfo)> held(
      info, ort.ReleaseTensorTypeAndShapeInfo);
  return DimensionsOf(ort, *info);
}

float* MakeOutput(const OrtApi& ort, OrtKernelContext& context, size_t index, const Shape& shape) {
  OrtValue* value = nullptr;
  Check(ort, ort.KernelContext_GetOutput(&context, index, shape.data(), shape.size(), &value));
  void* data = nullptr;
  Check(ort, ort.GetTensorMutableData(value, &data));
  return static_cast<float*>(data);
}

size_t InputPlace(const HostApi& host, const Node& fused, Value value) {
  const std::optional<size_t> place = FindPlace(host, fused.inputs(), value);
  if (place) return *place;
  throw OpError(
      ErrorText("value '", NameOf(host, value), "' is no input of the node that ONNX Runtime made of its group"));
}

std::optional<size_t> OutputPlace(const HostApi& host, const Node& fused, Value value) {
  return FindPlace(host, fused.outputs(), value);
}

}  // namespace ortolan::provider
