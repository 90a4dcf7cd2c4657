#include "provider/compute.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "add_layer_norm/plan.h"
#include "host/broadcast.h"
#include "provider/attention_compute.h"
#include "provider/call_values.h"
#include "provider/packed_layers.h"
#include "provider/record.h"

namespace ortolan::provider {
namespace {

// Computes an ONNX Clip.
void Clip(const Bounds& bounds, const float* from, int64_t count, float* to) {
  std::transform(from, from + count, to,
                 [&](float number) { return std::min(std::max(number, bounds.least), bounds.most); });
}

template <typename Archive, typename MaybeBounds>
void VisitBounds(Archive& archive, MaybeBounds& bounds) {
  archive.Optional(bounds, [&](auto& found) {
    archive.Float(found.least);
    archive.Float(found.most);
    if (!(found.least <= found.most)) {
      throw OpError(
          ErrorText("clipping bounds are ", found.least, " and ", found.most, ", expected finite increasing values"));
    }
  });
}

struct NormSpec {
  float epsilon = 0;
  std::span<const float> weight, bias;
};

template <typename Archive, typename Norm>
void VisitNorm(Archive& archive, Norm& norm) {
  archive.Float(norm.epsilon);
  archive.Floats(norm.weight);
  archive.Floats(norm.bias);
}

// Throws OpError if the norm, read from a record, does not fit rows of this length.
LayerNormArgs ArgsOf(const NormSpec& norm, size_t columns) {
  if (!(norm.epsilon >= 0) || std::isinf(norm.epsilon) || columns == 0 || norm.weight.size() != columns ||
      norm.bias.size() != columns) {
    throw OpError(ErrorText("a normalization has ", norm.weight.size(), " weights, ", norm.bias.size(),
                            " bias values and epsilon ", norm.epsilon));
  }
  LayerNormArgs args;
  args.n = static_cast<int64_t>(columns);
  args.weight = norm.weight.data();
  args.bias = norm.bias.data();
  args.epsilon = norm.epsilon;
  return args;
}

// A step that one LinearPlan computes.
class LinearCompute : public StepCompute {
 public:
  LinearCompute(const Step& step, const Node& fused) {
    const Layer& first = step.layers.front();
    spec_.node = first.Described();
    spec_.x_name = step.X()->name;
    spec_.x = InputSlot(fused, step.X());
    spec_.y = OutputSlot(fused, step.y);
    if (step.residual != nullptr) spec_.residual = InputSlot(fused, step.residual);
    spec_.packed.emplace(step.layers);
    spec_.activation = step.activation;
    spec_.gated_columns = step.gated_columns;
    own_norm_ = step.norm;
    if (own_norm_) spec_.norm = {own_norm_->epsilon, own_norm_->weight, own_norm_->bias};
    spec_.x_bounds = first.x_bounds;
    spec_.y_bounds = step.y_bounds;
    MakePlan();
  }

  // Reads what Write has written after the step kind.
  LinearCompute(ContextReader& reader, const IoSlots& slots, bool reproducible) {
    RecordReader record(reader, slots);
    Visit(record, spec_);
    if (reproducible) CheckReproducible(*spec_.packed, spec_.node);
    MakePlan();
  }

  void Write(ContextWriter& writer) const override {
    RecordWriter record(writer);
    record.Int(static_cast<int64_t>(StepKind::kLayers));
    Visit(record, spec_);
  }

  OutputSlots Outputs() const override { return {spec_.y}; }

  void Run(const OrtApi& ort, OrtKernelContext& context, Host& host) const override {
    if (!spec_.y) return;
    CallMemory memory(host);
    const FloatInput x = ReadFloats(ort, context, spec_.x, memory);
    Shape shape = x.shape;
    LinearCall call;
    call.m = plan_->CountRows(shape, spec_.node, spec_.x_name);
    call.x = x.data;
    call.bias = spec_.packed->Bias();
    if (spec_.x_bounds) {
      const int64_t count = CountOf(x.shape);
      float* const inside = memory.Floats(count);
      Clip(*spec_.x_bounds, x.data, count, inside);
      call.x = inside;
    }
    shape.back() = plan_->layer().Columns();
    if (spec_.residual) return RunWithResidual(ort, context, memory, call, shape);
    const FloatOutput y(ort, context, *spec_.y, shape, memory);
    call.y = y.data();
    plan_->Run(host, call);
    if (spec_.y_bounds) Clip(*spec_.y_bounds, call.y, call.m * shape.back(), call.y);
    y.Finish();
  }

