// Chooses whether the CPU or a device computes the calls of a weight: whichever was faster in the first calls. These
// are real calls, so threads, caches and system load are those of use. Both give the same bits.
//
// Row counts are grouped by number of bits (1, 2 to 3, 4 to 7, …) and judged by seconds per row. The first call on each
// side is a warm-up. Then the sides alternate for kTimedCalls each, and the side with the shortest time is used from
// then on.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>

namespace ortolan {

class DeviceChoice {
 public:
  static constexpr int kTimedCalls = 3;

  // Return whether the device should compute the next call of m >= 1 rows.
  bool Takes(int64_t m);
  void Took(int64_t m, bool on_device, double seconds);

 private:
  struct Side {
    int calls = 0;
    double row_seconds = 0;  // minimum of the timed calls
  };
  struct Sides {
    Side cpu, device;
  };
  Sides& SidesOf(int64_t m);

  std::mutex mutex_;
  std::array<Sides, 64> sides_;
};

}  // namespace ortolan
