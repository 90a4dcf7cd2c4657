#include <array>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "isa/kernel_table.h"
#include "nomad_attention/decode_rows.h"
#include "nomad_attention/nomad_attention.h"

namespace ortolan {
namespace {

// Returns the keys that a query of a head sees. No value if the mask does more than hide keys, or leaves a gap.
std::optional<KeyRange> VisibleKeys(const DecodeFunctions& kernel, const AttentionCall& call, int64_t batch,
                                    int64_t head, int64_t query) {
  const int64_t end = call.causal ? call.keys - call.queries + query + 1 : call.keys, begin = call.WindowBegin(end);
  if (call.mask.data == nullptr) return KeyRange{begin, end};
  const float* row = call.mask.At(batch, head, query);
  VisibleRange seen{0, end, *row == 0.0f};
  if (call.mask.strides[3] != 0) seen = kernel.visible(row, end);
  // A row in which everything is hidden is left to the exact kernel.
  if (seen.end <= std::max(seen.begin, begin) || !seen.plain) return std::nullopt;
  return KeyRange{std::max(seen.begin, begin), seen.end};
}

// Runs the decode kernel on uncached keys, such as cross-attention of a decoder's few queries.
void Decode(Host& host, const DecodeFunctions& kernel, const AttentionCall& call, const std::vector<DecodeRow>& rows) {
  const int64_t group = call.Group();
  const SinkPartials sinks(host, call);
  DecodeRows(
      host, kernel, call, rows, 1, Aligned(kernel.scratch_bytes(group, call.head_dim)),
      [&](const DecodeRow& row, KeyRange keys, const DecodePartial& partial, char* scratch) {
        DecodeAttentionArgs args;
        args.heads = group;
        args.head_dim = call.head_dim;
        args.q = call.q.At(row.batch, row.kv_head * group, row.query);
        args.q_head_bytes = call.q.head_bytes;
        args.scale = call.scale;
        args.softcap = call.softcap;
        args.tokens = call.keys;
        args.keys = call.k.At(row.batch, row.kv_head, 0);
        args.key_row_bytes = call.k.row_bytes;
        args.values = call.v.At(row.batch, row.kv_head, 0);
        args.value_row_bytes = call.v.row_bytes;
        kernel.run(args, keys.begin, keys.end, partial, scratch);
      },
      [&](const DecodeRow& row, const DecodePartial& whole) {
        sinks.MergeInto(kernel, row.kv_head, whole);
        kernel.finish(group, call.head_dim, whole, call.Y(row.batch, row.kv_head * group, row.query),
                      call.head_dim * static_cast<int64_t>(sizeof(float)));
      });
}

// Masks of packed sequences, read in place if the sequence has no gap and all its tokens are visible. Otherwise the
// part for its tokens is copied, with the lowest float for tokens that no query sees.
class KeptMasks {
 public:
  KeptMasks(Host& host, const MaskRows& mask, int64_t heads, const KeptTokens& kept) : mask_(mask), of_(kept) {
    const bool varies = mask.data != nullptr && (mask.strides[2] != 0 || mask.strides[3] != 0);
    copies_.resize(static_cast<size_t>(kept.batch));
    for (int64_t b = 0; b < kept.batch; ++b) {
      const bool all_seen = kept.AllSeen(b);
      if (all_seen && (!varies || kept.IsContiguous(b))) continue;
      const auto size = [&](size_t axis, int64_t count) { return mask.strides[axis] == 0 ? 1 : count; };
      const int64_t count = kept.Count(b);
      const int64_t heads_of = size(1, heads), queries = size(2, count), keys = all_seen ? size(3, count) : count;
      auto& copy = copies_[static_cast<size_t>(b)];
      copy.values = std::make_unique<HostMemory>(host, heads_of * queries * keys * static_cast<int64_t>(sizeof(float)));
      copy.strides = {0, heads_of == 1 ? 0 : queries * keys, queries == 1 ? 0 : keys, keys == 1 ? 0 : 1};
      float* to = reinterpret_cast<float*>(copy.values->data());
      for (int64_t head = 0; head < heads_of; ++head) {
        for (int64_t i = 0; i < queries; ++i) {
          const float* const row = mask.data == nullptr ? nullptr : mask.At(b, head, kept.Positions(b)[i]);
          for (int64_t j = 0; j < keys; ++j) {
            const float own = row == nullptr ? 0.0f : row[kept.Positions(b)[j] * mask.strides[3]];
            *to++ = all_seen || kept.IsSeen(b, j) ? own : std::numeric_limits<float>::lowest();
          }
        }
      }
    }
  }

  MaskRows Of(int64_t b) const {
    const Copy& copy = copies_[static_cast<size_t>(b)];
    if (copy.values != nullptr) return {reinterpret_cast<const float*>(copy.values->data()), copy.strides};
    MaskRows mask = mask_;
    if (mask.data == nullptr) return mask;
    mask.strides[0] = 0;
    const int64_t first = of_.Count(b) == 0 ? 0 : of_.Positions(b)[0];
    mask.data = mask_.At(b, 0, first) + first * mask.strides[3];
    return mask;
  }

 private:
  struct Copy {
    std::unique_ptr<HostMemory> values;  // null if the mask is read in place
    std::array<int64_t, 4> strides{};
  };

