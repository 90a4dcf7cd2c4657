// Pieces of work on ORT's threads, each with scratch memory of its own.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>

#include "support/ort_op.h"

namespace ortolan {

inline constexpr int64_t kScratchAlignment = 64;

inline int64_t Aligned(int64_t bytes) {
  return (bytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
}

inline char* AlignedData(const Scratch& scratch) {
  return reinterpret_cast<char*>(Aligned(static_cast<int64_t>(reinterpret_cast<uintptr_t>(scratch.data()))));
}

// Runs body(item, scratch of bytes) on ORT's threads.
template <typename Body>
void ForEachWithScratch(const Ort::KernelContext& context, const std::string& node, int64_t items, int64_t bytes,
                        const Body& body) {
  std::atomic<bool> no_memory{false};
  ParallelFor(context, items, [&](int64_t item) {
    std::optional<Scratch> scratch;
    try {
      scratch.emplace(context, static_cast<size_t>(bytes + kScratchAlignment));
    } catch (...) {
      no_memory = true;
      return;
    }
    body(item, AlignedData(*scratch));
  });
  if (no_memory) throw OpError(ErrorText(node, ": no memory for ", bytes, " bytes of scratch a thread"));
}

}  // namespace ortolan
