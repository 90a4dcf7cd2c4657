#include "provider/compute.h"

#include <algorithm>
#include <new>
#include <utility>

#include "ort/broadcast.h"

namespace ortolan::provider {
namespace {

class SessionHost : public Host {
 public:
  SessionHost(const OrtApi& ort, const OrtKernelContext& context, Arena& arena)
      : ort_(ort), context_(context), arena_(arena) {}

 private:
  void RunTasks(int64_t count, Task* task, const void* user) override {
    struct Call {
      Task* task;
      const void* user;
    } call{task, user};
    const auto run = [](void* of, size_t i) {
      const Call& all = *static_cast<const Call*>(of);
      all.task(all.user, static_cast<int64_t>(i));
    };
    Check(ort_, ort_.KernelContext_ParallelFor(&context_, run, static_cast<size_t>(count), 0, &call));
  }
  void* Allocate(size_t bytes) override {
    OrtAllocator* const allocator = arena_.Of(context_);
    void* const data = allocator->Alloc(allocator, bytes);
    if (data == nullptr) throw std::bad_alloc();
    return data;
  }
  void Free(void* data) noexcept override {
    OrtAllocator* const allocator = arena_.Of(context_);
    allocator->Free(allocator, data);
  }

  const OrtApi& ort_;
  const OrtKernelContext& context_;
  Arena& arena_;
};

Shape ShapeOf(const OrtApi& ort, const OrtValue& value) {
  OrtTensorTypeAndShapeInfo* info = nullptr;
  Check(ort, ort.GetTensorTypeAndShape(&value, &info));
  const std::unique_ptr<OrtTensorTypeAndShapeInfo, decltype(ort.ReleaseTensorTypeAndShapeInfo)> held(
      info, ort.ReleaseTensorTypeAndShapeInfo);
  return DimensionsOf(ort, *info);
}

// A float input as it is now.
struct FloatInput {
  const float* data = nullptr;
  Shape shape;
};

FloatInput ReadInput(const OrtApi& ort, const OrtKernelContext& context, size_t index) {
  const OrtValue* value = nullptr;
  Check(ort, ort.KernelContext_GetInput(&context, index, &value));
  const void* data = nullptr;
  Check(ort, ort.GetTensorData(value, &data));
  return {static_cast<const float*>(data), ShapeOf(ort, *value)};
}

float* MakeOutput(const OrtApi& ort, OrtKernelContext& context, size_t index, const Shape& shape) {
  OrtValue* value = nullptr;
  Check(ort, ort.KernelContext_GetOutput(&context, index, shape.data(), shape.size(), &value));
  void* data = nullptr;
  Check(ort, ort.GetTensorMutableData(value, &data));
  return static_cast<float*>(data);
}

std::optional<size_t> FindPlace(const HostApi& host, const std::vector<Value>& values, Value value) {
  const std::string name = NameOf(host, value);
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i] != nullptr && NameOf(host, values[i]) == name) return i;
  }
  return std::nullopt;
}

size_t InputPlace(const HostApi& host, const Node& fused, Value value) {
  const std::optional<size_t> place = FindPlace(host, fused.inputs(), value);
  if (place) return *place;
  throw OpError(
      ErrorText("value '", NameOf(host, value), "' is no input of the node that ONNX Runtime made of its group"));
}

// Columns side by side, whose numbers are put into `numbers`.
NBitsWeight Joined(const std::vector<Layer>& layers, std::vector<uint8_t>& numbers) {
  NBitsWeight whole = std::get<NBitsWeight>(layers.front().weight);
  if (layers.size() == 1) return whole;
  const auto has_zero_points = [](const Layer& layer) {
    return !std::get<NBitsWeight>(layer.weight).zero_points.empty();
  };
  const bool any_zero_points = std::any_of(layers.begin(), layers.end(), has_zero_points);
  whole.n = 0;
  whole.scales.clear();
  whole.zero_points.clear();
  for (const Layer& layer : layers) {
    const NBitsWeight& w = std::get<NBitsWeight>(layer.weight);
    numbers.insert(numbers.end(), w.numbers, w.numbers + w.n * w.ColumnBytes());
    whole.n += w.n;
    whole.scales.insert(whole.scales.end(), w.scales.begin(), w.scales.end());
    if (w.zero_points.empty() && any_zero_points) {
      whole.zero_points.resize(whole.scales.size(), w.bits == 4 ? 8.0f : 128.0f);
    } else {
      whole.zero_points.insert(whole.zero_points.end(), w.zero_points.begin(), w.zero_points.end());
    }
  }
  whole.numbers = numbers.data();
  return whole;
}

}  // namespace

Arena::~Arena() {
  if (OrtAllocator* const allocator = allocator_.load()) ort_.ReleaseAllocator(allocator);
}

OrtAllocator* Arena::Of(const OrtKernelContext& context) {
  OrtAllocator* held = allocator_.load();
  if (held != nullptr) return held;
  OrtMemoryInfo* info = nullptr;
  Check(ort_, ort_.CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &info));
  OrtAllocator* found = nullptr;
  OrtStatus* const status = ort_.KernelContext_GetAllocator(&context, info, &found);
  ort_.ReleaseMemoryInfo(info);
  Check(ort_, status);
  if (allocator_.compare_exchange_strong(held, found)) return found;
  ort_.ReleaseAllocator(found);  // another call was faster
  return held;
}

