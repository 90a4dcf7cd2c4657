#include "nomad_attention/cached_plan.h"

#include <cstring>
#include <optional>
#include <span>
#include <vector>

#include "host/error_text.h"
#include "isa/kernel_table.h"
#include "nomad_attention/decode_rows.h"

namespace ortolan {
namespace {

constexpr int64_t kFloat = sizeof(float);
// Limit on keys and values as floats: heads are processed in groups of this size, at least one head at a time.
constexpr int64_t kMostFloatBytes = int64_t{64} << 20;

void Copy(void* to, const void* from, int64_t bytes) { std::memcpy(to, from, static_cast<size_t>(bytes)); }

}  // namespace

std::string CachedCall::SetLengths(std::span<const int32_t> lengths, int64_t past_room, int64_t prompt_tokens,
                                   const std::string& name, const std::string& past_name) {
  room = past_room;
  for (size_t b = 0; b < lengths.size(); ++b) {
    const int64_t last = lengths[b] - prompt_tokens;
    if (last < 0) {
      return ErrorText(name, " is ", lengths[b], " for sequence ", b,
                       ", expected the number of its tokens after this call minus 1, at least ", prompt_tokens,
                       prompt_tokens > 0 ? " (including the tokens of the model's prompt)" : "");
    }
    // A sequence may start with fewer tokens than the longest one; padding follows it.
    const int64_t before = std::max<int64_t>(last + 1 - queries, 0);
    if (before > past_room) {
      return ErrorText("sequence ", b, " has ", last + 1, " tokens after this call of ", queries, ", but ", past_name,
                       " has room for ", past_room, ". Pass a cache that holds all earlier tokens.");
    }
    past.push_back(before);
    added.push_back(last + 1 - before);
    room = std::max(room, before + queries);
  }
  keys = prompt_tokens + room;
  return {};
}

// The execution of one call. `head` counts the key-value heads of all sequences.
class CachedPlan::Running {
 public:
  Running(const CachedPlan& plan, Host& host, const CachedCall& call)
      : plan_(plan), form_(plan.form_), host_(host), call_(call), row_bytes_(call.head_dim * kFloat) {}

  void CopyPast() const {
    for (const CacheRows* rows : {&call_.key_cache, &call_.value_cache}) {
      if (rows->past == rows->data || call_.room == 0) continue;
      host_.ParallelFor(Heads(), [&](int64_t head) {
        const int64_t bytes = Past(head) * rows->row_bytes;
        char* to = rows->At(head, 0);
        if (bytes > 0) Copy(to, rows->past + head * rows->past_head_bytes, bytes);
        // Zero the unused tail so that stale heap contents cannot leak.
        std::memset(to + bytes, 0, static_cast<size_t>(rows->head_bytes - bytes));
      });
    }
    const CacheRows& exact = call_.exact_keys;
    const int64_t bytes = Heads() * exact.head_bytes;
    if (exact.past != exact.data && bytes > 0) Copy(exact.data, exact.past, bytes);
  }

  void Rotate(float* q, float* k) const {
    host_.ParallelFor(call_.batch * call_.queries, [&](int64_t i) {
      const int64_t batch = i / call_.queries, row = i % call_.queries;
      const int64_t position = form_.prompt.tokens + call_.Past(batch) + row;
      const auto rotate = [&](const HeadRows& rows, int64_t heads, float* to) {
        for (int64_t head = 0; head < heads; ++head) {
          call_.rotary.Rotate(plan_.cache_, rows.At(batch, head, row), position, call_.head_dim,
                              to + (i * heads + head) * call_.head_dim);
        }
      };
      rotate(call_.q, call_.heads, q);
      rotate(call_.k, call_.kv_heads, k);
    });
  }

  void Append() const {
    host_.ParallelFor(Heads(), [&](int64_t head) { AppendHead(head); });
  }

  void AppendExactKeys() const {
    host_.ParallelFor(Heads(), [&](int64_t head) { AppendExactKeys(head); });
  }

