// What an operator says of a model or a feed that it cannot work with. Free of ONNX Runtime.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "host/error_text.h"

namespace ortolan {

// The user's model or feed is at fault; the text says which node and tensor, what was found and what was expected.
struct OpError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline std::string ShapeText(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return text + "]";
}

}  // namespace ortolan
