// What a claimed node reads and makes when it runs.
#pragma once

#include <cstring>
#include <deque>
#include <optional>

#include "host/host.h"
#include "provider/node.h"

namespace ortolan::provider {

template <typename Element>
struct InputTensor {
  const Element* data = nullptr;
  Shape shape;
};
using FloatInput = InputTensor<float>;

Shape ShapeOf(const OrtApi& ort, const OrtValue& value);
ONNXTensorElementDataType ElementTypeOf(const OrtApi& ort, const OrtValue& value);

// Of an input whose type is known.
template <typename Element = float>
InputTensor<Element> ReadInput(const OrtApi& ort, const OrtKernelContext& context, size_t index) {
  const OrtValue* value = nullptr;
  Check(ort, ort.KernelContext_GetInput(&context, index, &value));
  const void* data = nullptr;
  Check(ort, ort.GetTensorData(value, &data));
  return {static_cast<const Element*>(data), ShapeOf(ort, *value)};
}

// Of sizes that are not negative. Throw std::bad_alloc if the product is no int64.
int64_t Product(int64_t a, int64_t b);
int64_t CountOf(const Shape& shape);

// Memory as long as a call.
class CallMemory {
 public:
  explicit CallMemory(Host& host) : host_(host) {}

  Host& host() const { return host_; }
  // Throw std::bad_alloc.
  char* Bytes(int64_t count);
  float* Floats(int64_t count) { return reinterpret_cast<float*>(Bytes(Product(count, sizeof(float)))); }
  // The same numbers, copied if they do not lie as C++ wants it: those of an initializer may have any address.
  template <typename Element>
  InputTensor<Element> AlignedInput(const InputTensor<Element>& input) {
    if (reinterpret_cast<uintptr_t>(input.data) % alignof(Element) == 0) return input;
    const int64_t bytes = Product(CountOf(input.shape), sizeof(Element));
    char* const copy = Bytes(bytes);
    std::memcpy(copy, static_cast<const void*>(input.data), static_cast<size_t>(bytes));
    return {reinterpret_cast<const Element*>(copy), input.shape};
  }

 private:
  Host& host_;
  std::deque<HostMemory> pieces_;
};

// An input of float32 or float16, as float32; it may have any address, as an initializer's numbers do.
FloatInput ReadFloats(const OrtApi& ort, const OrtKernelContext& context, size_t index, CallMemory& memory);

// An output of float32 or float16, which is computed as float32.
class FloatOutput {
 public:
  FloatOutput(const OrtApi& ort, OrtKernelContext& context, size_t index, const Shape& shape, CallMemory& memory);
  float* data() const { return data_; }
  // Rounds to float16 where the output has that type. To be called when all numbers are computed.
  void Finish() const;

 private:
  Host& host_;
  float* data_ = nullptr;
  uint16_t* halves_ = nullptr;  // null: the output is float32, and data_ is its memory
  int64_t count_ = 0;
};

float* MakeOutput(const OrtApi& ort, OrtKernelContext& context, size_t index, const Shape& shape);

// The places of a value of the group among those of the node that ONNX Runtime made of it. No output: nobody reads it.
size_t InputSlot(const HostApi& host, const Node& fused, Value value);
std::optional<size_t> OutputSlot(const HostApi& host, const Node& fused, Value value);

}  // namespace ortolan::provider
