#include "attention/attention_loop.h"
#include "simd/target.h"

namespace ortolan::ORTOLAN_TARGET {

extern const AttentionFunctions kAttention;
constexpr AttentionFunctions kAttention{&AttentionLoop<FloatUnits<Simd>>::ScratchBytes,
                                        &AttentionLoop<FloatUnits<Simd>>::Run};

}  // namespace ortolan::ORTOLAN_TARGET
