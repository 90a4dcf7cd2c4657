// Files of compiled programs: see program.h.
#pragma once

#include <optional>
#include <string>

namespace ortolan::opencl {

// The contents that were stored under the key, or nothing where there are none or they are damaged.
std::optional<std::string> ReadCached(const std::string& key);

// Keeps them, if the folder can be written.
void WriteCached(const std::string& key, const std::string& contents);

}  // namespace ortolan::opencl
