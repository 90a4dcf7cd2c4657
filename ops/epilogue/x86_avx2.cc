#include "epilogue/vector_activations.h"
#include "support/avx2_floats.h"

namespace ortolan {

void EpilogueAvx2(const EpilogueArgs& args) { VectorActivations<Avx2Floats>::Run(args); }

}  // namespace ortolan
