// The domain of the operators, for RegisterCustomOps and the execution provider.
#pragma once

struct OrtApiBase;
struct OrtCustomOpDomain;
struct OrtStatus;

namespace ortolan {

// Set `domain` to the operators' domain, which lives as long as the library. Returns an error status if the host is too
// old or ORTOLAN_ISA cannot be used.
OrtStatus* FindCustomOps(const OrtApiBase* base, const OrtCustomOpDomain** domain);

}  // namespace ortolan
