// Size checks for files that are embedded in compiled models. They are stored as Base64, because ONNX Runtime ends
// texts at the first zero byte. This code does not depend on ONNX Runtime.
#pragma once

#include <cstdint>
#include <limits>
#include <span>

#include "host/op_error.h"

namespace ortolan::provider {

// A model is a protocol buffer, whose size must be below 2 GiB.
inline constexpr int64_t kMostEmbeddedText = std::numeric_limits<int32_t>::max();

inline int64_t Base64Size(int64_t bytes) { return (bytes + 2) / 3 * 4; }

// Check the sizes of the files embedded in one model. Throws OpError if they exceed its limit.
inline void CheckEmbedded(std::span<const int64_t> files) {
  int64_t left = kMostEmbeddedText;
  for (const int64_t bytes : files) {
    const bool fits = bytes <= left && Base64Size(bytes) <= left;
    if (fits) {
      left -= Base64Size(bytes);
      continue;
    }
    int64_t all = 0;
    for (const int64_t one : files) all += one;
    throw OpError(
        ErrorText("the packed weights of ", files.size(), " groups take ", all,
                  " bytes, and a third more as Base64: too much for a model file, whose limit is 2 GiB. "
                  "Set the session's ep.context_embed_mode to 0, so that they are stored in a separate file"));
  }
}

}  // namespace ortolan::provider
