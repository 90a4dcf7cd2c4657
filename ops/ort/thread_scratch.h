// Pieces of work on ORT's threads, each with scratch memory of its own.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>

#include "ort/aligned.h"
#include "ort/ort_op.h"

namespace ortolan {

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
    body(item, AlignedAddress(scratch->data()));
  });
  if (no_memory) throw OpError(ErrorText(node, ": no memory for ", bytes, " bytes of scratch a thread"));
}

}  // namespace ortolan
