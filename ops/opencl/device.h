// The device of this process: the first GPU of any platform, else the first device. Chosen once, never given back.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "opencl/cl_api.h"

namespace ortolan::opencl {

struct DeviceInfo {
  DeviceId id;
  std::string name;
  std::string platform;
  std::string version;
  std::string driver;
  std::string extensions;
  bool is_gpu;
  bool shares_memory;  // with the host
  uint32_t compute_units;
  uint64_t global_bytes;
  size_t most_work_group;

  bool Has(const std::string& extension) const {
    return (" " + extensions + " ").find(" " + extension + " ") != std::string::npos;
  }
};

// All devices, the one that is used first. Throws ClError.
std::vector<DeviceInfo> ListDevices(const ClApi& api);

// A buffer that grows and keeps what it has.
class Scratch {
 public:
  // At least so many bytes, whose contents are lost where it grows. Throws ClError.
  Memory OfBytes(const ClApi& api, Context context, size_t bytes);

 private:
  Memory memory_ = nullptr;
  size_t bytes_ = 0;
};

class Device {
 public:
  // Throws ClError. A device that could not be opened is tried again by the next call.
  static Device& Get();

  const ClApi& api() const { return api_; }
  const DeviceInfo& info() const { return info_; }
  Context context() const { return context_; }
  Queue queue() const { return queue_; }
  // Held while anything below is used: calls take turns, for the device is one.
  std::mutex& mutex() { return mutex_; }
  // The kernels with these options, built once. Throws ClError with the compiler's words.
  Program ProgramWith(const std::string& options);

  Scratch inputs, outputs;

 private:
  Device();

  ClApi api_;
  DeviceInfo info_;
  Context context_;
  Queue queue_;
  std::mutex mutex_;
  std::map<std::string, Program> programs_;
};

}  // namespace ortolan::opencl
