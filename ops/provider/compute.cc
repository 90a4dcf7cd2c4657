#include "provider/compute.h"

#include <algorithm>
#include <new>
#include <utility>

#include "ort/broadcast.h"
#include "provider/attention_compute.h"
#include "provider/call_values.h"
#include "provider/packed_layers.h"

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

namespace {

// What one LinearPlan computes.
class LinearCompute : public StepCompute {
 public:
  LinearCompute(const HostApi& host, const Step& step, const Node& fused)
      : node_(step.layers.front().Described()),
        x_name_(NameOf(host, step.X())),
        x_(InputPlace(host, fused, step.X())),
        y_(OutputPlace(host, fused, step.y)),
        packed_(step.layers) {
    if (step.residual != nullptr) residual_ = InputPlace(host, fused, step.residual);
    LinearLayer layer = packed_.Linear();
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

  void Run(const OrtApi& ort, OrtKernelContext& context, Host& host) const override {
    if (!y_) return;
    const FloatInput x = ReadInput(ort, context, x_);
    Shape shape = x.shape;
    LinearCall call;
    call.m = plan_->CountRows(shape, node_, x_name_);
    call.x = x.data;
    call.bias = packed_.Bias();
    shape.back() = plan_->layer().Columns();
    if (residual_) return RunWithResidual(ort, context, host, call, shape);
    call.y = MakeOutput(ort, context, *y_, shape);
    plan_->Run(host, call);
  }

 private:
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
  PackedLayers packed_;
  std::vector<float> norm_weight_, norm_bias_;
  std::optional<LinearPlan> plan_;  // of the above
};

}  // namespace

GroupCompute::GroupCompute(const HostApi& host, const Group& group, const Node& fused)
    : OrtNodeComputeInfo{}, ort_(*host.ort), arena_(*host.ort) {
  for (const Step& step : group.steps) {
    if (step.attention) {
      steps_.push_back(std::make_unique<AttentionCompute>(host, step, fused));
    } else {
      steps_.push_back(std::make_unique<LinearCompute>(host, step, fused));
    }
  }
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
