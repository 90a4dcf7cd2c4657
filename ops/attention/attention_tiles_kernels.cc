#include "attention/attention_loop.h"
#include "attention/attention_tiles.h"
#include "simd/target.h"

namespace ortolan::ORTOLAN_TARGET {

extern const AttentionFunctions kAttentionTiles;
constexpr AttentionFunctions kAttentionTiles{&AttentionLoop<TileUnits<Simd>>::ScratchBytes,
                                             &AttentionLoop<TileUnits<Simd>>::Run};

}  // namespace ortolan::ORTOLAN_TARGET
