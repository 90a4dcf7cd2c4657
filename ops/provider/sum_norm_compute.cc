#include "provider/sum_norm_compute.h"

#include <cmath>

#include "provider/call_values.h"

namespace ortolan::provider {

SumNormCompute::SumNormCompute(const HostApi& host, const SumNorm& norm, const Node& fused)
    : node_(norm.norm.node->Described()),
      y_(OutputPlace(host, fused, norm.y)),
      own_weight_(norm.norm.weight),
      own_bias_(norm.norm.bias) {
  for (const Value value : norm.operands) {
    Operand& operand = operands_.emplace_back();
    operand.name = ErrorText("'", NameOf(host, value), "'");
    if (const std::optional<Constant> constant = ReadConstant(host, value)) {
      operand.shape = constant->shape;
      operand.own = constant->Floats();
      operand.numbers = operand.own;
    } else {
      operand.place = InputPlace(host, fused, value);
    }
  }
  MakePlan(own_weight_, own_bias_, norm.norm.epsilon);
}

SumNormCompute::SumNormCompute(ContextReader& reader, const Places& places)
    : node_(reader.Text()), y_(places.Output(reader)) {
  const float epsilon = reader.Real();
  const std::span<const float> weight = reader.Array<float>(), bias = reader.Array<float>();
  if (!(epsilon >= 0) || std::isinf(epsilon) || weight.empty() || bias.size() != weight.size()) {
    throw OpError(ErrorText("a normalization has ", weight.size(), " weights, ", bias.size(),
                            " numbers of bias and epsilon ", epsilon));
  }
  const int64_t count = reader.Number();
  if (count < 1 || count > static_cast<int64_t>(kMostSumOperands)) {
    throw OpError(ErrorText("a normalization is of a sum of ", count, ", expected 1 to ", kMostSumOperands));
  }
  for (int64_t i = 0; i < count; ++i) {
    Operand& operand = operands_.emplace_back();
    operand.name = reader.Text();
    operand.place = places.InputOrNone(reader);
    if (operand.place) continue;
    const FloatTensor tensor = ReadTensor(reader, "what a normalization adds");
    operand.shape = tensor.shape;
    operand.numbers = tensor.numbers;
  }
  MakePlan(weight, bias, epsilon);
}

void SumNormCompute::MakePlan(std::span<const float> weight, std::span<const float> bias, float epsilon) {
  LayerNormArgs norm;
  norm.n = static_cast<int64_t>(weight.size());
  norm.weight = weight.data();
  norm.bias = bias.data();
  norm.epsilon = epsilon;
  plan_.emplace(norm, ActiveFeatures());
}

void SumNormCompute::Write(ContextWriter& writer) const {
  const LayerNormArgs& norm = plan_->norm();
  writer.Number(static_cast<int64_t>(StepKind::kSumNorm));
  writer.Text(node_);
  WritePlace(writer, y_);
  writer.Real(norm.epsilon);
  writer.Array(std::span(norm.weight, static_cast<size_t>(norm.n)));
  writer.Array(std::span(norm.bias, static_cast<size_t>(norm.n)));
  writer.Number(static_cast<int64_t>(operands_.size()));
  for (const Operand& operand : operands_) {
    writer.Text(operand.name);
    WritePlace(writer, operand.place);
    if (!operand.place) WriteTensor(writer, {operand.shape, operand.numbers});
  }
}

void SumNormCompute::Run(const OrtApi& ort, OrtKernelContext& context, Host& host) const {
  if (!y_) return;
  CallMemory memory(host);
  std::vector<SumOperand> operands;
  for (const Operand& operand : operands_) {
    if (!operand.place) {
      operands.push_back({operand.name, operand.numbers.data(), operand.shape});
      continue;
    }
    const FloatInput input = memory.AlignedNumbers(ReadFloats(ort, context, *operand.place, memory));
    operands.push_back({operand.name, input.data, input.shape});
  }
  const Shape shape = plan_->Shape(operands, node_);
  const FloatOutput y(ort, context, *y_, shape, memory);
  plan_->Run(host, operands, shape, y.data());
  y.Finish();
}

}  // namespace ortolan::provider
