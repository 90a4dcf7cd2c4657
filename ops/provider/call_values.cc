#include "provider/call_values.h"

#include <memory>
#include <new>

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

int64_t Product(int64_t a, int64_t b) {
  int64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) throw std::bad_alloc();
  return product;
}

int64_t CountOf(const Shape& shape) {
  int64_t count = 1;
  for (const int64_t size : shape) count = Product(count, size);
  return count;
}

char* CallMemory::Bytes(int64_t count) {
  if (count > INT64_MAX - kScratchAlignment) throw std::bad_alloc();
  return pieces_.emplace_back(host_, count).data();
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
