// Addresses in matrices with any row stride in bytes. Local to each file that includes it.
#pragma once

#include <cstdint>

namespace ortolan {
namespace {

template <typename T>
T* AtByte(T* from, int64_t bytes) {
  return reinterpret_cast<T*>(const_cast<char*>(reinterpret_cast<const char*>(from)) + bytes);
}

}  // namespace
}  // namespace ortolan
