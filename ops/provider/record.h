// Records of compiled models, field by field. A step describes its fields once, in a function template over an archive:
// RecordWriter writes them, RecordReader reads and checks them.
#pragma once

#include <cmath>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "provider/call_values.h"
#include "provider/context_file.h"

namespace ortolan::provider {

class RecordWriter {
 public:
  explicit RecordWriter(ContextWriter& writer) : writer_(writer) {}

  void Int(int64_t number) { writer_.Int(number); }
  void Int(int64_t number, int64_t, int64_t, const char*) { writer_.Int(number); }
  template <typename Enum>
  void Choice(Enum choice, int64_t, const char*) {
    writer_.Int(static_cast<int64_t>(choice));
  }
  void Flag(bool flag) { writer_.Flag(flag); }
  void Float(float number, const char* = nullptr) { writer_.Float(number); }
  void String(const std::string& text) { writer_.String(text); }
  void Floats(std::span<const float> values) { writer_.Array(values); }
  template <typename... Elements>
  void Arrays(std::span<const Elements>... arrays) {
    (writer_.Array(arrays), ...);
  }
  void Tensor(const FloatTensor& tensor, const char*) { WriteTensor(writer_, tensor); }
  // Write the index of an input or output of the EPContext node, or -1.
  void Input(const std::optional<size_t>& slot, ElementType = ElementType::kFloat, bool = false) {
    writer_.Int(slot ? static_cast<int64_t>(*slot) : -1);
  }
  void Output(const std::optional<size_t>& slot, bool = false) { Input(slot); }
  // Write the count, then each item.
  template <typename Items, typename Each>
  void List(const Items& items, size_t, const char*, const Each& each) {
    writer_.Int(static_cast<int64_t>(items.size()));
    for (auto& item : items) each(item);
  }
  template <typename Item, typename Each>
  void Optional(const std::optional<Item>& item, const Each& each) {
    writer_.Flag(item.has_value());
    if (item) each(*item);
  }
  // Write an object that has its own function for it.
  template <typename Item>
  void Object(const std::optional<Item>& item) {
    item->Write(writer_);
  }

 private:
  ContextWriter& writer_;
};

// The nodes of a record's inputs and outputs. A record has indices of the EPContext node; ONNX Runtime fuses that node
// into another one, whose order may differ.
struct IoSlots {
  const Node& node;
  const Node& fused;
};

// All functions throw OpError if the data is invalid; `what` names the field.
class RecordReader {
 public:
  RecordReader(ContextReader& reader, const IoSlots& slots) : reader_(reader), slots_(&slots) {}
  // For records without inputs and outputs.
  explicit RecordReader(ContextReader& reader) : reader_(reader) {}

  void Int(int64_t& number) { number = reader_.Int(); }
  void Int(int64_t& number, int64_t least, int64_t most, const char* what);
  template <typename Enum>
  void Choice(Enum& choice, int64_t count, const char* what) {
    int64_t number = 0;
    Int(number, 0, count - 1, what);
    choice = static_cast<Enum>(number);
  }
  void Flag(bool& flag) { flag = reader_.Flag(); }
  // what: null if the step itself checks the number.
  void Float(float& number, const char* what = nullptr);
  void String(std::string& text) { text = reader_.String(); }
  void Floats(std::span<const float>& values) { values = reader_.Array<float>(); }
  template <typename... Elements>
  void Arrays(std::span<const Elements>&... arrays) {
    ((arrays = reader_.Array<Elements>()), ...);
  }
  void Tensor(FloatTensor& tensor, const char* what) { tensor = ReadTensor(reader_, what); }
  // Convert to the index of the fused node. The type must be the step's, because steps do not convert types; is_exact:
  // a float value must not be float16.
  void Input(std::optional<size_t>& slot, ElementType type = ElementType::kFloat, bool is_exact = false);
  void Input(size_t& slot);
  // The slot is nullopt if no node reads the output.
  void Output(std::optional<size_t>& slot, bool is_exact = false);
  template <typename Items, typename Each>
  void List(Items& items, size_t most, const char* what, const Each& each) {
    int64_t count = 0;
    Int(count, 0, static_cast<int64_t>(most), what);
    items.resize(static_cast<size_t>(count));
    for (auto& item : items) each(item);
  }
  template <typename Item, typename Each>
  void Optional(std::optional<Item>& item, const Each& each) {
    if (reader_.Flag()) each(item.emplace());
  }
  template <typename Item>
  void Object(std::optional<Item>& item) {
    item.emplace(reader_);
  }

 private:
  ContextReader& reader_;
  const IoSlots* slots_ = nullptr;
};

}  // namespace ortolan::provider
