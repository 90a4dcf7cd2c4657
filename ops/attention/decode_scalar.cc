#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/decode.h"
#include "attention/kv_cache/kv_cache.h"

namespace ortolan {
namespace {

constexpr float kLowest = std::numeric_limits<float>::lowest();
constexpr float kLog2E = 1.44269504f;
constexpr float kLeastRange = 0x1p-100f;
constexpr int64_t kPart = 64;  // tokens between two corrections of the maximum

const float* RowOf(const float* from, int64_t bytes) {
  return reinterpret_cast<const float*>(reinterpret_cast<const char*>(from) + bytes);
}

// The tables of one query head.
struct Tables {
  float* entries;  // [S][16]: 0 … 255
  float step;
  float bias;
};

void BuildTables(const DecodeAttentionArgs& args, const float* q, Tables& tables) {
  const int64_t count = args.Layout().SubQuantizers();
  const float factor = args.scale * kLog2E;
  float range = 0;
  float check = 0;  // NaN once a number is not finite
  tables.bias = 0;
  for (int64_t s = 0; s < count; ++s) {
    float* entries = tables.entries + s * kCentroids;
    for (int64_t c = 0; c < kCentroids; ++c) {
      entries[c] = 0;
      for (int64_t d = 0; d < args.d_sub; ++d) {
        entries[c] += factor * q[s * args.d_sub + d] * args.codebook[(s * kCentroids + c) * args.d_sub + d];
      }
      check += entries[c] * 0;
    }
    const auto [least, most] = std::minmax_element(entries, entries + kCentroids);
    range = std::max(range, *most - *least);
    tables.bias += *least;
  }
  if (!std::isfinite(range + check)) tables.bias = std::numeric_limits<float>::quiet_NaN();
  const bool flat = !(range >= kLeastRange && std::isfinite(range));
  tables.step = flat ? 0 : range / 255;
  const float inverse = flat ? 0 : 255 / range;
  for (int64_t s = 0; s < count; ++s) {
    float* entries = tables.entries + s * kCentroids;
    const float least = *std::min_element(entries, entries + kCentroids);
    for (int64_t c = 0; c < kCentroids; ++c) entries[c] = std::nearbyint((entries[c] - least) * inverse);
  }
}

// The scores of one query head.
void Score(const DecodeAttentionArgs& args, const float* q, const Tables& tables, int64_t begin, int64_t end,
           float* scores) {
  const KeyCodeLayout layout = args.Layout();
  for (int64_t j = begin; j < end; ++j) {
    float sum = 0;
    if (args.keys != nullptr) {
      const float* k = RowOf(args.keys, (j - args.first_key) * args.key_row_bytes);
      for (int64_t d = 0; d < args.head_dim; ++d) sum += args.scale * kLog2E * q[d] * k[d];
      scores[j - begin] = sum;
      continue;
    }
    for (int64_t s = 0; s < layout.SubQuantizers(); ++s) {
      sum += tables.entries[s * kCentroids + KeyCode(layout, args.key_codes, args.tokens, j, s)];
    }
    scores[j - begin] = tables.bias + tables.step * sum;
  }
}

}  // namespace
}  // namespace ortolan

namespace ortolan::scalar {

DecodeValuesFn DecodeValues;

int64_t DecodeScratch(int64_t, int64_t head_dim) {
  return (kCentroids * head_dim + kPart + head_dim) * static_cast<int64_t>(sizeof(float));
}

void DecodeScores(const DecodeAttentionArgs& args, int64_t begin, int64_t end, float* scores, void* scratch) {
  for (int64_t h = 0; h < args.heads; ++h) {
    const float* q = RowOf(args.q, h * args.q_head_bytes);
    Tables tables{static_cast<float*>(scratch), 0, 0};
    if (args.keys == nullptr) BuildTables(args, q, tables);
    Score(args, q, tables, begin, end, scores + h * (end - begin));
  }
}

void DecodeAttention(const DecodeAttentionArgs& args, int64_t begin, int64_t end, const DecodePartial& partial,
                     void* scratch) {
  float* entries = static_cast<float*>(scratch);
  float* weights = entries + kCentroids * args.head_dim;
  float* decoded = weights + kPart;
  for (int64_t h = 0; h < args.heads; ++h) {
    const float* q = RowOf(args.q, h * args.q_head_bytes);
    float* y = partial.y + h * args.head_dim;
    float most = kLowest;
    float sum = 0;
    std::fill(y, y + args.head_dim, 0.0f);
    Tables tables{entries, 0, 0};
    if (args.keys == nullptr) BuildTables(args, q, tables);
    for (int64_t first = begin; first < end; first += kPart) {
      const int64_t last = std::min(end, first + kPart);
      Score(args, q, tables, first, last, weights);
      const float before = most;
      for (int64_t j = first; j < last; ++j) most = std::max(most, weights[j - first]);
      const float correction = std::exp2(before - most);
      sum *= correction;
      for (int64_t d = 0; d < args.head_dim; ++d) y[d] *= correction;
      for (int64_t j = first; j < last; ++j) {
        const float weight = std::exp2(weights[j - first] - most);
        sum += weight;
        const float* v = decoded;
        if (args.values != nullptr) {
          v = RowOf(args.values, j * args.value_row_bytes);
        } else {
          DecodeValues(args.head_dim, args.int8_values, args.tokens, j, j + 1, decoded, 0);
        }
        for (int64_t d = 0; d < args.head_dim; ++d) y[d] += weight * v[d];
      }
    }
    partial.max[h] = most;
    partial.sum[h] = sum;
  }
}

}  // namespace ortolan::scalar
