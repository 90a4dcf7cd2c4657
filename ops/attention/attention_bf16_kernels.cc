#include "attention/attention_loop.h"
#include "simd/column.h"

namespace ortolan::ORTOLAN_COLUMN {

extern const AttentionFunctions kAttentionBf16;
constexpr AttentionFunctions kAttentionBf16{&AttentionLoop<Bf16Units<Simd>>::ScratchBytes,
                                            &AttentionLoop<Bf16Units<Simd>>::Run};

}  // namespace ortolan::ORTOLAN_COLUMN