  void Attend() const {
    const bool is_short = call_.queries <= kMostDecodeQueries;
    DecodeSplit split;
    // Decode kernels sum in an order that depends on the CPU.
    if (is_short && !form_.reproducible && ValidateKeyCodeLayout({call_.head_dim, 1}).empty()) {
      split = SplitSequences(
          call_, [&](int64_t batch, int64_t head, int64_t query) { return VisibleTokens(batch, head, query); });
      Decode(split.rows);
    } else {
      split.others = AllSequences(call_.batch);
    }
    if (split.others.empty()) return;
    std::vector<int64_t> heads;
    for (const int64_t batch : split.others) {
      for (int64_t head = 0; head < call_.kv_heads; ++head) heads.push_back(batch * call_.kv_heads + head);
    }
    // In a short call each query has its own window, so queries run one by one.
    const int64_t count = form_.window.Any() && is_short ? 1 : call_.queries;
    for (int64_t i = 0; i < call_.queries; i += count) Prompt(heads, i, count, is_short);
  }

 private:
  int64_t Heads() const { return call_.batch * call_.kv_heads; }
  int64_t BatchOf(int64_t head) const { return head / call_.kv_heads; }
  int64_t KvHeadOf(int64_t head) const { return head % call_.kv_heads; }
  int64_t Past(int64_t head) const { return call_.Past(BatchOf(head)); }
  int64_t Tokens(int64_t head) const { return call_.Tokens(BatchOf(head)); }
  const float* Own(const HeadRows& rows, int64_t head, int64_t i) const {
    return rows.At(BatchOf(head), KvHeadOf(head), i);
  }
  const float* Codebook(int64_t head) const { return form_.codebooks + KvHeadOf(head) * form_.layout.CodebookFloats(); }
  // Returns the number of tokens in the ring of exact keys while queries read it: the past, and for a single query its
  // own token, which has replaced the one that left the window.
  int64_t Held(int64_t head) const { return call_.queries == 1 ? Past(head) + 1 : Past(head); }

  void AppendHead(int64_t head) const {
    const int64_t past = Past(head), added = Tokens(head) - past;
    const auto copy = [&](const HeadRows& rows, const CacheRows& cache) {
      for (int64_t i = 0; i < added; ++i) Copy(cache.At(head, past + i), Own(rows, head, i), cache.row_bytes);
    };
    if (form_.codebooks == nullptr) {
      copy(call_.k, call_.key_cache);
    } else {
      AppendKeys(plan_.cache_, form_.layout, Codebook(head), Own(call_.k, head, 0), call_.k.row_bytes, added, past,
                 call_.key_cache.Bytes(head));
    }
    if (form_.int8_values) {
      AppendValues(plan_.cache_, call_.head_dim, Own(call_.v, head, 0), call_.v.row_bytes, added, past,
                   call_.value_cache.Bytes(head));
    } else {
      copy(call_.v, call_.value_cache);
    }
    if (form_.window.Any() && call_.queries == 1) AppendExactKeys(head);
  }

  void AppendExactKeys(int64_t head) const {
    const int64_t past = Past(head), tokens = Tokens(head);
    for (int64_t token = past; token < tokens; ++token) {
      if (!form_.window.Holds(token, tokens)) continue;
      Copy(call_.exact_keys.At(head, form_.window.Slot(token)), Own(call_.k, head, token - past), row_bytes_);
    }
  }

  // Returns the tokens after the prompt that a query sees. No value if the mask hides a part of the prompt, leaves a
  // gap, or does more than hide tokens.
  std::optional<KeyRange> VisibleTokens(int64_t batch, int64_t head, int64_t query) const {
    const int64_t prompt = form_.prompt.tokens;
    int64_t end = prompt + call_.Tokens(batch);
    if (call_.causal) end = std::min(end, prompt + call_.Past(batch) + query + 1);
    const int64_t begin = call_.WindowBegin(end);
    if (call_.mask.data == nullptr && begin == 0) return KeyRange{0, end - prompt};
    if (call_.mask.data == nullptr) return Visible({begin, end});
    const float* row = call_.mask.At(batch, head, query);
    VisibleRange seen{0, end, *row == 0.0f};
    if (call_.mask.strides[3] != 0) seen = plan_.decode_.visible(row, end);
    return seen.plain ? Visible({std::max(seen.begin, begin), seen.end}) : std::nullopt;
  }

