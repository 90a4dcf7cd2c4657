#include "provider/compute.h"

#include <new>
#include <utility>

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
  Shape shape;
  size_t rank = 0;
  OrtStatus* status = ort.GetDimensionsCount(info, &rank);
  if (status == nullptr) {
    shape.resize(rank);
    status = ort.GetDimensions(info, shape.data(), rank);
  }
  ort.ReleaseTensorTypeAndShapeInfo(info);
  Check(ort, status);
  return shape;
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

LayerCompute::LayerCompute(const HostApi& host, const std::string& node, const std::string& x_name, StoredLayer stored)
    : OrtNodeComputeInfo{},
      ort_(*host.ort),
      node_(node),
      x_name_(x_name),
      groups_(stored.weight),
      bias_(std::move(stored.bias)),
      plan_(groups_.Layer(), ActiveFeatures()),
      arena_(*host.ort) {
  ort_version_supported = host.version;
  CreateState = [](OrtNodeComputeInfo* self, OrtNodeComputeContext*, void** state) -> OrtStatus* {
    *state = self;
    return nullptr;
  };
  Compute = [](OrtNodeComputeInfo* self, void*, OrtKernelContext* context) -> OrtStatus* {
    LayerCompute& layer = *static_cast<LayerCompute*>(self);
    return Guarded(layer.ort_, [&] { layer.Run(*context); });
  };
  ReleaseState = [](OrtNodeComputeInfo*, void*) {};
}

void LayerCompute::Run(OrtKernelContext& context) {
  const OrtValue* x = nullptr;
  Check(ort_, ort_.KernelContext_GetInput(&context, 0, &x));
  const void* data = nullptr;
  Check(ort_, ort_.GetTensorData(x, &data));
  Shape shape = ShapeOf(ort_, *x);
  LinearCall call;
  call.m = plan_.CountRows(shape, node_, x_name_);
  call.x = static_cast<const float*>(data);
  call.bias = bias_.empty() ? nullptr : bias_.data();
  shape.back() = plan_.layer().Columns();
  OrtValue* y = nullptr;
  Check(ort_, ort_.KernelContext_GetOutput(&context, 0, shape.data(), shape.size(), &y));
  void* to = nullptr;
  Check(ort_, ort_.GetTensorMutableData(y, &to));
  call.y = static_cast<float*>(to);
  SessionHost host(ort_, context, arena_);
  plan_.Run(host, call);
}

}  // namespace ortolan::provider
