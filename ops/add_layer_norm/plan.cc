#include "add_layer_norm/plan.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "host/broadcast.h"
#include "host/op_error.h"
#include "isa/kernel_table.h"

namespace ortolan {
namespace {

constexpr int64_t kFloat = sizeof(float);
// Floats per work item: a few microseconds, more than the cost of handing it to another thread.
constexpr int64_t kChunkFloats = int64_t{1} << 15;
// Floats that are summed and normalized at a time, so that they are still in the L1 cache; at least kLeastNearRows
// rows.
constexpr int64_t kNearFloats = int64_t{1} << 12, kLeastNearRows = 4;

}  // namespace

struct AddLayerNormPlan::Rows {
  struct Operand {
    const float* data;
    std::vector<int64_t> strides;  // stride in elements along each of `axes`
  };

  Rows(std::span<const SumOperand> given, const std::vector<int64_t>& shape);

  std::vector<Operand> operands;
  // All axes except the last; adjacent ones are merged if every operand can step through them as through one.
  std::vector<int64_t> axes;
};

AddLayerNormPlan::Rows::Rows(std::span<const SumOperand> given, const std::vector<int64_t>& shape) {
  std::vector<std::vector<int64_t>> all;
  for (const SumOperand& operand : given) {
    operands.push_back({operand.data, {}});
    all.push_back(BroadcastStrides(operand.shape, shape));
  }
  std::vector<size_t> from;  // for each element of `axes`, innermost first: index in the shape of its innermost axis
  for (size_t axis = shape.size() - 1; axis-- > 0;) {
    if (shape[axis] == 1) continue;
    const auto goes_on = [&](const std::vector<int64_t>& strides) {
      return strides[axis] == strides[from.back()] * axes.back();
    };
    if (!axes.empty() && std::all_of(all.begin(), all.end(), goes_on)) {
      axes.back() *= shape[axis];
    } else {
      axes.push_back(shape[axis]);
      from.push_back(axis);
    }
  }
  std::reverse(axes.begin(), axes.end());
  std::reverse(from.begin(), from.end());
  for (size_t i = 0; i < operands.size(); ++i) {
    for (const size_t axis : from) operands[i].strides.push_back(all[i][axis]);
  }
  if (!axes.empty()) return;
  axes = {1};
  for (Operand& operand : operands) operand.strides = {0};
}

AddLayerNormPlan::AddLayerNormPlan(const LayerNormArgs& norm, Features features)
    : norm_(norm), kernel_(SelectKernel(EpilogueKernels(), features)) {
  norm_.y_row_bytes = norm_.n * kFloat;
}

std::vector<int64_t> AddLayerNormPlan::Shape(std::span<const SumOperand> operands, const std::string& node) const {
  std::vector<int64_t> sum;
  for (const SumOperand& operand : operands) {
    if (operand.shape.empty() || operand.shape.back() != norm_.n) {
      throw OpError(ErrorText(node, ": ", operand.name, " has shape ", ShapeText(operand.shape), ", expected [..., ",
                              norm_.n, "], because norm_weight has ", norm_.n, " elements"));
    }
    if (&operand == operands.data()) {
      sum = operand.shape;
      continue;
    }
    std::optional<std::vector<int64_t>> joined = BroadcastShape(sum, operand.shape);
    if (!joined) {
      throw OpError(ErrorText(node, ": ", operand.name, " has shape ", ShapeText(operand.shape),
                              ", expected a shape that broadcasts with ", ShapeText(sum), " as in ONNX Add"));
    }
    sum = std::move(*joined);
  }
  return sum;
}

void AddLayerNormPlan::Run(Host& host, std::span<const SumOperand> operands, const std::vector<int64_t>& shape,
                           float* y) const {
  const Rows rows(operands, shape);
  int64_t all = 1;
  for (const int64_t axis : rows.axes) all *= axis;
  const int64_t chunk = std::max<int64_t>(1, kChunkFloats / norm_.n);
  host.ParallelFor((all + chunk - 1) / chunk, [&](int64_t i) {
    const int64_t end = std::min((i + 1) * chunk, all), near = std::max(kLeastNearRows, kNearFloats / norm_.n);
    for (int64_t row = i * chunk; row < end;) {
      // Stop at the end of the innermost axis, where a broadcast operand may start again.
      const int64_t count = std::min({near, end - row, rows.axes.back() - row % rows.axes.back()});
      AddRows(rows, row, count, y + row * norm_.n);
      LayerNormArgs args = norm_;
      args.m = count;
      args.y = y + row * norm_.n;
      kernel_.layer_norm(args);
      row += count;
    }
  });
}

// Computes the sums of `count` rows from `row` on, within the innermost axis.
void AddLayerNormPlan::AddRows(const Rows& rows, int64_t row, int64_t count, float* y) const {
  const auto first = [&](const Rows::Operand& operand) {
    return operand.data + OffsetOf(row, rows.axes, operand.strides);
  };
  const std::vector<Rows::Operand>& operands = rows.operands;
  EpilogueArgs args;
  args.m = count;
  args.n = norm_.n;
  args.y = y;
  args.y_row_bytes = norm_.y_row_bytes;
  args.x = first(operands[0]);
  args.x_row_bytes = operands[0].strides.back() * kFloat;
  for (size_t i = 1; i < operands.size(); ++i) {
    args.residual = first(operands[i]);
    args.residual_row_bytes = operands[i].strides.back() * kFloat;
    kernel_.run(args);
    args.x = y;
    args.x_row_bytes = args.y_row_bytes;
  }
  if (operands.size() == 1) kernel_.run(args);
}

}  // namespace ortolan
