// What a build has: one for tests may lack targets (CMakeLists.txt, ORTOLAN_ONLY_TARGETS).
#pragma once

#include "isa/features.h"

namespace ortolan {

// The features of all sets whose targets are in this build. Others are not detected: it runs as on a CPU without them.
Features BuiltFeatures();

}  // namespace ortolan
