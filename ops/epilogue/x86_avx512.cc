#include "epilogue/vector_activations.h"
#include "support/avx512_floats.h"

namespace ortolan {

void EpilogueAvx512(const EpilogueArgs& args) { VectorActivations<Avx512Floats>::Run(args); }

}  // namespace ortolan
