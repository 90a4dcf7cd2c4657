#include "attention/kv_cache/encode_loop.h"
#include "simd/column.h"

namespace ortolan::ORTOLAN_COLUMN {

void EncodeKeys(const KeyCodeLayout& layout, const float* codebook, const float* keys, int64_t key_row_bytes,
                int64_t count, uint8_t* codes) {
  EncodeLoop<Simd>::Run(layout, codebook, keys, key_row_bytes, count, codes);
}

}  // namespace ortolan::ORTOLAN_COLUMN
