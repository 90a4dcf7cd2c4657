#include "nomad_attention/paged_plan.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "formats/bf16.h"
#include "host/error_text.h"
#include "isa/kernel_table.h"
#include "nomad_attention/decode_rows.h"
#include "simd/at_byte.h"

namespace ortolan {
namespace {

constexpr int64_t kFloat = sizeof(float);
constexpr int64_t kBf16 = sizeof(uint16_t);
constexpr int64_t kInt8 = sizeof(int8_t);
constexpr int64_t kQuad = 4;
// Parts of a row's keys that threads can share. Counted from key 0, so that a row's result does not depend on the call.
constexpr int64_t kPartKeys = 4096;
constexpr int64_t kMostRows = 96;  // of a kernel call, except for a single token with more heads
// Memory of partial results, enough to keep many threads busy. The partial results of all units of a prompt's chunk
// after 100,000 tokens would take hundreds of megabytes.
constexpr int64_t kRoundBytes = 32 << 20;

// Chunk of a sequence and one head of keys and values, and a part of its keys.
struct Unit {
  int64_t sequence, kv_head, token, tokens, part;
  int64_t begin, end;  // keys of the part, from the tile of the first key that a token sees
  int64_t partial;     // index of its first row in the partial results of the call
  int64_t rows;        // of tokens and query heads

  int64_t EndRow() const { return partial + rows; }
  bool SharesRows(const Unit& other) const {
    return sequence == other.sequence && kv_head == other.kv_head && token == other.token;
  }
};

// Units that are computed, then merged, before the next round begins.
struct Round {
  size_t begin, end;
};

// Partial results of the units of a round.
struct PartialResults {
  float* data;
  int64_t rows, head_dim;
  int64_t first;  // row of the call