 private:
  struct Spec {
    std::string node, x_name;
    size_t x = 0;
    std::optional<size_t> y;  // nullopt if no node reads the output
    std::optional<size_t> residual;
    std::optional<PackedLayers> packed;
    Activation activation = Activation::kNone;
    int64_t gated_columns = 0;
    std::optional<NormSpec> norm;
    std::optional<Bounds> x_bounds, y_bounds;
  };

  template <typename Archive, typename AnySpec>
  static void Visit(Archive& archive, AnySpec& spec) {
    archive.String(spec.node);
    archive.String(spec.x_name);
    archive.Input(spec.x);
    archive.Output(spec.y);
    archive.Input(spec.residual);
    archive.Object(spec.packed);
    archive.Choice(spec.activation, static_cast<int64_t>(Activation::kSilu) + 1, "an activation");
    archive.Int(spec.gated_columns);
    archive.Optional(spec.norm, [&](auto& norm) { VisitNorm(archive, norm); });
    VisitBounds(archive, spec.x_bounds);
    VisitBounds(archive, spec.y_bounds);
  }

  void MakePlan() {
    LinearLayer layer = spec_.packed->Linear();
    const int64_t n = layer.w->n, gated = spec_.gated_columns;
    if (gated != 0 && (gated < 1 || gated > n || n != 2 * kPanelColumns * BitmapPanels(gated))) {
      throw OpError(ErrorText("a step of ", n, " columns has ", gated, " gated columns"));
    }
    layer.activation = spec_.activation;
    layer.gated_columns = gated;
    if (spec_.norm) layer.norm = ArgsOf(*spec_.norm, static_cast<size_t>(layer.Columns()));
    plan_.emplace(layer, ActiveFeatures());
  }

  void RunWithResidual(const OrtApi& ort, OrtKernelContext& context, CallMemory& memory, LinearCall call,
                       const Shape& shape) const {
    const FloatInput other = ReadFloats(ort, context, *spec_.residual, memory);
    const std::optional<Shape> sum_shape = BroadcastShape(shape, other.shape);
    const bool fits = sum_shape && (!spec_.norm || sum_shape->back() == shape.back());
    if (!fits) {
      throw OpError(ErrorText(spec_.node, ": its residual has shape ", ShapeText(other.shape),
                              ", which does not broadcast to ", ShapeText(shape),
                              ". Feed the model inputs of the shapes it was exported for."));
    }
    const FloatOutput y(ort, context, *spec_.y, *sum_shape, memory);
    call.y = y.data();
    plan_->RunWithResidual(memory.host(), call, shape, {other.data, other.shape}, *sum_shape);
    if (spec_.y_bounds) Clip(*spec_.y_bounds, call.y, CountOf(*sum_shape), call.y);
    y.Finish();
  }

  Spec spec_;
  std::optional<Norm> own_norm_;    // empty if it belongs to a file
  std::optional<LinearPlan> plan_;  // uses the weights and norm above
};

// A LayerNormalization that is not fused with a linear layer, computed by an AddLayerNormPlan.
class SumNormCompute : public StepCompute {
 public:
  SumNormCompute(const Graph& graph, const SumNorm& norm, const Node& fused) : own_norm_(norm.norm) {
    spec_.node = norm.norm.node->Described();
    spec_.y = OutputSlot(fused, norm.y);
    spec_.norm = {own_norm_.epsilon, own_norm_.weight, own_norm_.bias};
    for (const Value value : norm.operands) {
      Operand& operand = spec_.operands.emplace_back();
      operand.name = ErrorText("'", value->name, "'");
      if (const std::optional<Constant> constant = graph.ConstantOf(value)) {
        operand.own = constant->Floats();
        operand.values = {constant->shape, operand.own};
      } else {
        operand.slot = InputSlot(fused, value);
      }
    }
    MakePlan();
  }

  // Reads what Write has written after the step kind.
  SumNormCompute(ContextReader& reader, const IoSlots& slots) {
    RecordReader record(reader, slots);
    Visit(record, spec_);
    MakePlan();
  }

  void Write(ContextWriter& writer) const override {
    RecordWriter record(writer);
    record.Int(static_cast<int64_t>(StepKind::kSumNorm));
    Visit(record, spec_);
  }

  OutputSlots Outputs() const override { return {spec_.y}; }

  void Run(const OrtApi& ort, OrtKernelContext& context, Host& host) const override {
    if (!spec_.y) return;
    CallMemory memory(host);
    std::vector<SumOperand> operands;
    for (const Operand& operand : spec_.operands) {
      if (!operand.slot) {
        operands.push_back({operand.name, operand.values.values.data(), operand.values.shape});
        continue;
      }
      const FloatInput input = memory.AlignedInput(ReadFloats(ort, context, *operand.slot, memory));
      operands.push_back({operand.name, input.data, input.shape});
    }
    const Shape shape = plan_->Shape(operands, spec_.node);
    const FloatOutput y(ort, context, *spec_.y, shape, memory);
    plan_->Run(host, operands, shape, y.data());
    y.Finish();
  }