  // Returns a range of all tokens without those of the prompt; no value if it is empty or hides a part of the prompt.
  std::optional<KeyRange> Visible(const KeyRange& range) const {
    const int64_t prompt = form_.prompt.tokens;
    // A row in which everything is hidden is left to the exact kernel.
    if (range.begin >= range.end || range.end < prompt || (prompt > 0 && range.begin > 0)) return std::nullopt;
    return KeyRange{std::max<int64_t>(range.begin - prompt, 0), range.end - prompt};
  }

  DecodeAttentionArgs DecodeArgs(int64_t head, int64_t query) const {
    DecodeAttentionArgs args;
    args.heads = call_.Group();
    args.head_dim = call_.head_dim;
    args.q = call_.q.At(BatchOf(head), KvHeadOf(head) * args.heads, query);
    args.q_head_bytes = call_.q.head_bytes;
    args.scale = call_.scale;
    args.softcap = call_.softcap;
    args.tokens = Tokens(head);
    if (form_.codebooks != nullptr) {
      args.key_codes = call_.key_cache.Bytes(head);
      args.d_sub = form_.layout.d_sub;
      args.codebook = Codebook(head);
    } else {
      args.keys = call_.key_cache.Floats(head, 0);
      args.key_row_bytes = call_.key_cache.row_bytes;
    }
    if (form_.int8_values) {
      args.int8_values = call_.value_cache.Bytes(head);
    } else {
      args.values = call_.value_cache.Floats(head, 0);
      args.value_row_bytes = call_.value_cache.row_bytes;
    }
    return args;
  }

  // Decodes a range by pieces with contiguous keys. more: buffer for the partial result of a piece.
  void DecodeRange(int64_t head, int64_t query, KeyRange range, const DecodePartial& whole, const DecodePartial& more,
                   void* scratch) const {
    const int64_t past = Past(head);
    DecodeAttentionArgs args = DecodeArgs(head, query);
    int64_t done = range.begin;
    do {
      const KeyPiece piece = form_.window.First(Held(head), past + query, done, range.end);
      if (form_.window.Any()) {  // otherwise all keys are in the cache
        args.keys = nullptr;
        args.first_key = piece.begin;
        if (piece.source == KeyPiece::Source::kExact) {
          args.keys = call_.exact_keys.Floats(head, form_.window.Slot(piece.begin));
          args.key_row_bytes = call_.exact_keys.row_bytes;
        } else if (piece.source == KeyPiece::Source::kCall) {
          args.keys = Own(call_.k, head, piece.begin - past);
          args.key_row_bytes = call_.k.row_bytes;
        }
      }
      const bool first = done == range.begin;
      plan_.decode_.run(args, piece.begin, piece.end, first ? whole : more, scratch);
      if (!first) plan_.decode_.merge(args.heads, call_.head_dim, more, whole);
      done = piece.end;
    } while (done < range.end);
  }

  void Decode(const std::vector<DecodeRow>& rows) const {
    if (rows.empty()) return;
    const int64_t group = call_.Group();
    const int64_t kernel_bytes = Aligned(plan_.decode_.scratch_bytes(group, call_.head_dim));
    // Followed by the partial result of a piece.
    const int64_t piece_bytes = form_.window.Any() ? Aligned(group * (2 + call_.head_dim) * kFloat) : 0;
    const SinkPartials sinks(host_, call_);
    std::optional<PromptPartials> prompt;
    if (form_.prompt.tokens > 0) prompt.emplace(host_, form_.prompt, plan_.decode_, call_);
    DecodeRows(
        host_, plan_.decode_, call_, rows, kKeyBlock, kernel_bytes + piece_bytes,
        [&](const DecodeRow& row, KeyRange tokens, const DecodePartial& partial, char* scratch) {
          DecodeRange(row.batch * call_.kv_heads + row.kv_head, row.query, tokens, partial,
                      PartialAt(scratch + kernel_bytes, group), scratch);
        },
        [&](const DecodeRow& row, const DecodePartial& whole) {
          if (prompt) prompt->MergeInto(whole, row.batch, row.kv_head, row.query);
          sinks.MergeInto(plan_.decode_, row.kv_head, whole);
          plan_.decode_.finish(group, call_.head_dim, whole, call_.Y(row.batch, row.kv_head * group, row.query),
                               row_bytes_);
        });
  }

