// The library's only door: RegisterCustomOps, which every ORT host knows how to call.
#include "isa/features.h"
#include "ort/ort_op.h"
#include "rooms.h"

namespace ortolan {
namespace {

// ORT keeps pointers to the domain and its ops for as long as any session lives.
const OrtCustomOpDomain* Domain() {
  static const Ort::CustomOpDomain domain = [] {
    Ort::CustomOpDomain made(kDomain);
#define ORTOLAN_ROOM(op_type, folder) made.Add(op_type##Op());
#define ORTOLAN_VARIANT(name) made.Add(name##Op());
#include "rooms.inc"
#undef ORTOLAN_VARIANT
#undef ORTOLAN_ROOM
    return made;
  }();
  return domain;
}

}  // namespace
}  // namespace ortolan

extern "C" __attribute__((visibility("default"))) OrtStatus* ORT_API_CALL RegisterCustomOps(OrtSessionOptions* options,
                                                                                            const OrtApiBase* base) {
  const OrtApi* api = base->GetApi(ORT_API_VERSION);
  if (api == nullptr) {
    const std::string text =
        ortolan::ErrorText("this ONNX Runtime is version ", base->GetVersionString(), ", Ortolan needs 1.",
                           ORT_API_VERSION, " or later. Upgrade onnxruntime.");
    return base->GetApi(1)->CreateStatus(ORT_FAIL, text.c_str());
  }
  Ort::InitApi(api);
  return ortolan::Guarded([&] {
    if (!ortolan::IsaProblem().empty()) throw ortolan::OpError(ortolan::IsaProblem());
    Ort::ThrowOnError(api->AddCustomOpDomain(options, const_cast<OrtCustomOpDomain*>(ortolan::Domain())));
  });
}
