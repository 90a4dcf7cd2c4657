#include "provider/call_values.h"

#include <algorithm>
#include <new>

#include "formats/float16.h"

namespace ortolan::provider {
namespace {

std::optional<size_t> FindSlot(const std::vector<Value>& values, Value value) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i] != nullptr && values[i]->name == value->name) return i;
  }
  return std::nullopt;
}

// Elements per task in a conversion between float16 and float32.
constexpr int64_t kChunk = 1 << 15;

template <typename Body>
void ForEachChunk(Host& host, int64_t count, const Body& body) {
  host.ParallelFor((count + kChunk - 1) / kChunk, [&](int64_t chunk) {
    const int64_t first = chunk * kChunk;
    body(first, std::min(count, first + kChunk));
  });
}

// Return an output of this shape and its data.
std::pair<OrtValue*, void*> Output(const OrtApi& ort, OrtKernelContext& context, size_t index, const Shape& shape) {
  OrtValue* value = nullptr;
  Check(ort, ort.KernelContext_GetOutput(&context, index, shape.data(), shape.size(), &value));
  void* data = nullptr;
  Check(ort, ort.GetTensorMutableData(value, &data));
  return {value, data};
}

}  // namespace

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

FloatInput ReadFloats(const OrtApi& ort, const OrtKernelContext& context, size_t index, CallMemory& memory) {
  const OrtValue* value = nullptr;
  Check(ort, ort.KernelContext_GetInput(&context, index, &value));
  if (ElementTypeOf(ort, *value) != ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16) return ReadInput(ort, context, index);
  const InputTensor<uint16_t> input = memory.AlignedInput(ReadInput<uint16_t>(ort, context, index));
  const int64_t count = CountOf(input.shape);
  float* const floats = memory.Floats(count);
  ForEachChunk(memory.host(), count, [&](int64_t first, int64_t end) {
    std::transform(input.data + first, input.data + end, floats + first, HalfToFloat);
  });
  return {floats, input.shape};
}

FloatOutput::FloatOutput(const OrtApi& ort, OrtKernelContext& context, size_t index, const Shape& shape,
                         CallMemory& memory)
    : host_(memory.host()) {
  const auto [value, data] = Output(ort, context, index, shape);
  if (ElementTypeOf(ort, *value) != ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16) {
    data_ = static_cast<float*>(data);
    return;
  }
  halves_ = static_cast<uint16_t*>(data);
  count_ = CountOf(shape);
  data_ = memory.Floats(count_);
}

void FloatOutput::Finish() const {
  if (halves_ == nullptr) return;
  ForEachChunk(host_, count_, [&](int64_t first, int64_t end) {
    std::transform(data_ + first, data_ + end, halves_ + first, FloatToHalf);
  });
}

float* MakeOutput(const OrtApi& ort, OrtKernelContext& context, size_t index, const Shape& shape) {
  return static_cast<float*>(Output(ort, context, index, shape).second);
}

size_t InputSlot(const Node& fused, Value value) {
  const std::optional<size_t> slot = FindSlot(fused.inputs(), value);
  if (slot) return *slot;
  throw OpError(
      ErrorText("value '", value->name, "' is not an input of the node into which ONNX Runtime fused its group"));
}

std::optional<size_t> OutputSlot(const Node& fused, Value value) { return FindSlot(fused.outputs(), value); }

}  // namespace ortolan::provider
