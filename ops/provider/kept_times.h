// Times of layers on this machine, from the file that the search of recipes writes (src/ortolan/times_file.py).
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ortolan::provider {

inline constexpr int64_t kMostBytes = int64_t{1} << 20;  // a larger file is not read
inline constexpr int64_t kMostDays = 90;                 // older times are not used

// A layer, and the names in the file of the two formats to compare.
struct TimedLayer {
  int64_t k = 0;
  int64_t n = 0;
  bool is_half = false;
  bool has_blocks = false;  // at least half of the weights are in zero blocks of 4 x 1
  std::string_view ours;    // empty if the search times no such layer
  std::string_view host;
};

// Kept times. The file is untrusted: lines that do not fit are skipped.
class KeptTimes {
 public:
  // host_version: the version of ONNX Runtime, such as "1.32.0". A missing file has no times.
  KeptTimes(const std::string& path, const std::string& host_version);

  // Return how many times as fast as ONNX Runtime our kernels are for a layer, as the geometric mean of all
  // measurements of such layers; nullopt without measurements.
  std::optional<double> Gain(const TimedLayer& layer) const;

 private:
  struct Line {
    int64_t k, n;
    bool is_half, has_blocks;
    std::vector<std::pair<std::string, double>> ms;
  };
  void Read(std::string_view text, std::string_view machine, std::chrono::sys_days today);

  std::vector<Line> lines_;
};

}  // namespace ortolan::provider
