// The OpenCL device of this process: the first GPU of any platform, else the first device. Chosen once and never
// released.
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

// List all devices; the first is the one that is used. Throws ClError.
std::vector<DeviceInfo> ListDevices(const ClApi& api);

// A buffer that is kept and grows on demand.
class Scratch {
 public:
  // Return a buffer of at least `bytes`; growing discards its contents. Throws ClError.
  Memory OfBytes(const ClApi& api, Context context, size_t bytes);

 private:
  Memory memory_ = nullptr;
  size_t bytes_ = 0;
};

class Device {
 public:
  // Throws ClError. After a failure, the next call tries again.
  static Device& Get();

  const ClApi& api() const { return api_; }
  const DeviceInfo& info() const { return info_; }
  Context context() const { return context_; }
  Queue queue() const { return queue_; }
  // Held while any function below is used: there is one device, so calls take turns.
  std::mutex& mutex() { return mutex_; }
  // Return the kernels built with these options, built once. Throws ClError with the compiler's log.
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
