#include "attention/paged_loop.h"
#include "simd/target.h"

namespace ortolan::ORTOLAN_TARGET {

extern const PagedAttentionFunctions kPagedAttention;
constexpr PagedAttentionFunctions kPagedAttention{&PagedLoop<Simd>::ScratchBytes, &PagedLoop<Simd>::Run};

}  // namespace ortolan::ORTOLAN_TARGET
