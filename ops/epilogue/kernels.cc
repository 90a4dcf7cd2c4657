#include "epilogue/vector_activations.h"
#include "epilogue/vector_layer_norm.h"
#include "simd/target.h"

namespace ortolan::ORTOLAN_TARGET {

void Epilogue(const EpilogueArgs& args) { VectorActivations<Simd>::Run(args); }

void LayerNorm(const LayerNormArgs& args) { VectorLayerNorm<Simd>::Run(args); }

}  // namespace ortolan::ORTOLAN_TARGET