  // Writes the keys of tokens 0 … end-1 as floats, as seen by the query at `position`.
  void WriteKeys(int64_t head, int64_t position, int64_t end, float* to) const {
    if (form_.codebooks == nullptr) return Copy(to, call_.key_cache.At(head, 0), end * row_bytes_);
    for (KeyPiece piece; piece.end < end;) {
      piece = form_.window.First(Held(head), position, piece.end, end);
      float* rows = to + piece.begin * call_.head_dim;
      const int64_t count = piece.end - piece.begin;
      if (piece.source == KeyPiece::Source::kCache) {
        plan_.cache_.decode_keys(form_.layout, Codebook(head), call_.key_cache.Bytes(head), Tokens(head), piece.begin,
                                 piece.end, rows, row_bytes_);
      } else if (piece.source == KeyPiece::Source::kExact) {
        Copy(rows, call_.exact_keys.At(head, form_.window.Slot(piece.begin)), count * row_bytes_);
      } else {
        CopyOwn(call_.k, head, piece.begin - Past(head), count, rows);
      }
    }
  }

  void CopyOwn(const HeadRows& rows, int64_t head, int64_t first, int64_t count, float* to) const {
    for (int64_t i = 0; i < count; ++i) Copy(to + i * call_.head_dim, Own(rows, head, first + i), row_bytes_);
  }

  // Writes the keys and values of the past and of the call, [past + S][D] each, for queries from `first` on.
  // own_cached: read the call's own tokens from the cache.
  void WriteFloats(int64_t head, int64_t first, bool own_cached, float* k, float* v) const {
    const int64_t past = Past(head), from_cache = own_cached ? Tokens(head) : past;
    // In long calls, past keys are exact as far as the ring holds them.
    WriteKeys(head, own_cached ? past + first : past - 1, from_cache, k);
    if (form_.int8_values) {
      plan_.cache_.decode_values(call_.head_dim, call_.value_cache.Bytes(head), Tokens(head), 0, from_cache, v,
                                 row_bytes_);
    } else {
      Copy(v, call_.value_cache.At(head, 0), from_cache * row_bytes_);
    }
    const int64_t own = from_cache - past, behind = from_cache * call_.head_dim;
    CopyOwn(call_.k, head, own, call_.queries - own, k + behind);
    CopyOwn(call_.v, head, own, call_.queries - own, v + behind);
  }

  // WriteFloats plus the prompt's keys and values, for some heads: [head][2][most][D].
  void WriteHeads(std::span<const int64_t> some, int64_t first, bool own_cached, int64_t most, float* to) const {
    const int64_t heads = static_cast<int64_t>(some.size());
    const auto head_at = [&](int64_t index) { return some[static_cast<size_t>(index)]; };
    const PromptCache& prompt = form_.prompt;
    const auto keys_at = [&](int64_t index, int64_t token) { return to + (2 * index * most + token) * call_.head_dim; };
    const int64_t to_values = most * call_.head_dim;
    host_.ParallelFor(heads, [&](int64_t index) {
      float* k = keys_at(index, prompt.tokens);
      WriteFloats(head_at(index), first, own_cached, k, k + to_values);
    });
    if (prompt.tokens == 0) return;
    const int64_t pieces = prompt.Chunks();
    ForEachWithScratch(host_, heads * pieces, PromptUnpackBytes(prompt), [&](int64_t item, char* scratch) {
      const int64_t index = item / pieces, chunk = item % pieces;
      float* k = keys_at(index, chunk * prompt.ChunkTokens());
      UnpackPrompt(prompt, KvHeadOf(head_at(index)), chunk, k, k + to_values, scratch);
    });
  }

