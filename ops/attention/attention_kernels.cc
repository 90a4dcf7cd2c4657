#include "attention/attention_loop.h"
#include "simd/column.h"

namespace ortolan::ORTOLAN_COLUMN {

int64_t AttentionScratch(int64_t head_dim) { return AttentionLoop<Simd>::ScratchBytes(head_dim); }

void Attention(const AttentionArgs& args, int64_t row_begin, int64_t row_end, void* scratch) {
  AttentionLoop<Simd>::Run(args, row_begin, row_end, scratch);
}

}  // namespace ortolan::ORTOLAN_COLUMN
