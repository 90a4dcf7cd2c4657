#include "matmul/linear_op.h"

#include <limits>
#include <utility>

namespace ortolan {

LinearOp::LinearOp(const OrtKernelInfo& info, std::string node, Inputs inputs, int64_t k, int64_t n)
    : node_(std::move(node)), inputs_(inputs), k_(k), n_(n), y_n_(n) {
  CheckConstantVector(info, inputs_.bias, "bias", n_, node_);
  const int64_t activation = IntAttributeOr(info, "activation", 0);
  if (!IsActivation(activation)) {
    throw OpError(ErrorText(node_, ": activation is ", activation,
                            ", expected 0 (none), 1 (ReLU), 2 (GELU by erf), 3 (GELU by tanh) or 4 (SiLU)"));
  }
  activation_ = static_cast<Activation>(activation);
  const int64_t gated = IntAttributeOr(info, "gated_columns", 0);
  if (gated != 0) {
    if (gated < 1 || gated > n_ || n_ != 2 * kPanelColumns * BitmapPanels(gated)) {
      throw OpError(ErrorText(node_, ": gated_columns is ", gated, " with ", n_,
                              " columns of weights, expected 0, or half as many but for the padding of each half to a "
                              "multiple of ",
                              kPanelColumns, ". Optimize the original model again."));
    }
    y_n_ = gated;
  }
  has_residual_ = HasInput(info, inputs_.residual) && !IsConstantZero(info, inputs_.residual);
  x_name_ = Ort::ConstKernelInfo(&info).GetInputName(inputs_.x);
  if (inputs_.norm) ReadNorm(info, *inputs_.norm);
}

void LinearOp::ReadNorm(const OrtKernelInfo& info, size_t weight) {
  const float epsilon = FloatAttributeOr(info, "norm_epsilon", kNoNorm);
  if (epsilon == kNoNorm) return;
  if (!(epsilon >= 0.0f && epsilon <= std::numeric_limits<float>::max())) {
    throw OpError(ErrorText(node_, ": norm_epsilon is ", epsilon, ", expected a finite number from 0 on, or ", kNoNorm,
                            " for no LayerNormalization. Optimize the original model again."));
  }
  const auto vector = [&](size_t input, const char* meaning) {
    const ConstantTensor tensor = ConstantInput(info, input, meaning, {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT}, node_);
    if (tensor.shape != std::vector<int64_t>{y_n_}) {
      throw OpError(ErrorText(node_, ": ", meaning, " '", tensor.name, "' has shape ", ShapeText(tensor.shape),
                              ", expected [", y_n_, "]. Optimize the original model again."));
    }
    return static_cast<const float*>(tensor.data);
  };
  norm_.emplace();
  norm_->n = y_n_;
  norm_->y_row_bytes = YRowBytes();
  norm_->epsilon = epsilon;
  norm_->weight = vector(weight, "norm_weight");
  norm_->bias = vector(weight + 1, "norm_bias");
}

LayerNormArgs LinearOp::NormOf(float* y, int64_t rows) const {
  LayerNormArgs args = *norm_;
  args.y = y;
  args.m = rows;
  return args;
}

void LinearOp::Normalize(const Ort::KernelContext& context, float* y, const std::vector<int64_t>& shape) const {
  if (!norm_) return;
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < shape.size(); ++i) rows *= shape[i];
  LayerNormFn* const run = SelectKernel(LayerNormKernels(), ActiveFeatures()).run;
  const int64_t chunk_rows = std::max<int64_t>(1, kPackChunkFloats / y_n_);
  ParallelFor(context, (rows + chunk_rows - 1) / chunk_rows, [&](int64_t chunk) {
    const int64_t begin = chunk * chunk_rows;
    run(NormOf(y + begin * y_n_, std::min(chunk_rows, rows - begin)));
  });
}

const float* LinearOp::Bias(const Ort::KernelContext& context) const {
  if (context.GetInputCount() <= inputs_.bias) return nullptr;
  const Ort::ConstValue bias = context.GetInput(inputs_.bias);
  if (!bias) return nullptr;
  const std::vector<int64_t> shape = bias.GetTensorTypeAndShapeInfo().GetShape();
  if (shape != std::vector<int64_t>{n_}) {
    throw OpError(ErrorText(node_, ": bias has shape ", ShapeText(shape), ", expected [", n_, "]"));
  }
  return bias.GetTensorData<float>();
}

EpilogueArgs LinearOp::Piece(EpilogueArgs epilogue, const MatMulArgs& rows, int64_t row, int64_t panel_begin,
                             int64_t panel_end) const {
  const int64_t column = panel_begin * kPanelColumns;
  epilogue.m = rows.m;
  epilogue.n = std::min(panel_end * kPanelColumns, y_n_) - column;
  epilogue.y = rows.y + column;
  epilogue.y_row_bytes = YRowBytes();
  epilogue.x = epilogue.y;
  epilogue.x_row_bytes = epilogue.y_row_bytes;
  if (epilogue.residual != nullptr) {
    epilogue.residual = reinterpret_cast<const float*>(reinterpret_cast<const char*>(epilogue.residual) +
                                                       row * epilogue.residual_row_bytes) +
                        column;
  }
  return epilogue;
}

void LinearOp::InferShape(OrtShapeInferContext* context, size_t residual) {
  if (HasMoreInputs(context, residual) && !IsOneNumber(context, residual)) return;
  if (!InferLastDimension(context, "gated_columns")) InferLastDimension(context, "n");
}

}  // namespace ortolan
