// ONNX Runtime's C API, for the operators' adapters (ort_op.h) and the execution provider. The headers are those of API
// 29 (ort_headers.cmake). Each side asks its host for an older API and calls only functions that this API has.
#pragma once

#include <onnxruntime_c_api.h>

#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "host/host.h"
#include "host/op_error.h"

namespace ortolan {

// An error returned by the host, which is returned to the host unchanged.
class HostError : public std::runtime_error {
 public:
  HostError(OrtErrorCode code, const std::string& text) : std::runtime_error(text), code_(code) {}
  OrtErrorCode code() const { return code_; }

 private:
  OrtErrorCode code_;
};

// Throws HostError unless the status is null.
inline void Check(const OrtApi& ort, OrtStatus* status) {
  if (status == nullptr) return;
  const HostError error(ort.GetErrorCode(status), ort.GetErrorMessage(status));
  ort.ReleaseStatus(status);
  throw error;
}

// Run a function and convert exceptions into a status, because exceptions must not cross the C boundary.
template <typename Function>
OrtStatus* Guarded(const OrtApi& ort, const Function& function) noexcept {
  try {
    function();
    return nullptr;
  } catch (const HostError& error) {
    return ort.CreateStatus(error.code(), error.what());
  } catch (const OpError& error) {
    return ort.CreateStatus(ORT_INVALID_ARGUMENT, error.what());
  } catch (const std::exception& error) {
    return ort.CreateStatus(ORT_FAIL, error.what());
  } catch (...) {
    return ort.CreateStatus(ORT_FAIL, "unknown error in Ortolan's library");
  }
}

// Call a function of the API whose last parameter is its result, and return that. Throws HostError.
template <typename T, typename Function, typename... Args>
T Get(const OrtApi& ort, Function* function, Args... args) {
  T result{};
  Check(ort, function(args..., &result));
  return result;
}

// An object of the host, released by the function OrtApi::*kRelease.
template <auto kRelease>
struct Release {
  const OrtApi* ort = nullptr;
  void operator()(auto* object) const { (ort->*kRelease)(object); }
};
template <typename T>
T ReleasedType(void (*OrtApi::*)(T*));
template <auto kRelease>
using Owned = std::unique_ptr<decltype(ReleasedType(kRelease)), Release<kRelease>>;

// Like Get, for an object that the caller owns.
template <auto kRelease, typename Function, typename... Args>
Owned<kRelease> Make(const OrtApi& ort, Function* function, Args... args) {
  return {Get<typename Owned<kRelease>::pointer>(ort, function, args...), {&ort}};
}

std::vector<int64_t> DimensionsOf(const OrtApi& ort, const OrtTensorTypeAndShapeInfo& info);
std::vector<int64_t> ShapeOf(const OrtApi& ort, const OrtValue& tensor);
ONNXTensorElementDataType ElementTypeOf(const OrtApi& ort, const OrtValue& tensor);

// The arena allocator of a session, requested by the first call that needs it. While it is held, the arena stays alive.
class Arena {
 public:
  explicit Arena(const OrtApi& ort) : ort_(ort) {}
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  // Safe to call from several threads.
  OrtAllocator& Allocator(const OrtKernelContext& context);

 private:
  const OrtApi& ort_;
  std::atomic<OrtAllocator*> allocator_{nullptr};
};

// The host of plans during a call: the session's intra-op threads and its arena.
class SessionHost : public Host {
 public:
  SessionHost(const OrtApi& ort, const OrtKernelContext& context, Arena& arena)
      : ort_(ort), context_(context), arena_(arena) {}

 private:
  void RunTasks(int64_t count, Task* task, const void* user) override;
  void* Allocate(size_t bytes) override;
  void Free(void* data) noexcept override;

  const OrtApi& ort_;
  const OrtKernelContext& context_;
  Arena& arena_;
};

}  // namespace ortolan