  MaskRows mask_;
  const KeptTokens& of_;
  std::vector<Copy> copies_;  // [batch]
};

}  // namespace

AttentionArgs ArgsOf(const AttentionCall& call, int64_t batch, int64_t kv_head, int64_t first, int64_t count) {
  const int64_t head = kv_head * call.Group();
  AttentionArgs args;
  args.heads = call.Group();
  args.queries = count;
  args.keys = call.keys;
  args.head_dim = call.head_dim;
  args.q = call.q.At(batch, head, first);
  args.q_head_bytes = call.q.head_bytes;
  args.q_row_bytes = call.q.row_bytes;
  args.k = call.k.At(batch, kv_head, 0);
  args.k_row_bytes = call.k.row_bytes;
  args.v = call.v.At(batch, kv_head, 0);
  args.v_row_bytes = call.v.row_bytes;
  if (call.mask.data != nullptr) {
    args.mask = call.mask.At(batch, head, first);
    args.mask_head_stride = args.heads > 1 ? call.mask.strides[1] : 0;
    args.mask_query_stride = call.mask.strides[2];
    args.mask_key_stride = call.mask.strides[3];
  }
  args.scale = call.scale;
  args.softcap = call.softcap;
  args.causal = call.causal;
  args.zero_hidden_rows = call.zero_hidden_rows;
  args.window = call.window;
  args.sinks = call.sinks == nullptr ? nullptr : call.sinks + head;
  args.y = call.Y(batch, head, first);
  args.y_head_bytes = call.head_dim * static_cast<int64_t>(sizeof(float));
  args.y_row_bytes = call.heads * args.y_head_bytes;
  return args;
}

AttentionPlan::AttentionPlan(int precision, bool reproducible)
    : kernel_(FindAttentionKernel(precision, reproducible)),
      decode_(SelectKernel(DecodeAttentionKernels(), ActiveFeatures())),
      reproducible_(reproducible) {}

void AttentionPlan::Run(Host& host, const AttentionCall& call) const {
  if (call.batch == 0 || call.queries == 0) return;
  if (call.keys == 0) {  // empty sums
    std::memset(call.y, 0, static_cast<size_t>(call.batch * call.queries * call.heads * call.head_dim) * sizeof(float));
    return;
  }
  DecodeSplit split;
  const bool few = !reproducible_ && call.queries <= kMostDecodeQueries && call.queries < call.keys;
  if (few && ValidateKeyCodeLayout({call.head_dim, 1}).empty()) {
    split = SplitSequences(call, [&](int64_t batch, int64_t head, int64_t query) {
      return VisibleKeys(decode_, call, batch, head, query);
    });
    Decode(host, decode_, call, split.rows);
  } else {
    split.others = AllSequences(call.batch);
  }
  const int64_t heads = static_cast<int64_t>(split.others.size()) * call.kv_heads;
  if (heads == 0) return;
  AttendHeads(host, kernel_, heads, call.Group() * call.queries, call.keys, call.head_dim, [&](int64_t head) {
    const int64_t batch = split.others[static_cast<size_t>(head / call.kv_heads)];
    return ArgsOf(call, batch, head % call.kv_heads, 0, call.queries);
  });
}

void AttentionPlan::Run(Host& host, const AttentionCall& call, const KeptTokens& kept) const {
  // Up to kAttentionRows rows, from `row` on, of one key-value head of a sequence.
  struct Unit {
    int64_t sequence, kv_head, row;
  };
  const KeptMasks masks(host, call.mask, call.heads, kept);
  std::vector<AttentionCall> calls;  // one per sequence
  std::vector<Unit> units;
  // The first unit of each work item. An item has enough units to be worth handing to another thread.
  std::vector<size_t> items{0};
  int64_t item_macs = 0;
  for (int64_t b = 0; b < kept.batch; ++b) {
    AttentionCall& own = calls.emplace_back(call);
    const int64_t begin = kept.Begin(b);
    own.queries = own.keys = kept.Count(b);
    for (HeadRows* rows : {&own.q, &own.k, &own.v}) rows->data = rows->At(0, 0, begin);
    own.mask = masks.Of(b);
    own.y = call.Y(0, 0, begin);
    const int64_t rows = own.Group() * own.queries;
    for (int64_t kv_head = 0; kv_head < call.kv_heads; ++kv_head) {
      for (int64_t row = 0; row < rows; row += kAttentionRows) {
        units.push_back({b, kv_head, row});
        item_macs += 2 * std::min(rows - row, kAttentionRows) * own.keys * call.head_dim;
        if (item_macs < ActiveTuning().piece_macs) continue;
        items.push_back(units.size());
        item_macs = 0;
      }
    }
  }
  if (items.back() != units.size()) items.push_back(units.size());
  const int64_t scratch_bytes = kernel_.scratch_bytes(call.head_dim);
  ForEachWithScratch(host, static_cast<int64_t>(items.size()) - 1, scratch_bytes, [&](int64_t item, char* scratch) {
    for (size_t u = items[static_cast<size_t>(item)]; u < items[static_cast<size_t>(item) + 1]; ++u) {
      const Unit& unit = units[u];
      const AttentionCall& own = calls[static_cast<size_t>(unit.sequence)];
      const int64_t end = std::min(own.Group() * own.queries, unit.row + kAttentionRows);
      kernel_.run(ArgsOf(own, 0, unit.kv_head, 0, own.queries), unit.row, end, scratch);
    }
  });
}

}  // namespace ortolan
