// The operators' domain, for whoever offers it to a host: RegisterCustomOps and the execution provider. Includes no
// header of ONNX Runtime, as the two are built with different ones.
#pragma once

struct OrtApiBase;
struct OrtCustomOpDomain;
struct OrtStatus;

namespace ortolan {

// Sets the domain, which lives as long as the library. The host is too old, or ORTOLAN_ISA cannot be used: a status
// says so.
OrtStatus* FindCustomOps(const OrtApiBase* base, const OrtCustomOpDomain** domain);

}  // namespace ortolan
