// Maps inputs and outputs in a compiled model's record to those of the fused node. A record (context_file.h) has
// indices of the EPContext node's inputs and outputs, or -1. ONNX Runtime fuses that node into another one, whose order
// may differ.
#pragma once

#include <optional>

#include "provider/call_values.h"
#include "provider/context_file.h"

namespace ortolan::provider {

void WriteSlot(ContextWriter& writer, std::optional<size_t> slot);

class IoSlots {
 public:
  IoSlots(const Node& node, const Node& fused) : node_(node), fused_(fused) {}

  // These functions read an index from the record. They throw OpError if the index is invalid or if the value's type is
  // not the step's, because steps do not convert types.
  size_t Input(ContextReader& reader) const;
  std::optional<size_t> InputOrNone(ContextReader& reader) const;
  // Return nullopt if no node reads the output. is_exact: a float value must not be float16.
  std::optional<size_t> Output(ContextReader& reader, bool is_exact = false) const;
  // Return null if the record has no input there.
  Value InputValue(ContextReader& reader, ElementType type, bool is_exact = false) const;

  size_t SlotOf(Value input) const { return InputSlot(fused_, input); }

 private:
  Value Find(const std::vector<Value>& values, int64_t index, ElementType type, bool is_exact = false) const;

  const Node& node_;
  const Node& fused_;
};

}  // namespace ortolan::provider
