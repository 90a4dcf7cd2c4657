#include "provider/mat_mul_nbits.h"

#include <cstring>

namespace ortolan::provider {
namespace {

enum Input : size_t { kX, kCodes, kScales, kZeroPoints, kOrder, kBias };

constexpr auto kFloat = ElementType::kFloat;
constexpr auto kHalf = ElementType::kFloat16;
constexpr auto kByte = ElementType::kUint8;

// Values of accuracy_level, the lowest precision allowed for X: 0 for any, 4 for int8, which our kernels use. 1 to 3
// are float types.
constexpr int64_t kAnyAccuracy = 0;
constexpr int64_t kInt8Accuracy = 4;

// Read zero points, [n, blocks] or flat. They are floats, or uint8; two 4-bit values share a byte, low half first.
std::vector<float> ReadZeroPoints(const Node& node, const NBitsWeight& w) {
  const int64_t blocks = w.Blocks();
  if (!node.Has(kZeroPoints)) return {};
  if (node.ConstantInput(kZeroPoints, "zero points", {kByte, kFloat, kHalf}).type != kByte) {
    return node.ConstantInput(kZeroPoints, "zero points", {kFloat, kHalf}, {{w.n, blocks}, {w.n * blocks}}).Floats();
  }
  const int64_t bytes = w.bits == 8 ? blocks : (blocks + 1) / 2;
  const Constant tensor = node.ConstantInput(kZeroPoints, "zero points", {kByte}, {{w.n, bytes}, {w.n * bytes}});
  const uint8_t* const packed = static_cast<const uint8_t*>(tensor.data);
  std::vector<float> zero_points;
  zero_points.reserve(static_cast<size_t>(w.n * blocks));
  for (int64_t j = 0; j < w.n; ++j) {
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t index = j * bytes + (w.bits == 8 ? block : block / 2);
      const int number = w.bits == 8 ? packed[index] : packed[index] >> block % 2 * 4 & 0xf;
      zero_points.push_back(static_cast<float>(number));
    }
  }
  return zero_points;
}

// Check that g_idx assigns inputs to groups in order, which is also the meaning of a missing g_idx.
void CheckOrder(const Node& node, const NBitsWeight& w) {
  const Constant order =
      node.ConstantInput(kOrder, "g_idx", {ElementType::kInt32}, {{w.k}, {w.Blocks() * w.block_size}});
  for (int64_t l = 0; l < w.k; ++l) {
    int32_t block = 0;
    std::memcpy(&block, static_cast<const char*>(order.data) + l * 4, sizeof(block));
    Expect(block == l / w.block_size,
           ErrorText("its groups are ordered by g_idx '", order.name,
                     "', expected consecutive inputs; quantize without act-order (desc_act = false)"));
  }
}

void CheckX(const Node& node) {
  Expect(node.Has(kX), "its input A is missing");
  Expect(IsFloatType(node.InputType(kX)), ErrorText("its input '", node.InputName(kX), "' is not float or float16"));
  Expect(!node.IsConstant(kX), "both inputs are constant");
  const int64_t accuracy = node.Int("accuracy_level", kAnyAccuracy);
  Expect(accuracy == kAnyAccuracy || accuracy == kInt8Accuracy,
         ErrorText("its accuracy_level is ", accuracy, ", but kernels quantize inputs to int8 (accuracy_level 4)"));
}

}  // namespace

bool IsMatMulNBits(const Node& node) { return node.Is("com.microsoft", "MatMulNBits"); }

Layer ReadMatMulNBits(const Node& node) {
  CheckX(node);
  NBitsWeight w;
  w.k = node.Int("K");
  w.n = node.Int("N");
  w.bits = node.Int("bits", 4);
  w.block_size = node.Int("block_size");
  Expect(node.Int("weight_prepacked", 0) == 0, "its weight is packed for another device (weight_prepacked)");
  const std::string problem = WhyNotSizes(w.k, w.n, w.bits, w.block_size);
  Expect(problem.empty(), problem);
  const int64_t blocks = w.Blocks();
  const Constant codes = node.ConstantInput(kCodes, "numbers", {kByte}, {{w.n, blocks, w.block_size * w.bits / 8}});
  w.codes = static_cast<const uint8_t*>(codes.data);
  w.scales = node.ConstantInput(kScales, "scales", {kFloat, kHalf}, {{w.n, blocks}, {w.n * blocks}}).Floats();
  w.zero_points = ReadZeroPoints(node, w);
  if (node.Has(kOrder)) CheckOrder(node, w);
  const std::string weight_problem = NBitsGroups::WhyNot(w);
  Expect(weight_problem.empty(), weight_problem);
  Layer layer;
  layer.nodes = {&node};
  layer.x = node.Input(kX);
  layer.y = node.Output(0);
  Expect(layer.y != nullptr, "its output is missing");
  if (node.Has(kBias)) layer.bias = node.ConstantInput(kBias, "bias", {kFloat, kHalf}, {{w.n}}).Floats();
  layer.weight = std::move(w);
  return layer;
}

}  // namespace ortolan::provider
