#include "provider/int8_constants.h"

#include <algorithm>

namespace ortolan::provider {
namespace {

constexpr auto kFloat = ElementType::kFloat;
constexpr auto kUint8 = ElementType::kUint8;
constexpr auto kInt8 = ElementType::kInt8;

}  // namespace

std::vector<Shape> ShapesOfColumns(int64_t n) { return {{}, {1}, {n}, {1, n}}; }

Int8Weight ReadInt8Weight(const Node& node, size_t codes, size_t zero_points, bool transposed) {
  Expect(node.Has(codes) && node.IsConstant(codes), "its weight is computed at run time, not constant");
  const Constant tensor = node.ConstantInput(codes, "weight", {kInt8, kUint8});
  Expect(tensor.shape.size() == 2,
         ErrorText("its weight '", tensor.name, "' is ", tensor.shape.size(), "-D, expected 2-D"));
  Int8Weight w;
  w.transposed = transposed;
  w.k = tensor.shape[transposed ? 1 : 0];
  w.n = tensor.shape[transposed ? 0 : 1];
  Expect(std::min(w.k, w.n) > 0, ErrorText("its weight '", tensor.name, "' is empty: ", ShapeText(tensor.shape)));
  w.codes = static_cast<const uint8_t*>(tensor.data);
  w.is_signed = tensor.type == kInt8;
  std::vector<int16_t> zeros(1);
  if (node.Has(zero_points)) {
    const Constant zero = node.ConstantInput(zero_points, "weight's zero points", {tensor.type}, ShapesOfColumns(w.n));
    const uint8_t* const values = static_cast<const uint8_t*>(zero.data);
    zeros.assign(static_cast<size_t>(zero.Count()), 0);
    std::transform(values, values + zeros.size(), zeros.begin(), [&](uint8_t number) {
      return static_cast<int16_t>(w.is_signed ? static_cast<int8_t>(number) : static_cast<int>(number));
    });
  }
  w.zero_points = Spread(zeros, w.n);
  return w;
}

std::vector<float> ReadScales(const Node& node, size_t scales, int64_t n) {
  return Spread(node.ConstantInput(scales, "weight's scales", {kFloat}, ShapesOfColumns(n)).Floats(), n);
}

}  // namespace ortolan::provider
