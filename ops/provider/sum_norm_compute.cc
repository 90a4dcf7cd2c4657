#include "provider/sum_norm_compute.h"

#include <cmath>

#include "provider/call_values.h"

namespace ortolan::provider {

SumNormCompute::SumNormCompute(const Graph& graph, const SumNorm& norm, const Node& fused)
    : node_(norm.norm.node->Described()),
      y_(OutputSlot(fused, norm.y)),
      own_weight_(norm.norm.weight),
      own_bias_(norm.norm.bias) {
  for (const Value value : norm.operands) {
    Operand& operand = operands_.emplace_back();
    operand.name = ErrorText("'", value->name, "'");
    if (const std::optional<Constant> constant = graph.ConstantOf(value)) {
      operand.shape = constant->shape;
      operand.own = constant->Floats();
      operand.values = operand.own;
    } else {
      operand.slot = InputSlot(fused, value);
    }
  }
  MakePlan(own_weight_, own_bias_, norm.norm.epsilon);
}

SumNormCompute::SumNormCompute(ContextReader& reader, const IoSlots& slots)
    : node_(reader.String()), y_(slots.Output(reader)) {
  const float epsilon = reader.Float();
  const std::span<const float> weight = reader.Array<float>(), bias = reader.Array<float>();
  if (!(epsilon >= 0) || std::isinf(epsilon) || weight.empty() || bias.size() != weight.size()) {
    throw OpError(ErrorText("a normalization has ", weight.size(), " weights, ", bias.size(),
                            " bias values and epsilon ", epsilon));
  }
  const int64_t count = reader.Int();
  if (count < 1 || count > static_cast<int64_t>(kMostSumOperands)) {
    throw OpError(ErrorText("a normalization adds ", count, " operands", ", expected 1 to ", kMostSumOperands));
  }
  for (int64_t i = 0; i < count; ++i) {
    Operand& operand = operands_.emplace_back();
    operand.name = reader.String();
    operand.slot = slots.InputOrNone(reader);
    if (operand.slot) continue;
    const FloatTensor tensor = ReadTensor(reader, "an operand of a normalization");
    operand.shape = tensor.shape;
    operand.values = tensor.values;
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
  writer.Int(static_cast<int64_t>(StepKind::kSumNorm));
  writer.String(node_);
  WriteSlot(writer, y_);
  writer.Float(norm.epsilon);
  writer.Array(std::span(norm.weight, static_cast<size_t>(norm.n)));
  writer.Array(std::span(norm.bias, static_cast<size_t>(norm.n)));
  writer.Int(static_cast<int64_t>(operands_.size()));
  for (const Operand& operand : operands_) {
    writer.String(operand.name);
    WriteSlot(writer, operand.slot);
    if (!operand.slot) WriteTensor(writer, {operand.shape, operand.values});
  }
}

void SumNormCompute::Run(const OrtApi& ort, OrtKernelContext& context, Host& host) const {
  if (!y_) return;
  CallMemory memory(host);
  std::vector<SumOperand> operands;
  for (const Operand& operand : operands_) {
    if (!operand.slot) {
      operands.push_back({operand.name, operand.values.data(), operand.shape});
      continue;
    }
    const FloatInput input = memory.AlignedInput(ReadFloats(ort, context, *operand.slot, memory));
    operands.push_back({operand.name, input.data, input.shape});
  }
  const Shape shape = plan_->Shape(operands, node_);
  const FloatOutput y(ort, context, *y_, shape, memory);
  plan_->Run(host, operands, shape, y.data());
  y.Finish();
}

}  // namespace ortolan::provider
