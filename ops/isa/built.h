// The instruction sets in this build. A test build may leave out targets (ORTOLAN_ONLY_TARGETS in CMakeLists.txt).
#pragma once

#include "isa/features.h"

namespace ortolan {

// The features of every target in this build. Other features are not detected, so the library behaves as on a CPU
// without them.
Features BuiltFeatures();

}  // namespace ortolan
