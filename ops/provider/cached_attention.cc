#include "provider/cached_attention.h"

#include <algorithm>
#include <cmath>
#include <iterator>

namespace ortolan::provider {
namespace {

constexpr int64_t kMostHeads = 1 << 16;
constexpr int64_t kMostHeadDim = 1 << 16;

enum Input : size_t { kQuery, kKey, kValue, kPastKey, kPastValue, kLengths, kTotal, kCos, kSin, kInputCount };
enum Output : size_t { kY, kPresentKey, kPresentValue, kOutputCount };
constexpr const char* kInputNames[] = {
    "query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length", "cos_cache", "sin_cache"};
constexpr const char* kOutputNames[] = {"output", "present_key", "present_value"};
static_assert(std::size(kInputNames) == kInputCount && std::size(kOutputNames) == kOutputCount);

// ONNX Runtime writes default attributes into nodes. A node with an attribute that is not listed here is left alone,
// because the attribute may change the result.
constexpr const char* kRead[] = {"num_heads", "kv_num_heads", "do_rotary", "rotary_interleaved", "scale", "softcap"};
// Attributes of normalizations. They have no effect without the weights, which are further inputs.
constexpr const char* kOfOtherInputs[] = {"qk_norm_epsilon", "q_norm_epsilon", "k_norm_epsilon"};
struct IntAttribute {
  const char* name;
  int64_t missing;
  int64_t off;  // another value that disables the feature, as `missing` does
};
constexpr IntAttribute kIntAttributes[] = {
    {"local_window_size", -1, -1}, {"smooth_softmax", -1, 0},    {"qk_output", 0, 0}, {"qk_matmul_output_mode", 0, 0},
    {"softmax_precision", 0, 1},   {"kv_cache_bit_width", 0, 0}, {"causal", 1, 1},    {"sliding_window_cache", 0, 0}};
constexpr const char* kQuantizations[] = {"k_quant_type", "v_quant_type"};

void CheckAttributes(const Node& node) {
  for (const IntAttribute& one : kIntAttributes) {
    const int64_t found = node.Int(one.name, one.missing);
    Expect(found == one.missing || found == one.off,
           ErrorText("its ", one.name, " is ", found, ", which Ortolan's attention does not know"));
  }
  const float softcap = node.Float("softcap", 0);
  Expect(softcap == 0, ErrorText("its softcap is ", softcap, ", which Ortolan's attention does not know"));
  for (const char* const name : kQuantizations) {
    Expect(node.String(name, "NONE") == "NONE", ErrorText("its ", name, " is not NONE: its cache is quantized"));
  }
  for (const auto& [name, attribute] : node.attributes()) {
    const auto is_it = [&](const char* one) { return name == one; };
    const auto is_its_name = [&](const IntAttribute& one) { return name == one.name; };
    const bool is_known = std::any_of(std::begin(kRead), std::end(kRead), is_it) ||
                          std::any_of(std::begin(kOfOtherInputs), std::end(kOfOtherInputs), is_it) ||
                          std::any_of(std::begin(kIntAttributes), std::end(kIntAttributes), is_its_name) ||
                          std::any_of(std::begin(kQuantizations), std::end(kQuantizations), is_it);
    Expect(is_known, ErrorText("it has ", name, ", which Ortolan's attention does not know"));
  }
}

void CheckValue(Value value, const char* what, ElementType type) {
  Expect(value != nullptr, ErrorText("its ", what, " is missing"));
  Expect(value->type == type,
         ErrorText("its ", what, " '", value->name, "' is not ", type == ElementType::kFloat ? "float" : "int32"));
}

void CheckValues(const Node& node, bool is_packed, bool is_rotary) {
  for (size_t i = 0; i < kInputCount; ++i) {
    if (is_packed && (i == kKey || i == kValue)) continue;
    if (!is_rotary && i >= kCos) break;
    const bool is_whole = i == kLengths || i == kTotal;
    CheckValue(node.Input(i), kInputNames[i], is_whole ? ElementType::kInt32 : ElementType::kFloat);
  }
  for (size_t i = kInputCount; i < node.inputs().size(); ++i) {
    Expect(!node.Has(i), ErrorText("it has input ", i, ", '", node.InputName(i), "'"));
  }
  for (size_t i = 0; i < kOutputCount; ++i) {
    Expect(node.Output(i) != nullptr, ErrorText("its ", kOutputNames[i], " is missing"));
  }
  Expect(node.Output(kOutputCount) == nullptr, "it has the optional output of its scores");
}

// Return the size of an axis, or -1 if unknown. Throws UnfitError if the input has another rank.
int64_t SizeOf(const Node& node, size_t input, size_t rank, size_t axis) {
  const std::optional<Shape> shape = DeclaredShape(node.Input(input));
  if (!shape || shape->empty()) return -1;
  Expect(shape->size() == rank, ErrorText("its ", kInputNames[input], " '", node.InputName(input), "' has shape ",
                                          ShapeText(*shape), ", expected ", rank, " axes"));
  return (*shape)[axis];
}

// Return the width of a head: that of the caches or, if the model does not specify it, that of query or key. All
// specified widths must agree.
int64_t ReadHeadDim(const Node& node, const CachedAttention& found) {
  const int64_t query_heads = node.Has(kKey) ? found.heads : found.heads + 2 * found.kv_heads;
  const struct {
    size_t input, rank;
    int64_t heads;
  } widths[] = {{kPastKey, 4, 1},
                {kPastValue, 4, 1},
                {kQuery, 3, query_heads},
                {kKey, 3, found.kv_heads},
                {kValue, 3, found.kv_heads}};
  int64_t head_dim = -1;
  for (const auto& [input, rank, heads] : widths) {
    const int64_t width = node.Has(input) ? SizeOf(node, input, rank, rank - 1) : -1;
    if (width == -1) continue;
    if (head_dim == -1 && width % heads == 0) head_dim = width / heads;
    Expect(width == heads * head_dim,
           ErrorText("its ", kInputNames[input], " '", node.InputName(input), "' is ", width,
                     " wide, expected heads of one width, counted by num_heads and kv_num_heads"));
  }
  Expect(head_dim != -1, "the width of its heads is unknown until run time");
  Expect(head_dim > 0 && head_dim <= kMostHeadDim,
         ErrorText("the width of its heads is ", head_dim, ", expected 1 to ", kMostHeadDim));
  for (const size_t input : {kPastKey, kPastValue}) {
    const int64_t heads = SizeOf(node, input, 4, 1);
    Expect(heads == -1 || heads == found.kv_heads, ErrorText("its ", kInputNames[input], " '", node.InputName(input),
                                                             "' has ", heads, " heads, expected ", found.kv_heads));
  }
  return head_dim;
}

void CheckTables(const Node& node, int64_t head_dim) {
  for (const size_t input : {kCos, kSin}) {
    const int64_t width = SizeOf(node, input, 2, 1);
    Expect(head_dim % 2 == 0 && width == head_dim / 2,
           ErrorText("its ", kInputNames[input], " '", node.InputName(input), "' rotates ",
                     width == -1 ? "an unknown number" : std::to_string(2 * width), " of the ", head_dim,
                     " values of a head, expected all"));
  }
}

}  // namespace

std::string CachedAttention::Described() const {
  return ErrorText("attention of ", heads, " heads of ", head_dim, " over a cache of ", kv_heads,
                   cos == nullptr ? "" : ", with rotary embedding");
}

std::optional<CachedAttention> FindCachedAttention(const Node& node) {
  if (!node.Is("com.microsoft", "GroupQueryAttention")) return std::nullopt;
  CheckAttributes(node);
  const bool is_packed = !node.Has(kKey) && !node.Has(kValue), is_rotary = node.Int("do_rotary", 0) == 1;
  CheckValues(node, is_packed, is_rotary);
  CachedAttention found;
  found.node = &node;
  found.heads = node.Int("num_heads");
  found.kv_heads = node.Int("kv_num_heads");
  Expect(found.heads > 0 && found.heads <= kMostHeads && found.kv_heads > 0 && found.heads % found.kv_heads == 0,
         ErrorText("its num_heads is ", found.heads, " and kv_num_heads ", found.kv_heads,
                   ", expected a positive number and a divisor of it"));
  found.head_dim = ReadHeadDim(node, found);
  if (is_rotary) CheckTables(node, found.head_dim);
  found.scale = node.Float("scale", 0);
  if (found.scale == 0) found.scale = 1.0f / std::sqrt(static_cast<float>(found.head_dim));
  Expect(std::isfinite(found.scale), "its scale is not finite");
  found.is_interleaved = node.Int("rotary_interleaved", 0) == 1;
  found.query = node.Input(kQuery);
  found.key = node.Input(kKey);
  found.value = node.Input(kValue);
  found.past_key = node.Input(kPastKey);
  found.past_value = node.Input(kPastValue);
  found.lengths = node.Input(kLengths);
  found.total = node.Input(kTotal);
  if (is_rotary) {
    found.cos = node.Input(kCos);
    found.sin = node.Input(kSin);
  }
  found.y = node.Output(kY);
  found.present_key = node.Output(kPresentKey);
  found.present_value = node.Output(kPresentValue);
  return found;
}

}  // namespace ortolan::provider
