#include "epilogue/vector_activations.h"
#include "epilogue/vector_layer_norm.h"
#include "support/avx2_floats.h"

namespace ortolan {

void EpilogueAvx2(const EpilogueArgs& args) { VectorActivations<Avx2Floats>::Run(args); }

void LayerNormAvx2(const LayerNormArgs& args) { VectorLayerNorm<Avx2Floats>::Run(args); }

}  // namespace ortolan
