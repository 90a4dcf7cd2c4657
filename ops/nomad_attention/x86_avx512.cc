#include "nomad_attention/avx512_attention.h"
#include "nomad_attention/avx512_decode.h"
#include "nomad_attention/encode_loop.h"
#include "nomad_attention/weigh_loop.h"

namespace ortolan {

int64_t AttentionScratchAvx512(int64_t, int64_t head_dim) {
  return AttentionLoop<Avx512Attention>::ScratchBytes(head_dim);
}

void AttentionAvx512(const AttentionArgs& args, int64_t row_begin, int64_t row_end, void* scratch) {
  AttentionLoop<Avx512Attention>::Run(args, row_begin, row_end, scratch);
}

int64_t DecodeScratchAvx512(int64_t heads, int64_t head_dim) {
  return DecodeLoop<Avx512Decode>::ScratchBytes(heads, head_dim);
}

void DecodeAttentionAvx512(const DecodeAttentionArgs& args, int64_t begin, int64_t end, const DecodePartial& partial,
                           void* scratch) {
  DecodeLoop<Avx512Decode>::Run(args, begin, end, partial, scratch);
}

void DecodeScoresAvx512(const DecodeAttentionArgs& args, int64_t begin, int64_t end, float* scores, void* scratch) {
  DecodeLoop<Avx512Decode>::Scores(args, begin, end, scores, scratch);
}

void EncodeKeysAvx512(const KeyCodeLayout& layout, const float* codebook, const float* keys, int64_t key_row_bytes,
                      int64_t count, uint8_t* codes) {
  EncodeLoop<Avx512Decode>::Run(layout, codebook, keys, key_row_bytes, count, codes);
}

void WeighScoresAvx512(float* scores, int64_t count, float factor, float* maximum, float* sum) {
  WeighLoop<Avx512Decode>(scores, count, factor, maximum, sum);
}

}  // namespace ortolan
