#include "opencl/device.h"

#include <algorithm>

#include "opencl/program.h"

namespace ortolan::opencl {
namespace {

// Return the text that get(bytes, value, needed) reports, without the null terminator.
template <typename Get>
std::string Text(const Get& get, const char* function) {
  size_t bytes = 0;
  Check(get(0, nullptr, &bytes), function);
  std::string text(bytes, '\0');
  Check(get(bytes, text.data(), nullptr), function);
  return text.substr(0, text.find('\0'));
}

std::string DeviceText(const ClApi& api, DeviceId id, uint32_t what) {
  const auto get = [&](size_t bytes, void* value, size_t* needed) {
    return api.clGetDeviceInfo(id, what, bytes, value, needed);
  };
  return Text(get, "clGetDeviceInfo");
}

template <typename T>
T DeviceValue(const ClApi& api, DeviceId id, uint32_t what) {
  T value{};
  Check(api.clGetDeviceInfo(id, what, sizeof(value), &value, nullptr), "clGetDeviceInfo");
  return value;
}

DeviceInfo Describe(const ClApi& api, DeviceId id, const std::string& platform) {
  DeviceInfo info;
  info.id = id;
  info.name = DeviceText(api, id, kDeviceName);
  info.platform = platform;
  info.version = DeviceText(api, id, kDeviceVersion);
  info.driver = DeviceText(api, id, kDriverVersion);
  info.extensions = DeviceText(api, id, kDeviceExtensions);
  info.is_gpu = (DeviceValue<uint64_t>(api, id, kDeviceType) & kDeviceTypeGpu) != 0;
  info.shares_memory = DeviceValue<uint32_t>(api, id, kDeviceSharesMemory) != 0;
  info.compute_units = DeviceValue<uint32_t>(api, id, kDeviceComputeUnits);
  info.global_bytes = DeviceValue<uint64_t>(api, id, kDeviceGlobalBytes);
  info.most_work_group = DeviceValue<size_t>(api, id, kDeviceWorkGroupSize);
  return info;
}

}  // namespace

std::vector<DeviceInfo> ListDevices(const ClApi& api) {
  // Both calls fail if there are no platforms, which is not an error here.
  uint32_t count = 0;
  if (api.clGetPlatformIDs(0, nullptr, &count) != 0) count = 0;
  std::vector<Platform> platforms(count);
  if (count > 0) Check(api.clGetPlatformIDs(count, platforms.data(), nullptr), "clGetPlatformIDs");
  std::vector<DeviceInfo> found;
  for (const Platform platform : platforms) {
    const auto get_name = [&](size_t bytes, void* value, size_t* needed) {
      return api.clGetPlatformInfo(platform, kPlatformName, bytes, value, needed);
    };
    const std::string name = Text(get_name, "clGetPlatformInfo");
    if (api.clGetDeviceIDs(platform, kDeviceTypeAll, 0, nullptr, &count) != 0) continue;
    std::vector<DeviceId> devices(count);
    Check(api.clGetDeviceIDs(platform, kDeviceTypeAll, count, devices.data(), nullptr), "clGetDeviceIDs");
    for (const DeviceId device : devices) found.push_back(Describe(api, device, name));
  }
  std::stable_partition(found.begin(), found.end(), [](const DeviceInfo& info) { return info.is_gpu; });
  if (found.empty()) throw ClError("OpenCL found no device. Install a driver for the device.");
  return found;
}

Memory Scratch::OfBytes(const ClApi& api, Context context, size_t bytes) {
  if (bytes <= bytes_) return memory_;
  if (memory_ != nullptr) Check(api.clReleaseMemObject(memory_), "clReleaseMemObject");
  memory_ = nullptr;
  bytes_ = 0;
  Status status = 0;
  const Memory memory = api.clCreateBuffer(context, kReadWrite | kAllocateOnHost, bytes, nullptr, &status);
  Check(status, "clCreateBuffer");
  memory_ = memory;
  bytes_ = bytes;
  return memory_;
}

Device& Device::Get() {
  static std::mutex mutex;
  static Device* device = nullptr;
  const std::lock_guard<std::mutex> lock(mutex);
  if (device == nullptr) device = new Device();
  return *device;
}

Device::Device() : api_(LoadClApi()), info_(ListDevices(api_).front()) {
  Status status = 0;
  context_ = api_.clCreateContext(nullptr, 1, &info_.id, nullptr, nullptr, &status);
  Check(status, "clCreateContext");
  queue_ = api_.clCreateCommandQueue(context_, info_.id, 0, &status);
  if (status != 0) api_.clReleaseContext(context_);
  Check(status, "clCreateCommandQueue");
}

Program Device::ProgramWith(const std::string& options) {
  const auto found = programs_.find(options);
  if (found != programs_.end()) return found->second;
  const Program program = BuildProgram(api_, context_, info_, options);
  programs_.emplace(options, program);
  return program;
}

}  // namespace ortolan::opencl
