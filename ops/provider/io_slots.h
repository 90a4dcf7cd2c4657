// Where the steps of a compiled model's node find what they read and make: a record (context_file.h) has the numbers of
// inputs and outputs of the EPContext node, -1 for none, and ONNX Runtime has made another node of that.
#pragma once

#include <optional>

#include "provider/call_values.h"
#include "provider/context_file.h"

namespace ortolan::provider {

void WriteSlot(ContextWriter& writer, std::optional<size_t> slot);

class IoSlots {
 public:
  IoSlots(const HostApi& host, const Node& node, const Node& fused) : host_(host), node_(node), fused_(fused) {}

  // All of these read a number. They throw OpError if there is no such value, or it is of another type than the step
  // has: steps read and make numbers as they are.
  size_t Input(ContextReader& reader) const;
  std::optional<size_t> InputOrNone(ContextReader& reader) const;
  // None: nobody reads it.
  std::optional<size_t> Output(ContextReader& reader) const;
  // Null: none.
  Value InputValue(ContextReader& reader, ONNXTensorElementDataType type) const;

  size_t SlotOf(Value input) const { return InputSlot(host_, fused_, input); }

 private:
  Value Find(const std::vector<Value>& values, int64_t index, ONNXTensorElementDataType type) const;

  const HostApi& host_;
  const Node& node_;
  const Node& fused_;
};

}  // namespace ortolan::provider