 private:
  struct Operand {
    std::string name;            // for error messages
    std::optional<size_t> slot;  // nullopt for a constant
    FloatTensor values;          // of the constant
    std::vector<float> own;      // owner of `values`, unless they belong to a file
  };
  struct Spec {
    std::string node;
    std::optional<size_t> y;  // nullopt if no node reads the output
    NormSpec norm;
    std::vector<Operand> operands;
  };

  template <typename Archive, typename AnySpec>
  static void Visit(Archive& archive, AnySpec& spec) {
    archive.String(spec.node);
    archive.Output(spec.y);
    VisitNorm(archive, spec.norm);
    archive.List(spec.operands, kMostSumOperands, "the number of operands of a normalization", [&](auto& operand) {
      archive.String(operand.name);
      archive.Input(operand.slot);
      if (!operand.slot) archive.Tensor(operand.values, "an operand of a normalization");
    });
  }

  void MakePlan() {
    if (spec_.operands.empty()) throw OpError("a normalization has no operands");
    plan_.emplace(ArgsOf(spec_.norm, spec_.norm.weight.size()), ActiveFeatures());
  }

  Spec spec_;
  Norm own_norm_;                         // empty if it belongs to a file
  std::optional<AddLayerNormPlan> plan_;  // uses the norm above
};

// A step that copies an input of the group to an output, with optional clipping.
class CopyCompute : public StepCompute {
 public:
  CopyCompute(const Copy& copy, const Node& fused)
      : x_(InputSlot(fused, copy.from)), y_(OutputSlot(fused, copy.to)), bounds_(copy.bounds) {}

  // Reads what Write has written after the step kind.
  CopyCompute(ContextReader& reader, const IoSlots& slots) {
    RecordReader record(reader, slots);
    Visit(record, *this);
  }

  void Write(ContextWriter& writer) const override {
    RecordWriter record(writer);
    record.Int(static_cast<int64_t>(StepKind::kCopy));
    Visit(record, *this);
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
  template <typename Archive, typename Copied>
  static void Visit(Archive& archive, Copied& step) {
    archive.Input(step.x_);
    archive.Output(step.y_);
    VisitBounds(archive, step.bounds_);
  }

  size_t x_ = 0;
  std::optional<size_t> y_;  // nullopt if no node reads the output
  std::optional<Bounds> bounds_;
};

std::unique_ptr<StepCompute> ReadStep(ContextReader& reader, const IoSlots& slots, bool reproducible) {
  const int64_t kind = reader.Int();
  switch (static_cast<StepKind>(kind)) {
    case StepKind::kLayers:
      return std::make_unique<LinearCompute>(reader, slots, reproducible);
    case StepKind::kAttention:
      return std::make_unique<AttentionCompute>(reader, slots, reproducible);
    case StepKind::kCopy:
      return std::make_unique<CopyCompute>(reader, slots);
    case StepKind::kSumNorm:
      return std::make_unique<SumNormCompute>(reader, slots);
  }
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

GroupCompute::GroupCompute(const HostApi& host, const Graph& graph, const Group& group, const Node& fused,
                           bool reproducible)
    : GroupCompute(host) {
  if (group.sum_norm) steps_.push_back(std::make_unique<SumNormCompute>(graph, *group.sum_norm, fused));
  for (const Step& step : group.steps) {
    if (step.attention) {
      steps_.push_back(std::make_unique<AttentionCompute>(graph, step, fused, reproducible));
    } else {
      steps_.push_back(std::make_unique<LinearCompute>(step, fused));
    }
  }
  for (const Copy& copy : group.copies) steps_.push_back(std::make_unique<CopyCompute>(copy, fused));
}

GroupCompute::GroupCompute(const HostApi& host, std::shared_ptr<const ContextFile> file, const std::string& name,
                           const Node& node, const Node& fused, bool reproducible)
    : GroupCompute(host) {
  file_ = std::move(file);
  const IoSlots slots{node, fused};
  ContextReader reader = file_->Group(name);
  std::vector<bool> is_made(fused.outputs().size());
  const int64_t count = reader.Int();
  for (int64_t i = 0; i < count; ++i) {
    std::unique_ptr<StepCompute> step = ReadStep(reader, slots, reproducible);
    for (const std::optional<size_t>& output : step->Outputs()) {
      if (!output) continue;
      if (is_made[*output]) throw OpError(ErrorText("two steps compute output ", *output));
      is_made[*output] = true;
    }
    steps_.push_back(std::move(step));
  }
  reader.End();
  if (std::ranges::find(is_made, false) != is_made.end()) {
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
