#include "epilogue/epilogue.h"

#include "epilogue/vector_activations.h"
#include "isa/kernel_table.h"
#include "support/scalar_floats.h"

namespace ortolan {

#define ORTOLAN_KERNEL(isa, name) EpilogueFn Epilogue##name;
#include "epilogue/kernels.inc"
#undef ORTOLAN_KERNEL

namespace {

constexpr EpilogueKernel kKernels[] = {
#define ORTOLAN_KERNEL(isa, name) {#name, Isa::isa, &Epilogue##name},
#include "epilogue/kernels.inc"
#undef ORTOLAN_KERNEL
};

}  // namespace

void EpilogueScalar(const EpilogueArgs& args) { VectorActivations<ScalarFloats>::Run(args); }

std::span<const EpilogueKernel> EpilogueKernels() { return kKernels; }

const EpilogueKernel& SelectEpilogue(Isa isa) { return SelectKernel(EpilogueKernels(), isa); }

}  // namespace ortolan
