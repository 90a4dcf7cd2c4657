// Entry points of the execution provider, CreateEpFactories and ReleaseEpFactory. ONNX Runtime calls them when the
// library is registered and unregistered (RegisterExecutionProviderLibrary).
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "custom_ops.h"
#include "isa/features.h"
#include "provider/execution_provider.h"

namespace ortolan::provider {
namespace {

// Option: claim only what is faster than ONNX Runtime on this CPU, or all supported nodes.
constexpr const char* kClaims = "claims";
constexpr const char* kFaster = "faster";
constexpr const char* kAll = "all";
// Option: the file of layer times (kept_times.h).
constexpr const char* kTimesFile = "times_file";
// Option: precision for layers with float weights.
constexpr const char* kPrecision = "precision";
constexpr std::pair<const char*, Precision> kPrecisions[] = {{"", Precision::kFloat32},
                                                             {"float32", Precision::kFloat32},
                                                             {"bf16", Precision::kBf16},
                                                             {"int8", Precision::kInt8}};
// Option: equal bytes on every CPU.
constexpr const char* kReproducible = "reproducible";
constexpr const char* kEverywhere = "everywhere";

// The session's configuration entries. A provider option is the entry "ep.<provider name in lower case>.<option>".
class SessionEntries {
 public:
  SessionEntries(const HostApi& host, const OrtSessionOptions* options) : ort_(*host.ort) {
    Check(ort_, ort_.GetSessionOptionsConfigEntries(options, &entries_));
  }
  ~SessionEntries() { ort_.ReleaseKeyValuePairs(entries_); }
  SessionEntries(const SessionEntries&) = delete;
  SessionEntries& operator=(const SessionEntries&) = delete;

  // Return "" if the entry is missing.
  std::string String(const std::string& key) const {
    const char* const found = ort_.GetKeyValue(entries_, key.c_str());
    return found == nullptr ? "" : found;
  }
  std::string ProviderOption(const std::string& name) const { return String(Prefix() + name); }
  // Throws OpError if the session sets a provider option that does not exist.
  void CheckOptions() const {
    const char* const* keys = nullptr;
    const char* const* values = nullptr;
    size_t count = 0;
    ort_.GetKeyValuePairs(entries_, &keys, &values, &count);
    const std::string prefix = Prefix();
    for (size_t i = 0; i < count; ++i) {
      const std::string key = keys[i];
      if (key.compare(0, prefix.size(), prefix) != 0) continue;
      const std::string name = key.substr(prefix.size());
      constexpr std::array kNames = {kPrecision, kClaims, kReproducible, kTimesFile, kClaimsFile};
      if (std::ranges::find(kNames, name) != kNames.end()) continue;
      throw OpError(ErrorText("the provider has no option '", name, "', expected ", kPrecision, ", ", kClaims, ", ",
                              kReproducible, ", ", kTimesFile, " or ", kClaimsFile));
    }
  }

 private:
  static std::string Prefix() {
    std::string prefix = std::string("ep.") + kProviderName + ".";
    std::ranges::transform(prefix, prefix.begin(), [](char c) { return 'A' <= c && c <= 'Z' ? c + 32 : c; });
    return prefix;
  }

  const OrtApi& ort_;
  OrtKeyValuePairs* entries_ = nullptr;
};

class Factory : public OrtEpFactory {
 public:
  explicit Factory(const HostApi& host);

 private:
  static OrtStatus* GetDevices(OrtEpFactory* self, const OrtHardwareDevice* const* devices, size_t count,
                               OrtEpDevice** found, size_t most, size_t* found_count) noexcept;
  static OrtStatus* MakeProvider(OrtEpFactory* self, const OrtHardwareDevice* const*, const OrtKeyValuePairs* const*,
                                 size_t, const OrtSessionOptions* options, const OrtLogger* logger,
                                 OrtEp** provider) noexcept;
  static OrtStatus* CheckCompiled(OrtEpFactory* self, const OrtHardwareDevice* const*, size_t, const char* info,
                                  OrtCompiledModelCompatibility* compatibility) noexcept;
  void SetMemory();
  void SetDomains();

