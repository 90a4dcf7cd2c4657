// Records of compiled models, field by field. A step describes its fields once, in a function template over an archive:
// RecordWriter writes them, RecordReader reads and checks them.
#pragma once

#include <cmath>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "provider/context_file.h"
#include "provider/io_slots.h"

namespace ortolan::provider {

class RecordWriter {
 public:
  explicit RecordWriter(ContextWriter& writer) : writer_(writer) {}

  void Int(int64_t number, int64_t, int64_t, const char*) { writer_.Int(number); }
  template <typename Enum>
  void Choice(Enum choice, int64_t, const char*) {
    writer_.Int(static_cast<int64_t>(choice));
  }
  void Flag(bool flag) { writer_.Flag(flag); }
  void Float(float number, const char*) { writer_.Float(number); }
  void String(const std::string& text) { writer_.String(text); }
  void Floats(std::span<const float> values) { writer_.Array(values); }
  void Tensor(const FloatTensor& tensor, const char*) { WriteTensor(writer_, tensor); }
  void Input(const std::optional<size_t>& slot, ElementType, bool = false) { WriteSlot(writer_, slot); }
  void Output(const std::optional<size_t>& slot, bool = false) { WriteSlot(writer_, slot); }
  // Write the count, then each item.
  template <typename Items, typename Each>
  void List(const Items& items, size_t, const char*, const Each& each) {
    writer_.Int(static_cast<int64_t>(items.size()));
    for (auto& item : items) each(item);
  }

 private:
  ContextWriter& writer_;
};

// All functions throw OpError if the data is invalid; `what` names the field.
class RecordReader {
 public:
  RecordReader(ContextReader& reader, const IoSlots& slots) : reader_(reader), slots_(slots) {}

  void Int(int64_t& number, int64_t least, int64_t most, const char* what) {
    number = reader_.Int();
    if (number >= least && number <= most) return;
    throw OpError(ErrorText(what, " is ", number, ", expected ", least, " to ", most));
  }
  template <typename Enum>
  void Choice(Enum& choice, int64_t count, const char* what) {
    int64_t number = 0;
    Int(number, 0, count - 1, what);
    choice = static_cast<Enum>(number);
  }
  void Flag(bool& flag) { flag = reader_.Flag(); }
  void Float(float& number, const char* what) {
    number = reader_.Float();
    if (std::isnan(number)) throw OpError(ErrorText(what, " is NaN"));
  }
  void String(std::string& text) { text = reader_.String(); }
  void Floats(std::span<const float>& values) { values = reader_.Array<float>(); }
  void Tensor(FloatTensor& tensor, const char* what) { tensor = ReadTensor(reader_, what); }
  void Input(std::optional<size_t>& slot, ElementType type, bool is_exact = false) {
    const Value value = slots_.InputValue(reader_, type, is_exact);
    slot = value == nullptr ? std::nullopt : std::optional(slots_.SlotOf(value));
  }
  void Output(std::optional<size_t>& slot, bool is_exact = false) { slot = slots_.Output(reader_, is_exact); }
  template <typename Items, typename Each>
  void List(Items& items, size_t most, const char* what, const Each& each) {
    int64_t count = 0;
    Int(count, 0, static_cast<int64_t>(most), what);
    items.resize(static_cast<size_t>(count));
    for (auto& item : items) each(item);
  }

 private:
  ContextReader& reader_;
  const IoSlots& slots_;
};

}  // namespace ortolan::provider
