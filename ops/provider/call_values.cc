#include "provider/call_values.h"

#include <memory>

namespace ortolan::provider {

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

size_t PlaceOf(const HostApi& host, const std::vector<Value>& values, Value value) {
  const std::string name = NameOf(host, value);
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i] != nullptr && NameOf(host, values[i]) == name) return i;
  }
  throw OpError(ErrorText("value '", name, "' is no input or output of the node that ONNX Runtime made of its group"));
}

}  // namespace ortolan::provider
