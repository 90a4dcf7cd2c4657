#include "attention/attention_loop.h"
#include "simd/target.h"

namespace ortolan::ORTOLAN_TARGET {

extern const AttentionFunctions kAttentionBf16;
constexpr AttentionFunctions kAttentionBf16{&AttentionLoop<Bf16Units<Simd>>::ScratchBytes,
                                            &AttentionLoop<Bf16Units<Simd>>::Run};

}  // namespace ortolan::ORTOLAN_TARGET
