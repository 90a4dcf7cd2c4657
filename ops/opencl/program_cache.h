// Files of compiled programs (program.h).
#pragma once

#include <optional>
#include <string>

namespace ortolan::opencl {

// Return the contents stored under the key, or nothing if they are missing or damaged.
std::optional<std::string> ReadCached(const std::string& key);

// Store the contents, if the folder is writable.
void WriteCached(const std::string& key, const std::string& contents);

}  // namespace ortolan::opencl
