#include "epilogue/layer_norm.h"

#include "epilogue/vector_layer_norm.h"
#include "isa/kernel_table.h"
#include "support/scalar_floats.h"

namespace ortolan {

#define ORTOLAN_KERNEL(isa, name) LayerNormFn LayerNorm##name;
#include "epilogue/layer_norm_kernels.inc"
#undef ORTOLAN_KERNEL

namespace {

constexpr LayerNormKernel kKernels[] = {
#define ORTOLAN_KERNEL(isa, name) {#name, Isa::isa, &LayerNorm##name},
#include "epilogue/layer_norm_kernels.inc"
#undef ORTOLAN_KERNEL
};

}  // namespace

void LayerNormScalar(const LayerNormArgs& args) { VectorLayerNorm<ScalarFloats>::Run(args); }

std::span<const LayerNormKernel> LayerNormKernels() { return kKernels; }

const LayerNormKernel& SelectLayerNorm(Isa isa) { return SelectKernel(LayerNormKernels(), isa); }

}  // namespace ortolan
