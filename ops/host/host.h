// The interface between a plan and its caller: threads, and memory for the length of a call. Free of ONNX Runtime, so
// that adapters, tests and benchmarks run the same plans.
#pragma once

#include <cstddef>
#include <cstdint>

#include "host/aligned.h"

namespace ortolan {

class Host {
 public:
  virtual ~Host() = default;

  // Call body(i) for 0 <= i < count, on several threads if the host has them; directly if count is 1. body must not
  // throw.
  template <typename Body>
  void ParallelFor(int64_t count, const Body& body) {
    if (count == 1) return body(int64_t{0});
    if (count > 1) RunTasks(count, [](const void* user, int64_t i) { (*static_cast<const Body*>(user))(i); }, &body);
  }

 protected:
  using Task = void(const void* user, int64_t i);
  virtual void RunTasks(int64_t count, Task* task, const void* user) = 0;
  // Allocates at any alignment. Throws std::bad_alloc.
  virtual void* Allocate(size_t bytes) = 0;
  virtual void Free(void* data) noexcept = 0;

 private:
  friend class HostMemory;
};

// Host memory aligned to kScratchAlignment, freed at the end of the scope.
class HostMemory {
 public:
  HostMemory(Host& host, int64_t bytes)
      : host_(host), data_(host.Allocate(static_cast<size_t>(bytes + kScratchAlignment))) {}
  ~HostMemory() { host_.Free(data_); }
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;
  char* data() const { return AlignedAddress(data_); }

 private:
  Host& host_;
  void* data_;
};

}  // namespace ortolan
