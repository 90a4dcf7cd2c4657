// Builds an error message from parts: ErrorText("k is ", k, ", expected ", expected).
#pragma once

#include <sstream>
#include <string>

namespace ortolan {

template <typename... Parts>
std::string ErrorText(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

}  // namespace ortolan
