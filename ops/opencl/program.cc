#include "opencl/program.h"

#include <algorithm>
#include <optional>

#include "host/error_text.h"
#include "opencl/program_cache.h"

namespace ortolan::opencl {
namespace {

// Characters of the compiler's log in an error.
constexpr size_t kMostLog = 1200;

// Dot products of packed bytes require OpenCL C 3.0.
constexpr const char* kDotExtension = "cl_khr_integer_dot_product";

std::string AllOptions(const DeviceInfo& device, const std::string& options) {
  return device.Has(kDotExtension) ? options + " -cl-std=CL3.0" : options;
}

class Builder {
 public:
  Builder(const ClApi& api, Context context, const DeviceInfo& device, const std::string& options)
      : api_(api), context_(context), device_(device), options_(options) {}

  // Return null if the driver refuses the binary, as after a driver update.
  Program FromBinary(const std::string& binary) const {
    const size_t bytes = binary.size();
    const auto* data = reinterpret_cast<const unsigned char*>(binary.data());
    Status of_binary = 0, status = 0;
    const Program program =
        api_.clCreateProgramWithBinary(context_, 1, &device_.id, &bytes, &data, &of_binary, &status);
    if (status != 0) return nullptr;
    if (of_binary == 0 && Build(program) == 0) return program;
    api_.clReleaseProgram(program);
    return nullptr;
  }

  Program FromSource() const {
    const char* text = kKernelSource;
    Status status = 0;
    const Program program = api_.clCreateProgramWithSource(context_, 1, &text, nullptr, &status);
    Check(status, "clCreateProgramWithSource");
    if (const Status built = Build(program); built != 0) {
      const std::string log = Log(program);
      api_.clReleaseProgram(program);
      throw ClError(ErrorText("clBuildProgram failed with ", built, ": ", log));
    }
    return program;
  }

  // Return an empty string if the driver provides no binary.
  std::string Binary(Program program) const {
    size_t bytes = 0;
    if (api_.clGetProgramInfo(program, kBinarySizes, sizeof(bytes), &bytes, nullptr) != 0) return "";
    std::string binary(bytes, '\0');
    char* data = binary.data();
    if (api_.clGetProgramInfo(program, kBinaries, sizeof(data), &data, nullptr) != 0) return "";
    return binary;
  }

 private:
  Status Build(Program program) const {
    return api_.clBuildProgram(program, 1, &device_.id, options_.c_str(), nullptr, nullptr);
  }

  std::string Log(Program program) const {
    size_t bytes = 0;
    api_.clGetProgramBuildInfo(program, device_.id, kBuildLog, 0, nullptr, &bytes);
    std::string log(bytes, '\0');
    api_.clGetProgramBuildInfo(program, device_.id, kBuildLog, bytes, log.data(), nullptr);
    return log.substr(0, std::min(log.find('\0'), kMostLog));
  }

  const ClApi& api_;
  Context context_;
  const DeviceInfo& device_;
  std::string options_;
};

}  // namespace

Program BuildProgram(const ClApi& api, Context context, const DeviceInfo& device, const std::string& options) {
  const Builder builder(api, context, device, AllOptions(device, options));
  const std::string key = ErrorText(device.platform, "\n", device.name, "\n", device.version, "\n", device.driver, "\n",
                                    AllOptions(device, options), "\n", kKernelSource);
  if (const std::optional<std::string> cached = ReadCached(key)) {
    if (const Program program = builder.FromBinary(*cached)) return program;
  }
  const Program program = builder.FromSource();
  if (const std::string binary = builder.Binary(program); !binary.empty()) WriteCached(key, binary);
  return program;
}

}  // namespace ortolan::opencl
