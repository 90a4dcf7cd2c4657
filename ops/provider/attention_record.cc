#include "provider/attention_record.h"

#include <cmath>

namespace ortolan::provider {
namespace {

constexpr auto kFloat = ElementType::kFloat;
constexpr auto kInt64 = ElementType::kInt64;
constexpr auto kBool = ElementType::kBool;
constexpr auto kInt32 = ElementType::kInt32;

// Kinds of masks.
constexpr int64_t kAdded = 0, kCondition = 1, kPadding = 2;

class Writer {
 public:
  Writer(const std::unordered_map<Value, size_t>& inputs, ContextWriter& writer) : inputs_(inputs), writer_(writer) {}

  void Write(const Attention& attention) {
    writer_.Int(attention.heads);
    writer_.Int(attention.head_dim);
    writer_.Float(attention.scale);
    writer_.Flag(attention.causal);
    writer_.Flag(attention.zero_hidden_rows);
    WriteInput(attention.zero_rows);
    for (const Target& split : attention.splits) WriteTarget(split);
    writer_.Int(Count(attention.key_views));
    for (const Target& view : attention.key_views) WriteTarget(view);
    WriteTarget(attention.merge);
    writer_.Int(Count(attention.masks));
    for (const Mask& mask : attention.masks) WriteMask(mask);
  }

 private:
  template <typename Item>
  static int64_t Count(const std::vector<Item>& items) {
    return static_cast<int64_t>(items.size());
  }

  void WriteInput(Value value) {
    WriteSlot(writer_, value == nullptr ? std::nullopt : std::optional(inputs_.at(value)));
  }

  void WriteTarget(const Target& target) {
    writer_.Flag(target.copies);
    writer_.Int(Count(target.sizes));
    for (const Size& size : target.sizes) {
      writer_.Int(static_cast<int64_t>(size.kind));
      writer_.Int(size.number);
      WriteInput(size.value);
    }
  }

  void WriteMask(const Mask& mask) {
    writer_.Int(mask.is_padding ? kPadding : mask.is_condition ? kCondition : kAdded);
    WriteInput(mask.value);
    writer_.Flag(mask.hides);
    writer_.Float(mask.fill);
    writer_.Flag(mask.is_truncated);
    if (mask.value == nullptr) WriteTensor(writer_, {mask.shape, mask.values});
  }

  const std::unordered_map<Value, size_t>& inputs_;
  ContextWriter& writer_;
};

class Reader {
 public:
  Reader(ContextReader& reader, const IoSlots& slots) : reader_(reader), slots_(slots) {}

  Attention Read(int64_t width) {
    Attention attention;
    attention.heads = reader_.Int();
    attention.head_dim = reader_.Int();
    const int64_t heads = attention.heads, head_dim = attention.head_dim;
    const bool are_known = heads > 0 && heads <= width && width % heads == 0 && head_dim == width / heads;
    if (!are_known && (heads != 0 || head_dim != 0)) {
      throw OpError(ErrorText("attention of ", width, " columns has ", heads, " heads of ", head_dim));
    }
    attention.scale = reader_.Float();
    if (!std::isfinite(attention.scale))
      throw OpError(ErrorText("the scale of the scores is not finite: ", attention.scale));
    attention.causal = reader_.Flag();
    attention.zero_hidden_rows = reader_.Flag();
    attention.zero_rows = slots_.InputValue(reader_, kBool);
    for (Target& split : attention.splits) split = ReadTarget();
    const int64_t views = Count("views of keys");
    if (views != 0 && views != 2)
      throw OpError(ErrorText("there are ", views, " Reshapes of transposed keys, expected 0 or 2"));
    for (int64_t i = 0; i < views; ++i) attention.key_views.push_back(ReadTarget());
    attention.merge = ReadTarget();
    const int64_t masks = Count("masks");
    if (masks > kMostScoreSteps) throw OpError(ErrorText("there are ", masks, " masks"));
    for (int64_t i = 0; i < masks; ++i) attention.masks.push_back(ReadMask());
    return attention;
  }

 private:
  // Read a count. A count that is too large is found when the items are read past the end of the record.
  int64_t Count(const char* what) {
    const int64_t count = reader_.Int();
    if (count < 0) throw OpError(ErrorText("there are ", count, " ", what));
    return count;
  }

  Target ReadTarget() {
    Target target;
    target.copies = reader_.Flag();
    const int64_t count = Count("sizes of a Reshape");
    for (int64_t i = 0; i < count; ++i) target.sizes.push_back(ReadSize());
    return target;
  }

  Size ReadSize() {
    const int64_t kind = reader_.Int(), number = reader_.Int();
    const Value value = slots_.InputValue(reader_, kInt64);
    Size size;
    const bool is_kind = kind >= 0 && kind <= static_cast<int64_t>(Size::Kind::kHeadDim);
    if (is_kind) size = {static_cast<Size::Kind>(kind), number, value};
    const bool is_read = is_kind && size.kind == Size::Kind::kElement;
    const bool has_slot = is_read || size.kind == Size::Kind::kLead;
    if (!is_kind || is_read != (value != nullptr) || (has_slot && number < 0)) {
      throw OpError(ErrorText("size ", number, " of a Reshape has an invalid slot or kind ", kind));
    }
    return size;
  }

  Mask ReadMask() {
    Mask mask;
    const int64_t kind = reader_.Int();
    if (kind < kAdded || kind > kPadding) throw OpError(ErrorText("a mask has kind ", kind, ", expected 0 to 2"));
    mask.is_condition = kind == kCondition;
    mask.is_padding = kind == kPadding;
    mask.value = slots_.InputValue(reader_, mask.is_padding ? kInt32 : mask.is_condition ? kBool : kFloat);
    mask.hides = reader_.Flag();
    mask.fill = reader_.Float();
    mask.is_truncated = reader_.Flag();
    const bool fits = !mask.is_condition || (mask.value != nullptr && mask.fill < kHiddenScore);
    if (!fits) throw OpError(ErrorText("a condition masks scores with the invalid value ", mask.fill));
    if (mask.is_padding && (mask.value == nullptr || !std::isfinite(mask.fill))) {
      throw OpError(ErrorText("key padding that adds ", mask.fill, mask.value == nullptr ? " is missing" : ""));
    }
    if (mask.value != nullptr) return mask;
    const FloatTensor tensor = ReadTensor(reader_, "a mask");
    mask.shape = tensor.shape;
    mask.values = tensor.values;
    return mask;
  }

  ContextReader& reader_;
  const IoSlots& slots_;
};

}  // namespace

void WriteAttention(const Attention& attention, const std::unordered_map<Value, size_t>& inputs,
                    ContextWriter& writer) {
  Writer(inputs, writer).Write(attention);
}

Attention ReadAttention(ContextReader& reader, const IoSlots& slots, int64_t width) {
  return Reader(reader, slots).Read(width);
}

}  // namespace ortolan::provider
