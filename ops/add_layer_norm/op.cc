// ORT adapter of AddLayerNorm.
//
//     Y = LayerNormalization(X + addend + second_addend)    over the last axis: epilogue/layer_norm.h
//
//     X, addend, second_addend float [..., n], repeated over the axes in front of the last by the rules of ONNX Add; a
//     constant 0 of shape [] or [1] stands for no addend. norm_weight, norm_bias float [n], initializers. Attributes
//     epsilon, format_version. Y [..., n]
//
// The sum is made from the left, each addition rounded. A row of Y depends on its own row of the sum alone.
#include <algorithm>
#include <limits>

#include "epilogue/epilogue.h"
#include "isa/kernel_table.h"
#include "ort/broadcast.h"
#include "ort/ort_op.h"
#include "rooms.h"

namespace ortolan {
namespace {

constexpr const char* kOpType = "AddLayerNorm";
constexpr int64_t kFormatVersion = 1;

enum Input : size_t { kX, kAddend, kSecondAddend, kWeight, kBias, kInputCount };
constexpr size_t kOperands = kWeight;

// Of a piece of work: some microseconds, more than handing it to another thread takes.
constexpr int64_t kChunkFloats = int64_t{1} << 15;
// Of rows that are added up and normalized while they are in the nearest cache. The kernel takes some rows at a time.
constexpr int64_t kNearFloats = int64_t{1} << 12, kLeastNearRows = 4;

struct Operand {
  const float* data;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;  // elements from one row of Y to the next, by the axes of RowAxes
};

// The axes in front of the last one, those joined that all operands go through as through one.
std::vector<int64_t> RowAxes(const std::vector<int64_t>& shape, std::vector<Operand>& operands) {
  std::vector<std::vector<int64_t>> all;
  for (const Operand& operand : operands) all.push_back(BroadcastStrides(operand.shape, shape));
  std::vector<int64_t> axes;  // the innermost first
  std::vector<size_t> from;   // the innermost axis of shape that each of them is made of
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
  if (!axes.empty()) return axes;
  for (Operand& operand : operands) operand.strides = {0};
  return {1};
}

class Kernel {
 public:
  explicit Kernel(const OrtKernelInfo& info)
      : node_(DescribeNode(info, kOpType)), kernel_(SelectKernel(EpilogueKernels(), ActiveFeatures())) {
    CheckFormatVersion(info, kFormatVersion, node_);
    norm_.epsilon = FloatAttributeOr(info, "epsilon", -1.0f);
    if (!(norm_.epsilon >= 0.0f && norm_.epsilon <= std::numeric_limits<float>::max())) {
      throw OpError(
          ErrorText(node_, ": epsilon is ", norm_.epsilon, ", expected a finite number from 0 on. ", kOptimizeAgain));
    }
    const auto vector = [&](size_t index, const char* name) {
      return ConstantInput(info, index, name, {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT}, node_);
    };
    const ConstantTensor weight = vector(kWeight, "norm_weight"), bias = vector(kBias, "norm_bias");
    if (weight.shape.size() != 1 || weight.count == 0) {
      throw OpError(ErrorText(node_, ": norm_weight '", weight.name, "' has shape ", ShapeText(weight.shape),
                              ", expected [n], n from 1 on. ", kOptimizeAgain));
    }
    CheckShape(bias, "norm_bias", weight.shape, node_, " as norm_weight has");
    weight_ = AlignedConstant<float>(weight);
    bias_ = AlignedConstant<float>(bias);
    norm_.n = weight.count;
    norm_.weight = weight_.data();
    norm_.bias = bias_.data();
    norm_.y_row_bytes = norm_.n * kFloat;
    for (size_t index = kX; index < kOperands; ++index) {
      constants_[index] = AlignedConstant<float>(info, index);
      is_given_[index] = index == kX || !IsConstantZero(info, index);
    }
  }

  void Compute(Ort::KernelContext& context, Host& host) const {
    std::vector<Operand> operands;
    std::vector<int64_t> shape;
    for (size_t index = kX; index < kOperands; ++index) {
      if (!is_given_[index]) continue;
      const Ort::ConstValue value = context.GetInput(index);
      operands.push_back({constants_[index].In(value), value.GetTensorTypeAndShapeInfo().GetShape(), {}});
      shape = Joined(shape, operands.back().shape, index);
    }
    float* const y = context.GetOutput(0, shape).GetTensorMutableData<float>();
    const std::vector<int64_t> axes = RowAxes(shape, operands);
    int64_t rows = 1;
    for (const int64_t axis : axes) rows *= axis;
    const int64_t chunk = std::max<int64_t>(1, kChunkFloats / norm_.n);
    host.ParallelFor((rows + chunk - 1) / chunk, [&](int64_t i) {
      const int64_t end = std::min((i + 1) * chunk, rows), near = std::max(kLeastNearRows, kNearFloats / norm_.n);
      for (int64_t row = i * chunk; row < end;) {
        // Up to where an operand may begin anew.
        const int64_t count = std::min({near, end - row, axes.back() - row % axes.back()});
        AddRows(operands, axes, row, count, y + row * norm_.n);
        LayerNormArgs args = norm_;
        args.m = count;
        args.y = y + row * norm_.n;
        kernel_.layer_norm(args);
        row += count;
      }
    });
  }

 private:
  static constexpr int64_t kFloat = sizeof(float);

  // The shape of what was added up so far with one more operand; X begins with no shape.
  std::vector<int64_t> Joined(const std::vector<int64_t>& sum, const std::vector<int64_t>& added, size_t index) const {
    constexpr const char* kNames[] = {"X", "addend", "second_addend"};
    if (added.empty() || added.back() != norm_.n) {
      throw OpError(ErrorText(node_, ": ", kNames[index], " has shape ", ShapeText(added), ", expected [..., ", norm_.n,
                              "], as norm_weight has ", norm_.n, " numbers"));
    }
    if (index == kX) return added;
    std::optional<std::vector<int64_t>> shape = BroadcastShape(sum, added);
    if (!shape) {
      throw OpError(ErrorText(node_, ": ", kNames[index], " has shape ", ShapeText(added),
                              ", expected one that ONNX Add takes beside ", ShapeText(sum)));
    }
    return std::move(*shape);
  }

  // The sums of `count` rows from `row` on, within the last of the axes.
  void AddRows(const std::vector<Operand>& operands, const std::vector<int64_t>& axes, int64_t row, int64_t count,
               float* y) const {
    const auto first = [&](const Operand& operand) { return operand.data + PlaceOf(row, axes, operand.strides); };
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

  std::string node_;
  const EpilogueKernel& kernel_;
  AlignedConstant<float> weight_;
  AlignedConstant<float> bias_;
  LayerNormArgs norm_;  // of every call
  AlignedConstant<float> constants_[kOperands];
  bool is_given_[kOperands] = {};
};

struct Op : OrtOp<Op, Kernel> {
  const char* GetName() const { return kOpType; }
  size_t GetInputTypeCount() const { return kInputCount; }
  size_t GetOutputTypeCount() const { return 1; }
  ONNXTensorElementDataType GetInputType(size_t) const { return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; }
  ONNXTensorElementDataType GetOutputType(size_t) const { return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; }
  // Beside an addend X may be what is repeated.
  static void InferShape(OrtShapeInferContext* context) {
    if (IsOneNumber(context, kAddend) && IsOneNumber(context, kSecondAddend)) InferSameShape(context, kX);
  }
};

}  // namespace

const OrtCustomOp* AddLayerNormOp() {
  static const Op op;
  return &op;
}

}  // namespace ortolan