  DecodePartial At(int64_t row) const {
    const int64_t own = row - first;
    return {data + own, data + rows + own, data + 2 * rows + own * head_dim};
  }
};

// Write a key or value to a slot of its head in a block.
void WriteKey(const float* key, int64_t head_dim, int64_t slot, uint16_t* head) {
  for (int64_t d = 0; d < head_dim; ++d) head[d * kBlockTokens + slot] = RoundToBf16(key[d]);
}
void WriteValue(const float* value, int64_t head_dim, int64_t slot, uint16_t* head) {
  for (int64_t d = 0; d < head_dim; ++d) head[slot * head_dim + d] = RoundToBf16(value[d]);
}
void WriteKey(const int8_t* key, int64_t head_dim, int64_t slot, int8_t* head) {
  for (int64_t d = 0; d < head_dim; d += kQuad) std::memcpy(head + d * kBlockTokens + slot * kQuad, key + d, kQuad);
}

// The pool of one head.
PagedPool PoolOf(const PagedCache& cache, const PagedCall& call, int64_t kv_head) {
  const int64_t bytes = kBlockTokens * call.head_dim * (cache.IsInt8() ? kInt8 : kBf16);
  PagedPool pool{AtByte(static_cast<const char*>(cache.blocks), kv_head * bytes), call.kv_heads * bytes};
  if (!cache.IsInt8()) return pool;
  pool.scales = cache.scales + kv_head * kBlockTokens;
  pool.scales_bytes = call.kv_heads * kBlockTokens * kFloat;
  return pool;
}

// Returns the number of tokens of the largest unit.
int64_t MostTokens(const PagedCall& call) { return std::max<int64_t>(kMostRows / call.Group(), 1); }

// Returns the units of a call. Units that share rows are neighbours.
std::vector<Unit> UnitsOf(const PagedCall& call) {
  const int64_t most_tokens = MostTokens(call);
  std::vector<Unit> units;
  int64_t rows = 0;
  for (int64_t b = 0; b < call.Sequences(); ++b) {
    for (int64_t head = 0; head < call.kv_heads; ++head) {
      for (int64_t token = 0; token < call.Added(b); token += most_tokens) {
        const int64_t tokens = std::min(most_tokens, call.Added(b) - token);
        const int64_t end = call.Past(b) + token + tokens;
        const int64_t first = call.WindowBegin(call.Past(b) + token + 1);
        for (int64_t part = first / kPartKeys; part * kPartKeys < end; ++part) {
          const int64_t begin = std::max(part * kPartKeys, first / kPagedTile * kPagedTile);
          units.push_back({b, head, token, tokens, part, begin, std::min(end, (part + 1) * kPartKeys), rows,
                           tokens * call.Group()});
          rows = units.back().EndRow();
        }
      }
    }
  }
  return units;
}

// Returns rounds of at most `most_rows` rows, or of one chunk and head: units that share rows are in the same round.
std::vector<Round> RoundsOf(std::span<const Unit> units, int64_t most_rows) {
  std::vector<Round> rounds{{0, 0}};
  for (size_t end = 0; end < units.size();) {
    const size_t begin = end;
    while (end < units.size() && units[end].SharesRows(units[begin])) ++end;
    const size_t first = rounds.back().begin;
    if (begin > first && units[end - 1].EndRow() - units[first].partial > most_rows) rounds.push_back({begin, begin});
    rounds.back().end = end;
  }
  return rounds;
}

// Returns the first unit of each work item of a round, and its last unit + 1. Neighbouring units are one item until
// they are worth handing to another thread.
std::vector<size_t> ItemsOf(const PagedCall& call, std::span<const Unit> units, const Round& round) {
  std::vector<size_t> items{round.begin};
  int64_t macs = 0;
  for (size_t u = round.begin; u < round.end; ++u) {
    const Unit& unit = units[u];
    macs += 2 * unit.rows * (unit.end - unit.begin) * call.head_dim;
    if (macs < ActiveTuning().piece_macs && u + 1 < round.end) continue;
    items.push_back(u + 1);
    macs = 0;
  }
  return items;
}

// Returns the arguments of a unit, without what comes after it.
PagedAttentionArgs ArgsOf(const PagedCall& call, const Unit& unit) {
  PagedAttentionArgs args;
  const int64_t head = unit.kv_head * call.Group(), first = call.Begin(unit.sequence) + unit.token;
  args.heads = call.Group();
  args.head_dim = call.head_dim;
  args.tokens = unit.tokens;
  args.position = call.Past(unit.sequence) + unit.token;
  args.q = call.q.At(0, head, first);
  args.q_token_bytes = call.q.row_bytes;
  args.q_head_bytes = call.q.head_bytes;
  args.blocks = call.Blocks(unit.sequence);
  args.keys = PoolOf(call.keys, call, unit.kv_head);
  args.values = PoolOf(call.values, call, unit.kv_head);
  args.window = call.window;
  args.scale = call.scale;
  args.softcap = call.softcap;
  args.sinks = call.sinks == nullptr ? nullptr : call.sinks + head;
  return args;
}

// Lets `args` prefetch the first tile that comes after it, which begins with key `first`.
void PrefetchNext(const PagedAttentionArgs& next, int64_t first, PagedAttentionArgs& args) {
  const int64_t keys = std::min(next.position + next.tokens - first, kPagedTile);
  args.next_blocks = next.blocks + first / kBlockTokens;
  args.next_count = (keys + kBlockTokens - 1) / kBlockTokens;
  args.next_keys = next.keys;
  args.next_values = next.values;
}

// Merges the parts of each row in order, and only those with keys that the row sees. `units` begin with the parts of a
// chunk and head.
void Finish(const DecodeAttentionKernel& kernel, const PagedCall& call, std::span<const Unit> units,
            const PartialResults& partials) {
  const Unit& unit = units.front();
  const int64_t group = call.Group(), position = call.Past(unit.sequence) + unit.token;
  for (int64_t t = 0; t < unit.tokens; ++t) {
    std::optional<DecodePartial> whole;
    for (const Unit& part : units) {
      if (!part.SharesRows(unit)) break;
      const int64_t begin = part.part * kPartKeys;
      if (begin > position + t || call.WindowBegin(position + t + 1) >= begin + kPartKeys) continue;
      const DecodePartial own = partials.At(part.partial + t * group);
      if (whole) {
        kernel.merge(group, call.head_dim, own, *whole);
      } else {
        whole = own;
      }
    }
    const int64_t row = call.Begin(unit.sequence) + unit.token + t;
    kernel.finish(group, call.head_dim, *whole, call.Y(0, unit.kv_head * group, row), call.head_dim * kFloat);
  }
}

}  // namespace

std::string PagedCall::Problem() const {
  if (starts.size() != past.size() + 1) {
    return ErrorText("sequence_starts has ", starts.size(), " elements and past_lengths ", past.size(),
                     ", expected one more");
  }
  if (starts.front() != 0 || starts.back() != queries) {
    return ErrorText("sequence_starts begins with ", starts.front(), " and ends with ", starts.back(),
                     ", expected 0 and the number of tokens, ", queries);
  }
  for (int64_t b = 0; b < Sequences(); ++b) {
    if (Begin(b + 1) < Begin(b)) {  // Added(b) could overflow
      return ErrorText("sequence_starts decreases from ", Begin(b), " to ", Begin(b + 1), " at sequence ", b);
    }
    if (Past(b) < 0 || Past(b) > kMaxTokens - Added(b)) {
      return ErrorText("past_lengths is ", Past(b), " for sequence ", b, " of ", Added(b),
                       " new tokens, expected 0 to ", kMaxTokens, " tokens together");
    }
    if (Added(b) == 0) continue;
    if (blocks == 0) {
      return ErrorText("the pools have 0 blocks, expected at least 1 for the ", Added(b), " new tokens of sequence ",
                       b);
    }
    const int64_t used = (Past(b) + Added(b) + kBlockTokens - 1) / kBlockTokens;
    if (used > table_columns) {
      return ErrorText("sequence ", b, " has ", Past(b) + Added(b), " tokens in ", used, " blocks of ", kBlockTokens,
                       ", but block_table has ", table_columns, " columns");
    }
    for (int64_t i = 0; i < used; ++i) {
      if (Blocks(b)[i] >= 0 && Blocks(b)[i] < blocks) continue;
      return ErrorText("block_table is ", Blocks(b)[i], " for block ", i, " of sequence ", b, ", expected 0 to ",
                       blocks - 1);
    }
  }
  return {};
}

PagedPlan::PagedPlan()
    : attention_(SelectKernel(PagedAttentionKernels(), ActiveFeatures())),
      decode_(SelectKernel(DecodeAttentionKernels(), ActiveFeatures())),
      cache_(SelectKernel(KvCacheKernels(), ActiveFeatures())) {}

void PagedPlan::Rotate(Host& host, const PagedCall& call, std::span<const int64_t> positions, float* q,
                       float* k) const {
  host.ParallelFor(call.queries, [&](int64_t token) {
    const int64_t position = positions[static_cast<size_t>(token)];
    const auto rotate = [&](const HeadRows& rows, int64_t heads, float* to) {
      for (int64_t head = 0; head < heads; ++head) {
        call.rotary.Rotate(cache_, rows.At(0, head, token), position, call.head_dim,
                           to + (token * heads + head) * call.head_dim);
      }
    };
    rotate(call.q, call.heads, q);
    rotate(call.k, call.kv_heads, k);
  });
}

void PagedPlan::Run(Host& host, PagedCall call) const {
  if (call.queries == 0) return;
  std::vector<int64_t> positions, sequences;  // of each token
  for (int64_t b = 0; b < call.Sequences(); ++b) {
    for (int64_t i = 0; i < call.Added(b); ++i) {
      positions.push_back(call.Past(b) + i);
      sequences.push_back(b);
    }
  }
  std::optional<HostMemory> rotated;
  if (call.rotary.dims > 0) {
    const int64_t head_bytes = call.head_dim * kFloat;
    rotated.emplace(host, call.queries * (call.heads + call.kv_heads) * head_bytes);
    float* q = reinterpret_cast<float*>(rotated->data());
    float* k = q + call.queries * call.heads * call.head_dim;
    Rotate(host, call, positions, q, k);
    call.q = {q, 0, head_bytes, call.heads * head_bytes};
    call.k = {k, 0, head_bytes, call.kv_heads * head_bytes};
  }
  // All tokens are in the pools before any is read.
  host.ParallelFor(call.queries, [&](int64_t token) {
    const int64_t position = positions[static_cast<size_t>(token)];
    const int64_t block = call.Blocks(sequences[static_cast<size_t>(token)])[position / kBlockTokens];
    AppendToken(call, token, block, position % kBlockTokens);
  });
  Attend(host, call);
}

void PagedPlan::AppendToken(const PagedCall& call, int64_t token, int64_t block, int64_t slot) const {
  const int64_t dim = call.head_dim;
  for (int64_t head = 0; head < call.kv_heads; ++head) {
    const float *key = call.k.At(0, head, token), *value = call.v.At(0, head, token);
    const int64_t of_head = (block * call.kv_heads + head) * kBlockTokens, at = of_head * dim;
    if (call.keys.IsInt8()) {
      int8_t bytes[kMostPagedHeadDim];
      call.keys.scales[of_head + slot] = attention_.quantize(key, dim, bytes);
      WriteKey(bytes, dim, slot, static_cast<int8_t*>(call.keys.blocks) + at);
      int8_t* const values = static_cast<int8_t*>(call.values.blocks) + at;
      call.values.scales[of_head + slot] = attention_.quantize(value, dim, values + slot * dim);
    } else {
      WriteKey(key, dim, slot, static_cast<uint16_t*>(call.keys.blocks) + at);
      WriteValue(value, dim, slot, static_cast<uint16_t*>(call.values.blocks) + at);
    }
  }
}

void PagedPlan::Attend(Host& host, const PagedCall& call) const {
  const std::vector<Unit> units = UnitsOf(call);
  if (units.empty()) return;
  const int64_t row_floats = 2 + call.head_dim;
  const std::vector<Round> rounds = RoundsOf(units, kRoundBytes / (row_floats * kFloat));
  int64_t rows = 0;  // of the largest round
  for (const Round& round : rounds) rows = std::max(rows, units[round.end - 1].EndRow() - units[round.begin].partial);
  const HostMemory memory(host, rows * row_floats * kFloat);
  const int64_t scratch_bytes = Aligned(attention_.scratch_bytes(MostTokens(call) * call.Group(), call.head_dim));
  for (const Round& round : rounds) {
    const PartialResults partials{reinterpret_cast<float*>(memory.data()), rows, call.head_dim,
                                  units[round.begin].partial};
    const std::vector<size_t> items = ItemsOf(call, units, round);
    ForEachWithScratch(host, static_cast<int64_t>(items.size()) - 1, scratch_bytes, [&](int64_t item, char* scratch) {
      for (size_t u = items[static_cast<size_t>(item)]; u < items[static_cast<size_t>(item) + 1]; ++u) {
        PagedAttentionArgs args = ArgsOf(call, units[u]);
        if (u + 1 < units.size()) PrefetchNext(ArgsOf(call, units[u + 1]), units[u + 1].begin, args);
        attention_.run(args, units[u].begin, units[u].end, partials.At(units[u].partial), scratch);
      }
    });
    std::vector<size_t> firsts;  // the first unit of each chunk and head
    for (size_t u = round.begin; u < round.end; ++u) {
      if (u == round.begin || !units[u].SharesRows(units[u - 1])) firsts.push_back(u);
    }
    host.ParallelFor(static_cast<int64_t>(firsts.size()), [&](int64_t i) {
      Finish(decode_, call, std::span(units).subspan(firsts[static_cast<size_t>(i)]), partials);
    });
  }
}

}  // namespace ortolan
