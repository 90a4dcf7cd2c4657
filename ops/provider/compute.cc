#include "provider/compute.h"

#include <algorithm>
#include <utility>

#include "host/broadcast.h"
#include "provider/attention_compute.h"
#include "provider/call_values.h"
#include "provider/io_slots.h"
#include "provider/packed_layers.h"
#include "provider/sum_norm_compute.h"

namespace ortolan::provider {
namespace {

// Computes an ONNX Clip.
void Clip(const Bounds& bounds, const float* from, int64_t count, float* to) {
  std::transform(from, from + count, to,
                 [&](float number) { return std::min(std::max(number, bounds.least), bounds.most); });
}

void WriteBounds(ContextWriter& writer, const std::optional<Bounds>& bounds) {
  writer.Flag(bounds.has_value());
  if (!bounds) return;
  writer.Float(bounds->least);
  writer.Float(bounds->most);
}

std::optional<Bounds> ReadBounds(ContextReader& reader) {
  if (!reader.Flag()) return std::nullopt;
  Bounds bounds;
  bounds.least = reader.Float();
  bounds.most = reader.Float();
  if (!(bounds.least <= bounds.most)) {
    throw OpError(
        ErrorText("clipping bounds are ", bounds.least, " and ", bounds.most, ", expected finite increasing values"));
  }
  return bounds;
}

// A step that one LinearPlan computes.
class LinearCompute : public StepCompute {
 public:
  LinearCompute(const Step& step, const Node& fused)
      : node_(step.layers.front().Described()),
        x_name_(step.X()->name),
        x_(InputSlot(fused, step.X())),
        y_(OutputSlot(fused, step.y)),
        packed_(step.layers) {
    if (step.residual != nullptr) residual_ = InputSlot(fused, step.residual);
    LinearLayer layer = packed_.Linear();
    layer.activation = step.activation;
    if (step.IsGated()) layer.gated_columns = step.layers.front().Columns();
    if (step.norm) {
      own_norm_weight_ = step.norm->weight;
      own_norm_bias_ = step.norm->bias;
      SetNorm(layer, own_norm_weight_, own_norm_bias_, step.norm->epsilon);
    }
    x_bounds_ = step.layers.front().x_bounds;
    y_bounds_ = step.y_bounds;
    plan_.emplace(layer, ActiveFeatures());
  }

  // Reads what Write has written after the step kind.
  LinearCompute(ContextReader& reader, const IoSlots& slots)
      : node_(reader.String()),
        x_name_(reader.String()),
        x_(slots.Input(reader)),
        y_(slots.Output(reader)),
        residual_(slots.InputOrNone(reader)),
        packed_(reader) {
    LinearLayer layer = packed_.Linear();
    const int64_t activation = reader.Int(), gated = reader.Int(), n = layer.w->n;
    if (!IsActivation(activation)) throw OpError(ErrorText("an activation is ", activation));
    layer.activation = static_cast<Activation>(activation);
    if (gated != 0 && (gated < 1 || gated > n || n != 2 * kPanelColumns * BitmapPanels(gated))) {
      throw OpError(ErrorText("a step of ", n, " columns has ", gated, " gated columns"));
    }
    layer.gated_columns = gated;
    if (reader.Flag()) {
      const float epsilon = reader.Float();
      const std::span<const float> weight = reader.Array<float>(), bias = reader.Array<float>();
      const size_t columns = static_cast<size_t>(layer.Columns());
      if (!(epsilon >= 0) || weight.size() != columns || bias.size() != columns) {
        throw OpError(ErrorText("a normalization of ", columns, " columns has ", weight.size(), " weights, ",
                                bias.size(), " bias values and epsilon ", epsilon));
      }
      SetNorm(layer, weight, bias, epsilon);
    }
    x_bounds_ = ReadBounds(reader);
    y_bounds_ = ReadBounds(reader);
    plan_.emplace(layer, ActiveFeatures());
  }

