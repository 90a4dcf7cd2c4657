#include "matmul/device_choice.h"

#include <algorithm>
#include <bit>

namespace ortolan {

DeviceChoice::Sides& DeviceChoice::SidesOf(int64_t m) {
  return sides_[static_cast<size_t>(std::bit_width(static_cast<uint64_t>(m)) - 1)];
}

bool DeviceChoice::Takes(int64_t m) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto& [cpu, device] = SidesOf(m);
  if (std::min(cpu.calls, device.calls) <= kTimedCalls) return device.calls <= cpu.calls;
  return device.row_seconds < cpu.row_seconds;
}

void DeviceChoice::Took(int64_t m, bool on_device, double seconds) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Sides& sides = SidesOf(m);
  Side& side = on_device ? sides.device : sides.cpu;
  if (side.calls > kTimedCalls) return;
  const double row_seconds = seconds / static_cast<double>(m);
  if (side.calls == 1 || (side.calls > 1 && row_seconds < side.row_seconds)) side.row_seconds = row_seconds;
  ++side.calls;
}

}  // namespace ortolan
