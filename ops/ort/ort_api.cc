#include "ort/ort_api.h"

#include <new>

namespace ortolan {

std::vector<int64_t> DimensionsOf(const OrtApi& ort, const OrtTensorTypeAndShapeInfo& info) {
  std::vector<int64_t> shape(Get<size_t>(ort, ort.GetDimensionsCount, &info));
  Check(ort, ort.GetDimensions(&info, shape.data(), shape.size()));
  return shape;
}

std::vector<int64_t> ShapeOf(const OrtApi& ort, const OrtValue& tensor) {
  return DimensionsOf(ort, *Make<&OrtApi::ReleaseTensorTypeAndShapeInfo>(ort, ort.GetTensorTypeAndShape, &tensor));
}

ONNXTensorElementDataType ElementTypeOf(const OrtApi& ort, const OrtValue& tensor) {
  const auto info = Make<&OrtApi::ReleaseTensorTypeAndShapeInfo>(ort, ort.GetTensorTypeAndShape, &tensor);
  return Get<ONNXTensorElementDataType>(ort, ort.GetTensorElementType, info.get());
}

Arena::~Arena() {
  if (OrtAllocator* const allocator = allocator_.load()) ort_.ReleaseAllocator(allocator);
}

OrtAllocator& Arena::Allocator(const OrtKernelContext& context) {
  OrtAllocator* held = allocator_.load();
  if (held != nullptr) return *held;
  const auto cpu =
      Make<&OrtApi::ReleaseMemoryInfo>(ort_, ort_.CreateCpuMemoryInfo, OrtArenaAllocator, OrtMemTypeDefault);
  auto found = Make<&OrtApi::ReleaseAllocator>(ort_, ort_.KernelContext_GetAllocator, &context, cpu.get());
  return allocator_.compare_exchange_strong(held, found.get()) ? *found.release()
                                                               : *held;  // or another call was faster
}

void SessionHost::RunTasks(int64_t count, Task* task, const void* user) {
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

void* SessionHost::Allocate(size_t bytes) {
  OrtAllocator& allocator = arena_.Allocator(context_);
  void* const data = allocator.Alloc(&allocator, bytes);
  if (data == nullptr) throw std::bad_alloc();
  return data;
}

void SessionHost::Free(void* data) noexcept {
  OrtAllocator& allocator = arena_.Allocator(context_);
  allocator.Free(&allocator, data);
}

}  // namespace ortolan