  void Write(ContextWriter& writer) const override {
    const LinearLayer& layer = plan_->layer();
    writer.Int(static_cast<int64_t>(StepKind::kLayers));
    writer.String(node_);
    writer.String(x_name_);
    WriteSlot(writer, x_);
    WriteSlot(writer, y_);
    WriteSlot(writer, residual_);
    packed_.Write(writer);
    writer.Int(static_cast<int64_t>(layer.activation));
    writer.Int(layer.gated_columns);
    writer.Flag(layer.norm.has_value());
    if (layer.norm) {
      writer.Float(layer.norm->epsilon);
      writer.Array(std::span(layer.norm->weight, static_cast<size_t>(layer.Columns())));
      writer.Array(std::span(layer.norm->bias, static_cast<size_t>(layer.Columns())));
    }
    WriteBounds(writer, x_bounds_);
    WriteBounds(writer, y_bounds_);
  }

  OutputSlots Outputs() const override { return {y_}; }

  void Run(const OrtApi& ort, OrtKernelContext& context, Host& host) const override {
    if (!y_) return;
    CallMemory memory(host);
    const FloatInput x = ReadFloats(ort, context, x_, memory);
    Shape shape = x.shape;
    LinearCall call;
    call.m = plan_->CountRows(shape, node_, x_name_);
    call.x = x.data;
    call.bias = packed_.Bias();
    if (x_bounds_) {
      const int64_t count = CountOf(x.shape);
      float* const inside = memory.Floats(count);
      Clip(*x_bounds_, x.data, count, inside);
      call.x = inside;
    }
    shape.back() = plan_->layer().Columns();
    if (residual_) return RunWithResidual(ort, context, memory, call, shape);
    const FloatOutput y(ort, context, *y_, shape, memory);
    call.y = y.data();
    plan_->Run(host, call);
    if (y_bounds_) Clip(*y_bounds_, call.y, call.m * shape.back(), call.y);
    y.Finish();
  }

 private:
  static void SetNorm(LinearLayer& layer, std::span<const float> weight, std::span<const float> bias, float epsilon) {
    LayerNormArgs& norm = layer.norm.emplace();
    norm.epsilon = epsilon;
    norm.weight = weight.data();
    norm.bias = bias.data();
  }

  void RunWithResidual(const OrtApi& ort, OrtKernelContext& context, CallMemory& memory, LinearCall call,
                       const Shape& shape) const {
    const FloatInput other = ReadFloats(ort, context, *residual_, memory);
    const std::optional<Shape> sum_shape = BroadcastShape(shape, other.shape);
    const bool fits = sum_shape && (!plan_->layer().norm || sum_shape->back() == shape.back());
    if (!fits) {
      throw OpError(ErrorText(node_, ": its residual has shape ", ShapeText(other.shape),
                              ", which does not broadcast to ", ShapeText(shape),
                              ". Feed the model inputs of the shapes it was exported for."));
    }
    const FloatOutput y(ort, context, *y_, *sum_shape, memory);
    call.y = y.data();
    plan_->RunWithResidual(memory.host(), call, shape, {other.data, other.shape}, *sum_shape);
    if (y_bounds_) Clip(*y_bounds_, call.y, CountOf(*sum_shape), call.y);
    y.Finish();
  }

  std::string node_, x_name_;
  size_t x_;
  std::optional<size_t> y_;  // nullopt if no node reads the output
  std::optional<size_t> residual_;
  std::optional<Bounds> x_bounds_, y_bounds_;
  PackedLayers packed_;
  std::vector<float> own_norm_weight_, own_norm_bias_;  // empty if they belong to a file
  std::optional<LinearPlan> plan_;                      // uses the weights and norm above
};

// A step that copies an input of the group to an output, with optional clipping.
class CopyCompute : public StepCompute {
 public:
  CopyCompute(const Copy& copy, const Node& fused)
      : x_(InputSlot(fused, copy.from)), y_(OutputSlot(fused, copy.to)), bounds_(copy.bounds) {}

  // Reads what Write has written after the step kind.
  CopyCompute(ContextReader& reader, const IoSlots& slots)
      : x_(slots.Input(reader)), y_(slots.Output(reader)), bounds_(ReadBounds(reader)) {}

  void Write(ContextWriter& writer) const override {
    writer.Int(static_cast<int64_t>(StepKind::kCopy));
    WriteSlot(writer, x_);
    WriteSlot(writer, y_);
    WriteBounds(writer, bounds_);
  }

  OutputSlots Outputs() const override { return {y_}; }

