// What a build has: one for tests may lack columns (CMakeLists.txt, ORTOLAN_ONLY_COLUMNS).
#pragma once

#include "isa/features.h"

namespace ortolan {

// The features of all sets whose columns are in this build. Others are not detected: it runs as on a CPU without them.
Features BuiltFeatures();

}  // namespace ortolan
