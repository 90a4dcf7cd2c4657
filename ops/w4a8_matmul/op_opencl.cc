#include "w4a8_matmul/op_opencl.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>

#include "matmul/device_choice.h"
#include "opencl/interface.h"

namespace ortolan {
namespace {

enum class Asked { kNo, kMeasured, kAlways };

Asked ReadAsked(const std::string& node) {
  const char* const set = std::getenv("ORTOLAN_OPENCL");
  const std::string value = set == nullptr ? "" : set;
  if (value.empty() || value == "0") return Asked::kNo;
  if (value == "1") return Asked::kMeasured;
  if (value == "force") return Asked::kAlways;
  throw OpError(ErrorText(node, ": ORTOLAN_OPENCL is '", value,
                          "', expected 0 (never), 1 (for weights that are faster on the device) or force (always)"));
}

struct Library {
  const OrtolanOpenCl* functions = nullptr;
  std::string problem;
};

// Loads libortolan_opencl.so from the directory of this library.
Library FindLibrary() {
  Dl_info self;
  if (dladdr(reinterpret_cast<const void*>(&ReadAsked), &self) == 0)
    return {nullptr, "dladdr cannot locate the Ortolan library"};
  const std::filesystem::path path = std::filesystem::path(self.dli_fname).parent_path() / "libortolan_opencl.so";
  void* const opened = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (opened == nullptr) return {nullptr, dlerror()};
  const auto get = reinterpret_cast<decltype(&OrtolanGetOpenCl)>(dlsym(opened, "OrtolanGetOpenCl"));
  const OrtolanOpenCl* const functions = get == nullptr ? nullptr : get(kOrtolanOpenClVersion);
  if (functions == nullptr) return {nullptr, path.string() + " belongs to another version of Ortolan. Reinstall both."};
  return {functions, ""};
}

const Library& OpenLibrary() {
  static const Library library = FindLibrary();
  return library;
}

// Warns once a process: a failure for one weight usually repeats for all.
void WarnOnce(const OrtLogger* logger, const std::string& text) {
  static std::atomic<bool> is_said{false};
  if (is_said.exchange(true)) return;
  const std::string all = text + " (reported once)";
  OrtStatus* const failed = Api().Logger_LogMessage(logger, ORT_LOGGING_LEVEL_WARNING, all.c_str(), ORT_FILE, __LINE__,
                                                    static_cast<const char*>(__FUNCTION__));
  if (failed != nullptr) Api().ReleaseStatus(failed);
}

OrtolanOpenClWeight Describe(const GroupWeight& w) {
  OrtolanOpenClWeight of{};
  of.k = w.k;
  of.n = w.n;
  of.group = w.view.group;
  of.weights = w.view.weights;
  of.scales = w.view.scales;
  of.scale_bytes = w.view.scale_type == ScaleType::kFloat16 ? 2 : 4;
  of.zero_points = w.view.zero_points;
  of.zero_point_steps = w.view.zero_point_steps;
  of.minimums = w.view.minimums;
  of.row_bytes = w.PackedRowBytes();
  return of;
}

class OpenClDevice : public MatMulDevice {
 public:
  OpenClDevice(const OrtolanOpenCl& functions, void* weight, bool always, const OrtLogger* logger, std::string node)
      : functions_(functions), weight_(weight), always_(always), logger_(logger), node_(std::move(node)) {}
  ~OpenClDevice() override { functions_.close(weight_); }

  bool Takes(int64_t m) override { return !has_failed_ && (always_ || choice_.Takes(m)); }
  bool Multiply(const DeviceCall& call) override {
    const OrtolanOpenClCall of{call.m, call.x, call.bias, call.product};
    OrtolanOpenClError error;
    if (functions_.multiply(weight_, &of, &error) == 0) return true;
    has_failed_ = true;
    WarnOnce(logger_, ErrorText(node_, ": OpenCL failed, using the CPU from now on: ", error.text));
    return false;
  }
  void Took(int64_t m, bool on_device, double seconds) override {
    if (!always_ && !has_failed_) choice_.Took(m, on_device, seconds);
  }

 private:
  const OrtolanOpenCl& functions_;
  void* const weight_;
  const bool always_;
  const OrtLogger* const logger_;
  const std::string node_;
  std::atomic<bool> has_failed_{false};
  DeviceChoice choice_;
};

}  // namespace

std::unique_ptr<MatMulDevice> OpenOnOpenCl(const OrtKernelInfo& info, const GroupWeight& w, const std::string& node) {
  const Asked asked = ReadAsked(node);
  if (asked == Asked::kNo) return nullptr;
  const auto* const logger = Get<const OrtLogger*>(Api(), Api().KernelInfo_GetLogger, &info);
  const Library& library = OpenLibrary();
  OrtolanOpenClError error{};
  void* weight = nullptr;
  if (library.functions != nullptr) {
    const OrtolanOpenClWeight of = Describe(w);
    weight = library.functions->open(&of, &error);
  }
  if (weight != nullptr) {
    return std::make_unique<OpenClDevice>(*library.functions, weight, asked == Asked::kAlways, logger, node);
  }
  const std::string reason = library.functions == nullptr ? library.problem : error.text;
  WarnOnce(logger, ErrorText(node, ": using the CPU instead of OpenCL: ", reason));
  return nullptr;
}

}  // namespace ortolan
