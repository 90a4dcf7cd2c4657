// Packs weights panel by panel on all cores, on threads of its own: ONNX Runtime's are not available while it creates a
// session.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace ortolan {

// Bytes of packed weights worth a thread.
inline constexpr int64_t kPackThreadBytes = int64_t{1} << 20;

// Call pack(panel, scratch) for all panels, with scratch_bytes of scratch per thread. pack must not throw.
template <typename Pack>
void ForEachPanel(int64_t panels, int64_t panel_bytes, int64_t scratch_bytes, const Pack& pack) {
  const int64_t most = std::max<int64_t>(1, std::thread::hardware_concurrency());
  const int64_t threads = std::clamp<int64_t>(panels * panel_bytes / kPackThreadBytes, 1, std::min(most, panels));
  std::vector<int8_t> scratch(static_cast<size_t>(threads * scratch_bytes));
  std::atomic<int64_t> next{0};
  const auto work = [&](int64_t thread) {
    for (int64_t panel = next++; panel < panels; panel = next++) pack(panel, scratch.data() + thread * scratch_bytes);
  };
  std::vector<std::jthread> others;
  others.reserve(static_cast<size_t>(threads));
  try {
    for (int64_t thread = 1; thread < threads; ++thread) others.emplace_back(work, thread);
  } catch (const std::system_error&) {  // no more threads available: the existing ones do the work
  }
  work(0);
}

}  // namespace ortolan
