// What a claimed node reads and makes when it runs.
#pragma once

#include <optional>

#include "provider/node.h"

namespace ortolan::provider {

template <typename Number>
struct InputNumbers {
  const Number* data = nullptr;
  Shape shape;
};
using FloatInput = InputNumbers<float>;

Shape ShapeOf(const OrtApi& ort, const OrtValue& value);

// Of an input whose type is known.
template <typename Number = float>
InputNumbers<Number> ReadInput(const OrtApi& ort, const OrtKernelContext& context, size_t index) {
  const OrtValue* value = nullptr;
  Check(ort, ort.KernelContext_GetInput(&context, index, &value));
  const void* data = nullptr;
  Check(ort, ort.GetTensorData(value, &data));
  return {static_cast<const Number*>(data), ShapeOf(ort, *value)};
}

float* MakeOutput(const OrtApi& ort, OrtKernelContext& context, size_t index, const Shape& shape);

// The places of a value of the group among those of the node that ONNX Runtime made of it. No output: nobody reads it.
size_t InputPlace(const HostApi& host, const Node& fused, Value value);
std::optional<size_t> OutputPlace(const HostApi& host, const Node& fused, Value value);

}  // namespace ortolan::provider