  void Run(const OrtApi& ort, OrtKernelContext& context, Host&) const override {
    if (!y_) return;
    const FloatInput x = ReadInput(ort, context, x_);
    const int64_t count = CountOf(x.shape);
    float* const y = MakeOutput(ort, context, *y_, x.shape);
    if (bounds_) {
      Clip(*bounds_, x.data, count, y);
    } else {
      std::copy_n(x.data, count, y);
    }
  }

 private:
  size_t x_;
  std::optional<size_t> y_;  // nullopt if no node reads the output
  std::optional<Bounds> bounds_;
};

std::unique_ptr<StepCompute> ReadStep(ContextReader& reader, const IoSlots& slots) {
  const int64_t kind = reader.Int();
  if (kind == static_cast<int64_t>(StepKind::kLayers)) return std::make_unique<LinearCompute>(reader, slots);
  if (kind == static_cast<int64_t>(StepKind::kAttention)) return std::make_unique<AttentionCompute>(reader, slots);
  if (kind == static_cast<int64_t>(StepKind::kCopy)) return std::make_unique<CopyCompute>(reader, slots);
  if (kind == static_cast<int64_t>(StepKind::kSumNorm)) return std::make_unique<SumNormCompute>(reader, slots);
  throw OpError(ErrorText("a step has kind ", kind, ", expected 0 to 3"));
}

}  // namespace

GroupCompute::GroupCompute(const HostApi& host) : OrtNodeComputeInfo{}, ort_(*host.ort), arena_(*host.ort) {
  ort_version_supported = host.version;
  CreateState = [](OrtNodeComputeInfo* self, OrtNodeComputeContext*, void** state) noexcept -> OrtStatus* {
    *state = self;
    return nullptr;
  };
  Compute = [](OrtNodeComputeInfo* self, void*, OrtKernelContext* context) noexcept -> OrtStatus* {
    GroupCompute& group = *static_cast<GroupCompute*>(self);
    return Guarded(group.ort_, [&] { group.Run(*context); });
  };
  ReleaseState = [](OrtNodeComputeInfo*, void*) noexcept {};
}

GroupCompute::GroupCompute(const HostApi& host, const Graph& graph, const Group& group, const Node& fused)
    : GroupCompute(host) {
  if (group.sum_norm) steps_.push_back(std::make_unique<SumNormCompute>(graph, *group.sum_norm, fused));
  for (const Step& step : group.steps) {
    if (step.attention) {
      steps_.push_back(std::make_unique<AttentionCompute>(graph, step, fused));
    } else {
      steps_.push_back(std::make_unique<LinearCompute>(step, fused));
    }
  }
  for (const Copy& copy : group.copies) steps_.push_back(std::make_unique<CopyCompute>(copy, fused));
}

GroupCompute::GroupCompute(const HostApi& host, std::shared_ptr<const ContextFile> file, const std::string& name,
                           const Node& node, const Node& fused)
    : GroupCompute(host) {
  file_ = std::move(file);
  const IoSlots slots(node, fused);
  ContextReader reader = file_->Group(name);
  std::vector<bool> is_made(fused.outputs().size());
  const int64_t count = reader.Int();
  for (int64_t i = 0; i < count; ++i) {
    std::unique_ptr<StepCompute> step = ReadStep(reader, slots);
    for (const std::optional<size_t>& output : step->Outputs()) {
      if (!output) continue;
      if (is_made[*output]) throw OpError(ErrorText("two steps compute output ", *output));
      is_made[*output] = true;
    }
    steps_.push_back(std::move(step));
  }
  reader.End();
  if (std::find(is_made.begin(), is_made.end(), false) != is_made.end()) {
    throw OpError(ErrorText("its ", count, " steps do not compute all of its ", is_made.size(), " outputs"));
  }
}

GroupCompute::~GroupCompute() = default;

void GroupCompute::Write(ContextWriter& writer) const {
  writer.Int(static_cast<int64_t>(steps_.size()));
  for (const std::unique_ptr<StepCompute>& step : steps_) step->Write(writer);
}

void GroupCompute::Run(OrtKernelContext& context) {
  SessionHost host(ort_, context, arena_);
  for (const std::unique_ptr<StepCompute>& step : steps_) step->Run(ort_, context, host);
}

}  // namespace ortolan::provider
