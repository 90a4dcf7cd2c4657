// Inputs, outputs and temporary memory of a call of a claimed node.
#pragma once

#include <cstring>
#include <deque>
#include <optional>

#include "host/host.h"
#include "provider/ort_graph.h"

namespace ortolan::provider {

template <typename Element>
struct InputTensor {
  const Element* data = nullptr;
  Shape shape;
};
using FloatInput = InputTensor<float>;

// Read an input whose element type is known to be Element.
template <typename Element = float>
InputTensor<Element> ReadInput(const OrtApi& ort, const OrtKernelContext& context, size_t index) {
  const OrtValue* value = nullptr;
  Check(ort, ort.KernelContext_GetInput(&context, index, &value));
  const void* data = nullptr;
  Check(ort, ort.GetTensorData(value, &data));
  return {static_cast<const Element*>(data), ShapeOf(ort, *value)};
}

// Multiply sizes, which must not be negative. Throws std::bad_alloc if the product overflows int64.
int64_t Product(int64_t a, int64_t b);
int64_t CountOf(const Shape& shape);

// Temporary memory, released at the end of a call.
class CallMemory {
 public:
  explicit CallMemory(Host& host) : host_(host) {}

  Host& host() const { return host_; }
  // Throw std::bad_alloc.
  char* Bytes(int64_t count);
  float* Floats(int64_t count) { return reinterpret_cast<float*>(Bytes(Product(count, sizeof(float)))); }
  // Return the input, or an aligned copy of it if its address is not aligned. Initializers may have any address.
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

// Read a float32 or float16 input as float32. Its address need not be aligned.
FloatInput ReadFloats(const OrtApi& ort, const OrtKernelContext& context, size_t index, CallMemory& memory);

// A float32 or float16 output. It is computed as float32.
class FloatOutput {
 public:
  FloatOutput(const OrtApi& ort, OrtKernelContext& context, size_t index, const Shape& shape, CallMemory& memory);
  float* data() const { return data_; }
  // Convert the values to float16 if the output has that type. Call it after all values are computed.
  void Finish() const;

 private:
  Host& host_;
  float* data_ = nullptr;
  uint16_t* halves_ = nullptr;  // null if the output is float32; data_ then points to the output
  int64_t count_ = 0;
};

float* MakeOutput(const OrtApi& ort, OrtKernelContext& context, size_t index, const Shape& shape);

// Return the index of a group's value among the inputs or outputs of the fused node. OutputSlot returns nullopt if no
// node reads the value.
size_t InputSlot(const Node& fused, Value value);
std::optional<size_t> OutputSlot(const Node& fused, Value value);

}  // namespace ortolan::provider
