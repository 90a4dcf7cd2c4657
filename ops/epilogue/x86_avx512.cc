#include "epilogue/vector_activations.h"
#include "epilogue/vector_layer_norm.h"
#include "support/avx512_floats.h"

namespace ortolan {

void EpilogueAvx512(const EpilogueArgs& args) { VectorActivations<Avx512Floats>::Run(args); }

void LayerNormAvx512(const LayerNormArgs& args) { VectorLayerNorm<Avx512Floats>::Run(args); }

}  // namespace ortolan