// A step with its numbers packed.
class GroupCompute::StepCompute {
 public:
  StepCompute(const HostApi& host, const Step& step, const Node& fused)
      : node_(step.layers.front().Described()),
        x_name_(NameOf(host, step.X())),
        x_(InputPlace(host, fused, step.X())),
        y_(FindPlace(host, fused.outputs(), step.y)) {
    if (step.residual != nullptr) residual_ = InputPlace(host, fused, step.residual);
    LinearLayer layer = Pack(step.layers);
    SetBias(step.layers);
    layer.activation = step.activation;
    if (step.IsGated()) layer.gated_columns = step.layers.front().Columns();
    if (step.norm) {
      norm_weight_ = step.norm->weight;
      norm_bias_ = step.norm->bias;
      LayerNormArgs& norm = layer.norm.emplace();
      norm.epsilon = step.norm->epsilon;
      norm.weight = norm_weight_.data();
      norm.bias = norm_bias_.data();
    }
    plan_.emplace(layer, ActiveFeatures());
  }

  void Run(const OrtApi& ort, OrtKernelContext& context, Host& host) const {
    if (!y_) return;
    const FloatInput x = ReadInput(ort, context, x_);
    Shape shape = x.shape;
    LinearCall call;
    call.m = plan_->CountRows(shape, node_, x_name_);
    call.x = x.data;
    call.bias = bias_.empty() ? nullptr : bias_.data();
    shape.back() = plan_->layer().Columns();
    if (residual_) return RunWithResidual(ort, context, host, call, shape);
    call.y = MakeOutput(ort, context, *y_, shape);
    plan_->Run(host, call);
  }

 private:
  LinearLayer Pack(const std::vector<Layer>& layers) {
    if (std::holds_alternative<NBitsWeight>(layers.front().weight)) {
      std::vector<uint8_t> numbers;
      return groups_.emplace(Joined(layers, numbers)).Layer();
    }
    std::vector<Int8Weight> parts;
    for (const Layer& layer : layers) parts.push_back(std::get<Int8Weight>(layer.weight));
    return columns_.emplace(parts).Layer();
  }

  void SetBias(const std::vector<Layer>& layers) {
    if (std::all_of(layers.begin(), layers.end(), [](const Layer& layer) { return layer.bias.empty(); })) return;
    for (const Layer& layer : layers) {
      const size_t end = bias_.size() + static_cast<size_t>(layer.Columns());
      bias_.insert(bias_.end(), layer.bias.begin(), layer.bias.end());
      bias_.resize(end);
    }
  }

  void RunWithResidual(const OrtApi& ort, OrtKernelContext& context, Host& host, LinearCall call,
                       const Shape& shape) const {
    const FloatInput other = ReadInput(ort, context, *residual_);
    const std::optional<Shape> sum_shape = BroadcastShape(shape, other.shape);
    const bool fits = sum_shape && (!plan_->layer().norm || sum_shape->back() == shape.back());
    if (!fits) {
      throw OpError(ErrorText(node_, ": what is added to its output has shape ", ShapeText(other.shape),
                              ", which does not fit ", ShapeText(shape),
                              ". Feed the model inputs of the shapes it was exported for."));
    }
    call.y = MakeOutput(ort, context, *y_, *sum_shape);
    plan_->RunWithResidual(host, call, shape, {other.data, other.shape}, *sum_shape);
  }

  std::string node_, x_name_;
  size_t x_;
  std::optional<size_t> y_;  // none: nobody reads it
  std::optional<size_t> residual_;
  std::optional<NBitsGroups> groups_;
  std::optional<Int8Columns> columns_;
  std::vector<float> bias_, norm_weight_, norm_bias_;
  std::optional<LinearPlan> plan_;  // of the above
};

GroupCompute::GroupCompute(const HostApi& host, const Group& group, const Node& fused)
    : OrtNodeComputeInfo{}, ort_(*host.ort), arena_(*host.ort) {
  for (const Step& step : group.steps) steps_.push_back(std::make_unique<StepCompute>(host, step, fused));
  ort_version_supported = host.version;
  CreateState = [](OrtNodeComputeInfo* self, OrtNodeComputeContext*, void** state) -> OrtStatus* {
    *state = self;
    return nullptr;
  };
  Compute = [](OrtNodeComputeInfo* self, void*, OrtKernelContext* context) -> OrtStatus* {
    GroupCompute& group = *static_cast<GroupCompute*>(self);
    return Guarded(group.ort_, [&] { group.Run(*context); });
  };
  ReleaseState = [](OrtNodeComputeInfo*, void*) {};
}

GroupCompute::~GroupCompute() = default;

void GroupCompute::Run(OrtKernelContext& context) {
  SessionHost host(ort_, context, arena_);
  for (const std::unique_ptr<StepCompute>& step : steps_) step->Run(ort_, context, host);
}

}  // namespace ortolan::provider
