// ONNX Runtime's C API for the provider: headers of version 29 (ops/ort/ep_headers.cmake). Files in this folder must
// not include the operators' adapters, which use older headers that define the same names.
#pragma once

#include <onnxruntime_c_api.h>

#include <stdexcept>
#include <string>

#include "host/op_error.h"

namespace ortolan::provider {

inline constexpr uint32_t kNewestApi = 29;  // newest version that this code supports
inline constexpr uint32_t kOldestApi = 23;  // first version with all functions that the provider needs
static_assert(ORT_API_VERSION >= kNewestApi);

inline constexpr const char* kProviderName = "OrtolanExecutionProvider";

// The API functions of the host. Lives as long as the factory.
struct HostApi {
  const OrtApiBase* base = nullptr;
  const OrtApi* ort = nullptr;
  const OrtEpApi* ep = nullptr;
  uint32_t version = 0;  // of `ort` and `ep`, from kOldestApi to kNewestApi
};

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
    return ort.CreateStatus(ORT_FAIL, "unknown error in Ortolan's execution provider");
  }
}

}  // namespace ortolan::provider
