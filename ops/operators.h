// One function per operator and variant, <op type>Op(): returns its adapter, which lives as long as the library.
#pragma once

struct OrtCustomOp;

namespace ortolan {

#define ORTOLAN_OPERATOR(op_type, folder) const OrtCustomOp* op_type##Op();
#define ORTOLAN_VARIANT(name) const OrtCustomOp* name##Op();
#include "operators.inc"
#undef ORTOLAN_VARIANT
#undef ORTOLAN_OPERATOR

}  // namespace ortolan
