// One function a room, <op type>Op(): its adapter, alive as long as the library.
#pragma once

struct OrtCustomOp;

namespace ortolan {

#define ORTOLAN_ROOM(op_type, folder) const OrtCustomOp* op_type##Op();
#include "rooms.inc"
#undef ORTOLAN_ROOM

}  // namespace ortolan
