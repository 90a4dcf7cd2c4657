#include "nomad_attention/avx512_attention.h"

namespace ortolan {

int64_t AttentionScratchAvx512(int64_t, int64_t head_dim) {
  return AttentionLoop<Avx512Attention>::ScratchBytes(head_dim);
}

void AttentionAvx512(const AttentionArgs& args, int64_t row_begin, int64_t row_end, void* scratch) {
  AttentionLoop<Avx512Attention>::Run(args, row_begin, row_end, scratch);
}

}  // namespace ortolan
