// Which side computes calls of a weight, the CPU or a device: the faster one of the first calls, as they come, so that
// threads, caches and the other work of the machine are those of use. Answers have the same bits on both.
//
// Calls whose numbers of rows have as many bits (1, 2 to 3, 4 to 7, …) are judged together, by the seconds of a row.
// The first call of each side is not counted: it warms up. Then both get kTimedCalls in turn; the least time wins, for
// good.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>

namespace ortolan {

class DeviceChoice {
 public:
  static constexpr int kTimedCalls = 3;

  // Whether the next call of m rows, 1 or more, is for the device.
  bool Takes(int64_t m);
  void Took(int64_t m, bool on_device, double seconds);

 private:
  struct Side {
    int calls = 0;
    double row_seconds = 0;  // the least of the timed calls
  };
  struct Sides {
    Side cpu, device;
  };
  Sides& SidesOf(int64_t m);

  std::mutex mutex_;
  std::array<Sides, 64> sides_;
};

}  // namespace ortolan
