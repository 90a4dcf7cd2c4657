// Calls with few queries: the decode kernel computes them one by one. Whether a sequence qualifies, and how its keys
// are split among threads, depends on that sequence alone. So results depend neither on the batch nor on the threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "attention/decode.h"
#include "nomad_attention/nomad_attention.h"

namespace ortolan {

inline constexpr int64_t kMostDecodeQueries = 4;

struct KeyRange {
  int64_t begin, end;
};

// A query for all heads that share a key head, and the range of keys that it sees.
struct DecodeRow {
  int64_t batch, kv_head, query;
  KeyRange seen;
};

inline DecodePartial PartialAt(char* memory, int64_t heads) {
  float* at = reinterpret_cast<float*>(memory);
  return {at, at + heads, at + 2 * heads};
}

// The partial results of sinks, each a key with a value of 0.
class SinkPartials {
 public:
  // Throws std::bad_alloc.
  SinkPartials(Host& host, const AttentionCall& call)
      : call_(call), memory_(host, Floats(call) * static_cast<int64_t>(sizeof(float))) {
    if (call.sinks == nullptr) return;
    float* const at = reinterpret_cast<float*>(memory_.data());
    for (int64_t head = 0; head < call.heads; ++head) at[head] = call.sinks[head] * kLog2E;
    std::fill_n(at + call.heads, call.heads, 1.0f);
    std::fill_n(at + 2 * call.heads, Floats(call) - 2 * call.heads, 0.0f);
  }

  void MergeInto(const SoftmaxFunctions& kernel, int64_t kv_head, const DecodePartial& whole) const {
    if (call_.sinks == nullptr) return;
    float* const at = reinterpret_cast<float*>(memory_.data());
    const int64_t group = call_.Group(), head = kv_head * group;
    kernel.merge(group, call_.head_dim, {at + head, at + call_.heads + head, at + 2 * call_.heads}, whole);
  }

 private:
  static constexpr float kLog2E = 1.44269504f;
  static int64_t Floats(const AttentionCall& call) {
    return call.sinks == nullptr ? 0 : 2 * call.heads + call.Group() * call.head_dim;
  }
  const AttentionCall& call_;
  HostMemory memory_;
};

struct DecodeSplit {
  std::vector<DecodeRow> rows;
  std::vector<int64_t> others;  // sequences that need the exact kernel
};

inline std::vector<int64_t> AllSequences(int64_t batch) {
  std::vector<int64_t> all(static_cast<size_t>(batch));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

// visible(batch, head, query) returns the keys that a query sees, as std::optional<KeyRange>; no value if the mask does
// more than hide keys, or leaves a gap. All heads of a sequence must see the same keys.
template <typename Visible>
DecodeSplit SplitSequences(const AttentionCall& call, const Visible& visible) {
  const int64_t mask_heads = call.mask.data != nullptr && call.mask.strides[1] != 0 ? call.heads : 1;
  const auto seen_by = [&](int64_t batch, int64_t query) {
    std::optional<KeyRange> seen = visible(batch, 0, query);
    for (int64_t head = 1; seen && head < mask_heads; ++head) {
      const std::optional<KeyRange> other = visible(batch, head, query);
      if (!other || other->begin != seen->begin || other->end != seen->end) seen.reset();
    }
    return seen;
  };
  DecodeSplit split;
  for (int64_t batch = 0; batch < call.batch; ++batch) {
    const size_t before = split.rows.size();
    bool served = true;
    for (int64_t query = 0; query < call.queries && served; ++query) {
      const std::optional<KeyRange> seen = seen_by(batch, query);
      served = seen.has_value();
      for (int64_t head = 0; served && head < call.kv_heads; ++head) {
        split.rows.push_back({batch, head, query, *seen});
      }
    }
    if (served) continue;
    split.rows.resize(before);
    split.others.push_back(batch);
  }
  return split;
}

// Returns the number of parts into which a row's keys are split. Each has at least 4096 keys, which cost more than a
// query's tables; 64 parts are enough for a server.
inline int64_t PartsOf(const KeyRange& seen) { return std::clamp<int64_t>((seen.end - seen.begin) / 4096, 1, 64); }

// run(row, keys, partial, scratch) computes a part, a multiple of `unit` keys except for the last one. Then
// complete(row, partial) is called in order with the merged results. Throws std::bad_alloc.
template <typename Run, typename Complete>
void DecodeRows(Host& host, const DecodeFunctions& kernel, const AttentionCall& call,
                const std::vector<DecodeRow>& rows, int64_t unit, int64_t scratch_bytes, const Run& run,
                const Complete& complete) {
  const int64_t group = call.Group();
  std::vector<std::pair<const DecodeRow*, int64_t>> items;  // pairs of a row and a part of it
  for (const DecodeRow& row : rows) {
    for (int64_t part = 0; part < PartsOf(row.seen); ++part) items.emplace_back(&row, part);
  }
  const int64_t partial_bytes = Aligned(group * (2 + call.head_dim) * static_cast<int64_t>(sizeof(float)));
  const HostMemory partials(host, static_cast<int64_t>(items.size()) * partial_bytes);
  const auto partial_of = [&](int64_t item) { return PartialAt(partials.data() + item * partial_bytes, group); };
  ForEachWithScratch(host, static_cast<int64_t>(items.size()), scratch_bytes, [&](int64_t item, char* scratch) {
    const auto [row, part] = items[static_cast<size_t>(item)];
    const auto [begin, end] = row->seen;
    const int64_t parts = PartsOf(row->seen);
    const int64_t step = ((end - begin + parts - 1) / parts + unit - 1) / unit * unit;
    const int64_t from = std::min(end, begin + part * step);
    run(*row, KeyRange{from, std::min(end, from + step)}, partial_of(item), scratch);
  });
  int64_t item = 0;
  for (const DecodeRow& row : rows) {
    const DecodePartial whole = partial_of(item++);
    for (int64_t part = 1; part < PartsOf(row.seen); ++part) {
      kernel.merge(group, call.head_dim, partial_of(item++), whole);
    }
    complete(row, whole);
  }
}

}  // namespace ortolan