  HostApi host_;
};

Factory::Factory(const HostApi& host) : OrtEpFactory{}, host_(host) {
  ort_version_supported = host.version;
  OrtEpFactory::GetName = [](const OrtEpFactory*) noexcept -> const char* { return kProviderName; };
  OrtEpFactory::GetVendor = [](const OrtEpFactory*) noexcept -> const char* { return "Ortolan"; };
  OrtEpFactory::GetVendorId = [](const OrtEpFactory*) noexcept -> uint32_t { return 0; };  // no PCI vendor id
  OrtEpFactory::GetVersion = [](const OrtEpFactory*) noexcept -> const char* { return ORTOLAN_VERSION; };
  OrtEpFactory::GetSupportedDevices = GetDevices;
  OrtEpFactory::CreateEp = MakeProvider;
  OrtEpFactory::ValidateCompiledModelCompatibilityInfo = CheckCompiled;
  OrtEpFactory::ReleaseEp = [](OrtEpFactory*, OrtEp* provider) noexcept {
    delete static_cast<ExecutionProvider*>(provider);
  };
  SetMemory();
  SetDomains();
}

// Use the memory of the host. ONNX Runtime requires all these functions.
void Factory::SetMemory() {
  OrtEpFactory::CreateAllocator = [](OrtEpFactory*, const OrtMemoryInfo*, const OrtKeyValuePairs*,
                                     OrtAllocator** allocator) noexcept -> OrtStatus* {
    *allocator = nullptr;
    return nullptr;
  };
  OrtEpFactory::ReleaseAllocator = [](OrtEpFactory*, OrtAllocator*) noexcept {};
  OrtEpFactory::CreateDataTransfer = [](OrtEpFactory*, OrtDataTransferImpl** transfer) noexcept -> OrtStatus* {
    *transfer = nullptr;
    return nullptr;
  };
  OrtEpFactory::IsStreamAware = [](const OrtEpFactory*) noexcept { return false; };
}

// Provide the custom operators' domain, so that one registration also serves optimized models. ONNX Runtime calls this
// from 1.24 on.
void Factory::SetDomains() {
  OrtEpFactory::GetNumCustomOpDomains = [](OrtEpFactory*, size_t* count) noexcept -> OrtStatus* {
    *count = 1;
    return nullptr;
  };
  OrtEpFactory::GetCustomOpDomains = [](OrtEpFactory* self, OrtCustomOpDomain** domains,
                                        size_t count) noexcept -> OrtStatus* {
    if (count < 1) return nullptr;
    const OrtCustomOpDomain* domain = nullptr;
    OrtStatus* const status = FindCustomOps(static_cast<Factory*>(self)->host_.base, &domain);
    if (status == nullptr) domains[0] = const_cast<OrtCustomOpDomain*>(domain);
    return status;
  };
}

OrtStatus* Factory::GetDevices(OrtEpFactory* self, const OrtHardwareDevice* const* devices, size_t count,
                               OrtEpDevice** found, size_t most, size_t* found_count) noexcept {
  const HostApi& host = static_cast<Factory*>(self)->host_;
  *found_count = 0;
  for (size_t i = 0; i < count && most > 0; ++i) {
    if (host.ort->HardwareDevice_Type(devices[i]) != OrtHardwareDeviceType_CPU) continue;
    OrtStatus* const status = host.ep->CreateEpDevice(self, devices[i], nullptr, nullptr, &found[0]);
    if (status == nullptr) *found_count = 1;
    return status;
  }
  return nullptr;
}

// Return the file of layer times. Python names it; hosts without Python may set ORTOLAN_CACHE, as for other programs.
std::string TimesFile(const SessionEntries& entries) {
  const std::string named = entries.ProviderOption(kTimesFile);
  const char* const folder = named.empty() ? std::getenv("ORTOLAN_CACHE") : nullptr;
  return folder == nullptr || *folder == '\0' ? named : std::string(folder) + "/layer-times.txt";
}

ProviderOptions ReadOptions(const HostApi& host, const SessionEntries& entries) {
  entries.CheckOptions();
  const std::string claims = entries.ProviderOption(kClaims), precision = entries.ProviderOption(kPrecision);
  if (claims != "" && claims != kFaster && claims != kAll) {
    throw OpError(
        ErrorText("the provider's option ", kClaims, " is '", claims, "', expected '", kFaster, "' or '", kAll, "'"));
  }
  const auto known = std::ranges::find_if(kPrecisions, [&](const auto& one) { return precision == one.first; });
  if (known == std::end(kPrecisions)) {
    throw OpError(
        ErrorText("the provider's option ", kPrecision, " is '", precision, "', expected 'float32', 'bf16' or 'int8'"));
  }
  const std::string where = entries.ProviderOption(kReproducible);
  if (where != "" && where != kEverywhere) {
    throw OpError(ErrorText("the provider's option ", kReproducible, " is '", where, "', expected '", kEverywhere,
                            "' or no value"));
  }
  ProviderOptions options;
  options.rules.precision = known->second;
  options.reproducible = where == kEverywhere;
  if (options.reproducible && known->second == Precision::kBf16) {
    throw OpError(ErrorText("the provider's option ", kReproducible, " is '", kEverywhere, "' with ", kPrecision,
                            " 'bf16', whose sums depend on the CPU; expected ", kPrecision, " 'int8' or 'float32'"));
  }
  options.context.enabled = entries.String("ep.context_enable") == "1";
  options.context.embeds = entries.String("ep.context_embed_mode") == "1";
  options.context.path = entries.String("ep.context_file_path");
  // Which nodes are faster depends on the CPU.
  if (claims != kAll && !options.reproducible) {
    options.rules.policy = ClaimPolicy(KeptTimes(TimesFile(entries), host.base->GetVersionString()));
  }
  return options;
}

OrtStatus* Factory::MakeProvider(OrtEpFactory* self, const OrtHardwareDevice* const*, const OrtKeyValuePairs* const*,
                                 size_t, const OrtSessionOptions* options, const OrtLogger* logger,
                                 OrtEp** provider) noexcept {
  const HostApi& host = static_cast<Factory*>(self)->host_;
  return Guarded(*host.ort, [&] {
    const SessionEntries entries(host, options);
    ClaimsLog claims(host, logger, entries.ProviderOption(kClaimsFile));
    *provider = std::make_unique<ExecutionProvider>(host, std::move(claims), ReadOptions(host, entries)).release();
  });
}

OrtStatus* Factory::CheckCompiled(OrtEpFactory* self, const OrtHardwareDevice* const*, size_t, const char* info,
                                  OrtCompiledModelCompatibility* compatibility) noexcept {
  return Guarded(*static_cast<Factory*>(self)->host_.ort,
                 [&] { *compatibility = CompatibilityOf(info == nullptr ? "" : info); });
}

// Create a factory that is never released, as the library is never unloaded (-z nodelete). Sessions that outlive their
// registration, against ONNX Runtime's rule, still call it.
OrtEpFactory* LastingFactory(const HostApi& host) {
  static std::mutex mutex;
  static auto& all = *new std::vector<std::unique_ptr<Factory>>;  // leaked on purpose
  const std::lock_guard lock(mutex);
  return all.emplace_back(std::make_unique<Factory>(host)).get();
}

// Return the minor version of ONNX Runtime, 32 for "1.32.0", which is its API version; 0 if the text has no version.
// GetApi is no alternative: it prints an error for versions that the host lacks.
uint32_t VersionOf(const OrtApiBase& base) {
  unsigned major = 0, minor = 0;
  const bool is_version = std::sscanf(base.GetVersionString(), "%u.%u", &major, &minor) == 2;
  return is_version && major == 1 ? minor : 0;
}

}  // namespace
}  // namespace ortolan::provider

