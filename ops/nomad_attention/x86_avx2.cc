#include "nomad_attention/avx2_attention.h"
#include "nomad_attention/avx2_decode.h"
#include "nomad_attention/encode_loop.h"
#include "nomad_attention/weigh_loop.h"

namespace ortolan {

int64_t AttentionScratchAvx2(int64_t, int64_t head_dim) { return AttentionLoop<Avx2Attention>::ScratchBytes(head_dim); }

void AttentionAvx2(const AttentionArgs& args, int64_t row_begin, int64_t row_end, void* scratch) {
  AttentionLoop<Avx2Attention>::Run(args, row_begin, row_end, scratch);
}

int64_t DecodeScratchAvx2(int64_t heads, int64_t head_dim) {
  return DecodeLoop<Avx2Decode>::ScratchBytes(heads, head_dim);
}

void DecodeAttentionAvx2(const DecodeAttentionArgs& args, int64_t begin, int64_t end, const DecodePartial& partial,
                         void* scratch) {
  DecodeLoop<Avx2Decode>::Run(args, begin, end, partial, scratch);
}

void DecodeScoresAvx2(const DecodeAttentionArgs& args, int64_t begin, int64_t end, float* scores, void* scratch) {
  DecodeLoop<Avx2Decode>::Scores(args, begin, end, scores, scratch);
}

void EncodeKeysAvx2(const KeyCodeLayout& layout, const float* codebook, const float* keys, int64_t key_row_bytes,
                    int64_t count, uint8_t* codes) {
  EncodeLoop<Avx2Decode>::Run(layout, codebook, keys, key_row_bytes, count, codes);
}

void WeighScoresAvx2(float* scores, int64_t count, float factor, float* maximum, float* sum) {
  WeighLoop<Avx2Decode>(scores, count, factor, maximum, sum);
}

}  // namespace ortolan
