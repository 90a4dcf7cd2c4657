#include "provider/record.h"

namespace ortolan::provider {
namespace {

Value Find(const std::vector<Value>& values, int64_t index, ElementType type, bool is_exact) {
  const bool is_there = index >= 0 && index < static_cast<int64_t>(values.size());
  const Value value = is_there ? values[static_cast<size_t>(index)] : nullptr;
  if (value == nullptr) {
    throw OpError(ErrorText("input/output index ", index, " out of range (", values.size(), " available)"));
  }
  if (value->type != type && (is_exact || type != ElementType::kFloat || !IsFloatType(value->type))) {
    throw OpError(ErrorText("its value '", value->name, "' has another type than its step expects"));
  }
  return value;
}

}  // namespace

void RecordReader::Int(int64_t& number, int64_t least, int64_t most, const char* what) {
  number = reader_.Int();
  if (number >= least && number <= most) return;
  throw OpError(ErrorText(what, " is ", number, ", expected ", least, " to ", most));
}

void RecordReader::Float(float& number, const char* what) {
  number = reader_.Float();
  if (what != nullptr && std::isnan(number)) throw OpError(ErrorText(what, " is NaN"));
}

void RecordReader::Input(std::optional<size_t>& slot, ElementType type, bool is_exact) {
  const int64_t index = reader_.Int();
  if (index == -1) return slot.reset();
  slot = InputSlot(slots_->fused, Find(slots_->node.inputs(), index, type, is_exact));
}

void RecordReader::Input(size_t& slot) {
  slot = InputSlot(slots_->fused, Find(slots_->node.inputs(), reader_.Int(), ElementType::kFloat, false));
}

void RecordReader::Output(std::optional<size_t>& slot, bool is_exact) {
  const int64_t index = reader_.Int();
  if (index == -1) return slot.reset();
  slot = OutputSlot(slots_->fused, Find(slots_->node.outputs(), index, ElementType::kFloat, is_exact));
}

}  // namespace ortolan::provider