extern "C" __attribute__((visibility("default"))) OrtStatus* CreateEpFactories(const char*, const OrtApiBase* base,
                                                                               const OrtLogger*,
                                                                               OrtEpFactory** factories, size_t most,
                                                                               size_t* count) {
  using namespace ortolan;
  using namespace ortolan::provider;
  HostApi host;
  host.base = base;
  host.version = std::min(kNewestApi, VersionOf(*base));
  host.ort = base->GetApi(std::max(host.version, uint32_t{1}));
  const OrtApi& ort = *host.ort;
  return Guarded(ort, [&] {
    if (host.version < kOldestApi) {
      throw OpError(ErrorText("this ONNX Runtime is version ", base->GetVersionString(),
                              ", Ortolan's execution provider needs 1.", kOldestApi,
                              " or later. Upgrade onnxruntime; custom operators work as before."));
    }
    if (!IsaProblem().empty()) throw OpError(IsaProblem());
    if (most < 1) throw OpError("ONNX Runtime passed no room for a factory");
    host.ep = ort.GetEpApi();
    factories[0] = LastingFactory(host);
    *count = 1;
  });
}

extern "C" __attribute__((visibility("default"))) OrtStatus* ReleaseEpFactory(OrtEpFactory*) {
  return nullptr;  // see LastingFactory
}