  // Computes queries first … first + count - 1 of some heads with the exact kernels.
  void Prompt(std::span<const int64_t> heads, int64_t first, int64_t count, bool is_short) const {
    const int64_t most = form_.prompt.tokens + call_.MostTokens();
    // A short call reads its own tokens from the cache too, so that results do not depend on the mask.
    const bool own_cached = is_short && (form_.codebooks != nullptr || form_.int8_values);
    const bool as_given = most == call_.queries && !own_cached;  // no past: use the inputs in place
    // Keys and values as floats: of the prompt, the past, then the call.
    std::optional<HostMemory> floats;
    float* all = nullptr;
    const int64_t all_heads = static_cast<int64_t>(heads.size());
    int64_t at_once = all_heads;
    if (!as_given) {
      at_once = std::clamp<int64_t>(kMostFloatBytes / (2 * most * row_bytes_), 1, all_heads);
      floats.emplace(host_, 2 * at_once * most * row_bytes_);
      all = reinterpret_cast<float*>(floats->data());
    }
    for (int64_t done = 0; done < all_heads; done += at_once) {
      const int64_t count_of_heads = std::min(at_once, all_heads - done);
      const auto some = heads.subspan(static_cast<size_t>(done), static_cast<size_t>(count_of_heads));
      if (!as_given) WriteHeads(some, first, own_cached, most, all);
      AttendHeads(host_, is_short ? plan_.short_attention_ : plan_.attention_, count_of_heads, call_.Group() * count,
                  most, call_.head_dim, [&](int64_t index) {
                    const int64_t head = some[static_cast<size_t>(index)];
                    AttentionArgs args = ArgsOf(call_, BatchOf(head), KvHeadOf(head), first, count);
                    // The causal mask hides padding, whose keys are last. Without it padding is excluded here.
                    args.keys = form_.prompt.tokens + (call_.causal ? Past(head) + first + count : Tokens(head));
                    if (!as_given) {
                      args.k = all + 2 * index * most * call_.head_dim;
                      args.v = args.k + most * call_.head_dim;
                      args.k_row_bytes = args.v_row_bytes = row_bytes_;
                    }
                    return args;
                  });
    }
  }

  const CachedPlan& plan_;
  const CacheForm& form_;
  Host& host_;
  const CachedCall& call_;
  const int64_t row_bytes_;  // bytes of a row of floats
};

CachedPlan::CachedPlan(const CacheForm& form)
    : form_(form),
      attention_(FindAttentionKernel(form.precision, form.reproducible)),
      short_attention_(form.reproducible ? attention_ : FindAttentionKernel(32, false)),
      decode_(SelectKernel(DecodeAttentionKernels(), ActiveFeatures())),
      cache_(SelectKernel(KvCacheKernels(), ActiveFeatures())) {}

void CachedPlan::Run(Host& host, CachedCall call) const {
  const Running running(*this, host, call);
  running.CopyPast();
  if (call.batch == 0 || call.queries == 0) return;
  std::optional<HostMemory> rotated;
  if (call.rotary.dims > 0) {
    const int64_t rows = call.batch * call.queries, head_bytes = call.head_dim * kFloat;
    rotated.emplace(host, rows * (call.heads + call.kv_heads) * head_bytes);
    float* q = reinterpret_cast<float*>(rotated->data());
    float* k = q + rows * call.heads * call.head_dim;
    running.Rotate(q, k);
    call.q = {q, call.queries * call.heads * head_bytes, head_bytes, call.heads * head_bytes};
    call.k = {k, call.queries * call.kv_heads * head_bytes, head_bytes, call.kv_heads * head_bytes};
  }
  running.Append();
  running.Attend();
  // After attending, because queries still read the tokens that are replaced.
  if (form_.window.Any() && call.queries > 1) running.AppendExactKeys();
}

}  // namespace ortolan
