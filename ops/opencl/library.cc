// Implements the C interface: converts exceptions into error messages.
#include <algorithm>
#include <cstring>
#include <exception>

#include "host/error_text.h"
#include "opencl/interface.h"
#include "opencl/weight.h"

namespace ortolan::opencl {
namespace {

void Copy(const std::string& from, char* to, size_t bytes) {
  if (bytes == 0) return;
  const size_t length = std::min(from.size(), bytes - 1);
  std::memcpy(to, from.data(), length);
  to[length] = '\0';
}

// Return the result of function(), or `failed` and the error.
template <typename Result, typename Function>
Result Guarded(Result failed, OrtolanOpenClError* error, const Function& function) noexcept {
  try {
    return function();
  } catch (const std::exception& caught) {
    Copy(caught.what(), error->text, sizeof(error->text));
  }
  return failed;
}

std::string Line(const DeviceInfo& info) {
  return ErrorText(info.name, " (", info.is_gpu ? "GPU" : "no GPU", ", ", info.compute_units, " compute units, ",
                   info.global_bytes >> 20, " MiB ", info.shares_memory ? "shared with the CPU" : "of its own", "; ",
                   info.version, ", driver ", info.driver, ")");
}

int64_t List(char* text, int64_t bytes) noexcept {
  std::string lines;
  int64_t count = 0;
  try {
    for (const DeviceInfo& info : ListDevices(LoadClApi())) {
      lines += Line(info) + "\n";
      ++count;
    }
  } catch (const std::exception& caught) {
    lines = caught.what();
    count = 0;
  }
  Copy(lines, text, static_cast<size_t>(bytes));
  return count;
}

void* Open(const OrtolanOpenClWeight* weight, OrtolanOpenClError* error) noexcept {
  return Guarded(static_cast<Weight*>(nullptr), error, [&] { return new Weight(Device::Get(), *weight); });
}

void Close(void* weight) noexcept { delete static_cast<Weight*>(weight); }

int32_t Multiply(void* weight, const OrtolanOpenClCall* call, OrtolanOpenClError* error) noexcept {
  return Guarded(1, error, [&] {
    static_cast<Weight*>(weight)->Multiply(*call);
    return 0;
  });
}

constexpr OrtolanOpenCl kFunctions{kOrtolanOpenClVersion, &List, &Open, &Close, &Multiply};

}  // namespace
}  // namespace ortolan::opencl

extern "C" __attribute__((visibility("default"))) const OrtolanOpenCl* OrtolanGetOpenCl(int64_t version) {
  return version == kOrtolanOpenClVersion ? &ortolan::opencl::kFunctions : nullptr;
}
