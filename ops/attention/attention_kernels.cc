#include "attention/attention_loop.h"
#include "simd/column.h"

namespace ortolan::ORTOLAN_COLUMN {

extern const AttentionFunctions kAttention;
constexpr AttentionFunctions kAttention{&AttentionLoop<FloatUnits<Simd>>::ScratchBytes,
                                        &AttentionLoop<FloatUnits<Simd>>::Run};

}  // namespace ortolan::ORTOLAN_COLUMN
