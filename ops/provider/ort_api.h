// Versions of the API that the provider supports, and the host's functions.
#pragma once

#include "ort/ort_api.h"

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

}  // namespace ortolan::provider
