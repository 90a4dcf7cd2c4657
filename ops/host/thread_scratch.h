// Runs pieces of work on a host's threads, each with scratch memory.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "host/host.h"

namespace ortolan {

// A pool with one scratch buffer per concurrent thread. It hands out the last returned buffer first, while it is still
// in a cache.
class ScratchPool {
 public:
  ScratchPool(Host& host, int64_t bytes) : host_(host), bytes_(bytes) {}

  // Return null if memory is exhausted.
  char* Take() noexcept {
    const std::lock_guard lock(mutex_);
    try {
      if (free_.empty()) {
        free_.reserve(all_.size() + 1);
        free_.push_back(all_.emplace_back(std::make_unique<HostMemory>(host_, bytes_))->data());
      }
    } catch (...) {
      failed_ = true;
      return nullptr;
    }
    char* const piece = free_.back();
    free_.pop_back();
    return piece;
  }
  void GiveBack(char* piece) noexcept {
    const std::lock_guard lock(mutex_);
    free_.push_back(piece);  // capacity was reserved in Take
  }
  bool failed() const { return failed_; }

 private:
  Host& host_;
  int64_t bytes_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<HostMemory>> all_;
  std::vector<char*> free_;
  bool failed_ = false;
};

// Call body(item, scratch), with `bytes` of scratch, for 0 <= item < items on the host's threads. Throws
// std::bad_alloc.
template <typename Body>
void ForEachWithScratch(Host& host, int64_t items, int64_t bytes, const Body& body) {
  ScratchPool pool(host, bytes);
  host.ParallelFor(items, [&](int64_t item) {
    char* const scratch = pool.Take();
    if (scratch == nullptr) return;
    body(item, scratch);
    pool.GiveBack(scratch);
  });
  if (pool.failed()) throw std::bad_alloc();
}

}  // namespace ortolan
