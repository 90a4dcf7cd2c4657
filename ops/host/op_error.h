// Errors in a user's model or feed. Free of ONNX Runtime.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "host/error_text.h"

namespace ortolan {

// An error of the user's model or feed. The message names the node and tensor, what was found and what was expected.
struct OpError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline std::string ShapeText(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return text + "]";
}

}  // namespace ortolan
