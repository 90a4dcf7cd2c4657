#include "provider/places.h"

namespace ortolan::provider {
namespace {

constexpr int64_t kNone = -1;
constexpr auto kFloat = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;

}  // namespace

void WritePlace(ContextWriter& writer, std::optional<size_t> place) {
  writer.Number(place ? static_cast<int64_t>(*place) : kNone);
}

Value Places::Find(const std::vector<Value>& values, int64_t index, ONNXTensorElementDataType type) const {
  const bool is_there = index >= 0 && index < static_cast<int64_t>(values.size());
  const Value value = is_there ? values[static_cast<size_t>(index)] : nullptr;
  if (value == nullptr) {
    throw OpError(ErrorText("a step is of input or output ", index, ", and there are ", values.size()));
  }
  const ONNXTensorElementDataType found = TypeOf(host_, value);
  if (found != type && !(type == kFloat && IsFloatType(found))) {
    throw OpError(ErrorText("its value '", NameOf(host_, value), "' has another type than its steps have"));
  }
  return value;
}

size_t Places::Input(ContextReader& reader) const { return PlaceOf(Find(node_.inputs(), reader.Number(), kFloat)); }

std::optional<size_t> Places::InputOrNone(ContextReader& reader) const {
  const Value value = InputValue(reader, kFloat);
  if (value == nullptr) return std::nullopt;
  return PlaceOf(value);
}

std::optional<size_t> Places::Output(ContextReader& reader) const {
  const int64_t index = reader.Number();
  if (index == kNone) return std::nullopt;
  return OutputPlace(host_, fused_, Find(node_.outputs(), index, kFloat));
}

Value Places::InputValue(ContextReader& reader, ONNXTensorElementDataType type) const {
  const int64_t index = reader.Number();
  return index == kNone ? nullptr : Find(node_.inputs(), index, type);
}

}  // namespace ortolan::provider
