#include "attention/paged_loop.h"
#include "simd/target.h"

namespace ortolan::ORTOLAN_TARGET {

using Bf16Loop = PagedLoop<Simd, false>;
using Int8Loop = PagedLoop<Simd, true>;

static void Run(const PagedAttentionArgs& args, int64_t begin, int64_t end, const DecodePartial& partial,
                void* scratch) {
  const auto run = args.keys.scales == nullptr ? &Bf16Loop::Run : &Int8Loop::Run;
  run(args, begin, end, partial, scratch);
}

extern const PagedAttentionFunctions kPagedAttention;
constexpr PagedAttentionFunctions kPagedAttention{&Int8Loop::Quantize, &Int8Loop::ScratchBytes, &Run};

}  // namespace ortolan::ORTOLAN_TARGET
