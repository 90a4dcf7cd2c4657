// A Host for tests and benchmarks, with its own threads and a limit on allocations.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <thread>
#include <vector>

#include "host/host.h"

namespace ortolan {

class TestHost : public Host {
 public:
  explicit TestHost(int threads, int64_t most_bytes = INT64_MAX) : threads_(threads), most_bytes_(most_bytes) {}

 private:
  void RunTasks(int64_t count, Task* task, const void* user) override {
    std::atomic<int64_t> next{0};
    const auto work = [&] {
      for (int64_t i = next++; i < count; i = next++) task(user, i);
    };
    std::vector<std::jthread> others;
    for (int i = 1; i < threads_; ++i) others.emplace_back(work);
    work();
  }
  // The limit applies to each allocation, not to their sum.
  void* Allocate(size_t bytes) override {
    void* const data = static_cast<int64_t>(bytes) <= most_bytes_ ? std::malloc(bytes) : nullptr;
    if (data == nullptr) throw std::bad_alloc();
    return data;
  }
  void Free(void* data) noexcept override { std::free(data); }

  int threads_;
  int64_t most_bytes_;
};

}  // namespace ortolan
