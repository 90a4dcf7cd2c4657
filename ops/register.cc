// The entry point for custom operators: RegisterCustomOps, which every host of ONNX Runtime can call. The entry point
// of the execution provider is in provider/factory.cc.
#include "custom_ops.h"
#include "isa/features.h"
#include "operators.h"
#include "ort/ort_op.h"

namespace ortolan {
namespace {

// ONNX Runtime keeps pointers to the domain and its operators as long as any session lives.
const OrtCustomOpDomain* Domain() {
  static const auto domain = [] {
    auto made = Make<&OrtApi::ReleaseCustomOpDomain>(Api(), Api().CreateCustomOpDomain, kDomain);
    const auto add = [&](const OrtCustomOp* op) { Check(Api(), Api().CustomOpDomain_Add(made.get(), op)); };
#define ORTOLAN_OPERATOR(op_type, folder) add(op_type##Op());
#define ORTOLAN_VARIANT(name) add(name##Op());
#include "operators.inc"
#undef ORTOLAN_VARIANT
#undef ORTOLAN_OPERATOR
    return made;
  }();
  return domain.get();
}

}  // namespace

OrtStatus* FindCustomOps(const OrtApiBase* base, const OrtCustomOpDomain** domain) {
  const OrtApi* const api = base->GetApi(kOperatorApi);
  if (api == nullptr) {
    const std::string text = ErrorText("this ONNX Runtime is version ", base->GetVersionString(), ", Ortolan needs 1.",
                                       kOperatorApi, " or later. Upgrade onnxruntime.");
    return base->GetApi(1)->CreateStatus(ORT_FAIL, text.c_str());
  }
  SetApi(*api);
  return Guarded(*api, [&] {
    if (!IsaProblem().empty()) throw OpError(IsaProblem());
    *domain = Domain();
  });
}

}  // namespace ortolan

extern "C" __attribute__((visibility("default"))) OrtStatus* ORT_API_CALL RegisterCustomOps(OrtSessionOptions* options,
                                                                                            const OrtApiBase* base) {
  const OrtCustomOpDomain* domain = nullptr;
  OrtStatus* const status = ortolan::FindCustomOps(base, &domain);
  if (status != nullptr) return status;
  return ortolan::Api().AddCustomOpDomain(options, const_cast<OrtCustomOpDomain*>(domain));
}
