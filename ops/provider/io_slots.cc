#include "provider/io_slots.h"

namespace ortolan::provider {
namespace {

constexpr int64_t kNone = -1;
constexpr auto kFloat = ElementType::kFloat;

}  // namespace

void WriteSlot(ContextWriter& writer, std::optional<size_t> slot) {
  writer.Int(slot ? static_cast<int64_t>(*slot) : kNone);
}

Value IoSlots::Find(const std::vector<Value>& values, int64_t index, ElementType type, bool is_exact) const {
  const bool is_there = index >= 0 && index < static_cast<int64_t>(values.size());
  const Value value = is_there ? values[static_cast<size_t>(index)] : nullptr;
  if (value == nullptr) {
    throw OpError(ErrorText("input/output index ", index, " out of range (", values.size(), " available)"));
  }
  const ElementType found = value->type;
  if (found != type && (is_exact || type != kFloat || !IsFloatType(found))) {
    throw OpError(ErrorText("its value '", value->name, "' has another type than its step expects"));
  }
  return value;
}

size_t IoSlots::Input(ContextReader& reader) const { return SlotOf(Find(node_.inputs(), reader.Int(), kFloat)); }

std::optional<size_t> IoSlots::InputOrNone(ContextReader& reader) const {
  const Value value = InputValue(reader, kFloat);
  if (value == nullptr) return std::nullopt;
  return SlotOf(value);
}

std::optional<size_t> IoSlots::Output(ContextReader& reader, bool is_exact) const {
  const int64_t index = reader.Int();
  if (index == kNone) return std::nullopt;
  return OutputSlot(fused_, Find(node_.outputs(), index, kFloat, is_exact));
}

Value IoSlots::InputValue(ContextReader& reader, ElementType type, bool is_exact) const {
  const int64_t index = reader.Int();
  return index == kNone ? nullptr : Find(node_.inputs(), index, type, is_exact);
}

}  // namespace ortolan::provider
