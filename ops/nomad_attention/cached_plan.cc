#include "nomad_attention/cached_plan.h"

#include <cstring>

#include "isa/kernel_table.h"

namespace ortolan {
namespace {

constexpr int64_t kFloat = sizeof(float);
// So few queries are computed one by one, on the cache as it is.
constexpr int64_t kMostDecodeQueries = 4;

uint8_t* Bytes(char* data) { return reinterpret_cast<uint8_t*>(data); }

}  // namespace

CachedPlan::CachedPlan(const CacheForm& form)
    : form_(form),
      attention_(SelectKernel(AttentionKernels(), ActiveFeatures(), {.precision = form.precision})),
      decode_(SelectKernel(DecodeAttentionKernels(), ActiveFeatures())),
      softmax_(SelectKernel(SoftmaxKernels(), ActiveFeatures())),
      cache_(SelectKernel(KvCacheKernels(), ActiveFeatures())) {}

void CachedPlan::Run(Host& host, CachedCall call) const {
  CopyPast(host, call);
  if (call.batch == 0 || call.queries == 0) return;
  std::optional<HostMemory> rotated;
  if (call.cos != nullptr) {
    const int64_t rows = call.batch * call.queries, head_bytes = call.head_dim * kFloat;
    rotated.emplace(host, rows * (call.heads + call.kv_heads) * head_bytes);
    float* q = reinterpret_cast<float*>(rotated->data());
    float* k = q + rows * call.heads * call.head_dim;
    Rotate(host, call, q, k);
    call.q = {q, call.queries * call.heads * head_bytes, head_bytes, call.heads * head_bytes};
    call.k = {k, call.queries * call.kv_heads * head_bytes, head_bytes, call.kv_heads * head_bytes};
  }
  const int64_t heads = call.batch * call.kv_heads;
  host.ParallelFor(heads, [&](int64_t i) { Append(call, i / call.kv_heads, i % call.kv_heads); });
  Attend(host, call);
  if (!form_.window.Any() || call.queries == 1) return;
  // Not before: queries read what these take the place of.
  host.ParallelFor(heads, [&](int64_t i) { AppendExactKeys(call, i / call.kv_heads, i % call.kv_heads); });
}

void CachedPlan::CopyPast(Host& host, const CachedCall& call) const {
  const int64_t heads = call.batch * call.kv_heads;
  for (const CacheRows* rows : {&call.key_cache, &call.value_cache}) {
    if (rows->past == rows->data || call.room == 0) continue;
    host.ParallelFor(heads, [&](int64_t i) {
      const int64_t bytes = call.Past(i / call.kv_heads) * rows->row_bytes;
      char* to = rows->At(i, 0);
      if (bytes > 0) std::memcpy(to, rows->past + i * rows->past_head_bytes, static_cast<size_t>(bytes));
      // What is not filled is no one's memory.
      std::memset(to + bytes, 0, static_cast<size_t>(rows->head_bytes - bytes));
    });
  }
  const CacheRows& exact = call.exact_keys;
  const int64_t bytes = heads * exact.head_bytes;
  if (exact.past != exact.data && bytes > 0) std::memcpy(exact.data, exact.past, static_cast<size_t>(bytes));
}

void CachedPlan::Rotate(Host& host, const CachedCall& call, float* q, float* k) const {
  const int64_t half = call.head_dim / 2;
  host.ParallelFor(call.batch * call.queries, [&](int64_t i) {
    const int64_t batch = i / call.queries, row = i % call.queries;
    const int64_t position = form_.prompt.tokens + call.Past(batch) + row;
    const auto rotate = [&](const HeadRows& rows, int64_t heads, float* to) {
      for (int64_t head = 0; head < heads; ++head) {
        cache_.rotate(rows.At(batch, head, row), call.cos + position * half, call.sin + position * half, call.head_dim,
                      form_.interleaved, to + (i * heads + head) * call.head_dim);
      }
    };
    rotate(call.q, call.heads, q);
    rotate(call.k, call.kv_heads, k);
  });
}

void CachedPlan::Append(const CachedCall& call, int64_t batch, int64_t kv_head) const {
  const int64_t past = call.Past(batch), added = call.Tokens(batch) - past;
  const int64_t head = batch * call.kv_heads + kv_head;
  const auto copy = [&](const HeadRows& rows, const CacheRows& cache) {
    for (int64_t i = 0; i < added; ++i) {
      std::memcpy(cache.At(head, past + i), rows.At(batch, kv_head, i), static_cast<size_t>(cache.row_bytes));
    }
  };
  if (form_.codebooks == nullptr) {
    copy(call.k, call.key_cache);
  } else {
    AppendKeys(cache_, form_.layout, form_.codebooks + kv_head * form_.layout.CodebookFloats(),
               call.k.At(batch, kv_head, 0), call.k.row_bytes, added, past, Bytes(call.key_cache.At(head, 0)));
  }
  if (form_.int8_values) {
    AppendValues(cache_, call.head_dim, call.v.At(batch, kv_head, 0), call.v.row_bytes, added, past,
                 Bytes(call.value_cache.At(head, 0)));
  } else {
    copy(call.v, call.value_cache);
  }
  if (form_.window.Any() && call.queries == 1) AppendExactKeys(call, batch, kv_head);
}

void CachedPlan::AppendExactKeys(const CachedCall& call, int64_t batch, int64_t kv_head) const {
  const int64_t past = call.Past(batch), tokens = call.Tokens(batch);
  for (int64_t token = past; token < tokens; ++token) {
    if (!form_.window.Holds(token, tokens)) continue;
    std::memcpy(call.exact_keys.At(batch * call.kv_heads + kv_head, form_.window.Slot(token)),
                call.k.At(batch, kv_head, token - past), static_cast<size_t>(call.exact_keys.row_bytes));
  }
}

// The tokens behind the prompt that a query sees, with all of the prompt; none if the mask does more than to hide
// others, or leaves a gap.
std::optional<CachedPlan::Tokens> CachedPlan::VisibleTokens(const CachedCall& call, int64_t batch, int64_t head,
                                                            int64_t query) const {
  const int64_t prompt = form_.prompt.tokens;
  int64_t end = prompt + call.Tokens(batch);
  if (call.causal) end = std::min(end, prompt + call.Past(batch) + query + 1);
  if (call.mask.data == nullptr) return Tokens{0, end - prompt};
  const float* row = call.mask.At(batch, head, query);
  VisibleRange seen{0, end, *row == 0.0f};
  if (call.mask.strides[3] != 0) seen = softmax_.visible(row, end);
  // What a row of hidden keys gives is the exact kernel's to say. Of the prompt, nothing may be hidden.
  if (seen.begin == seen.end || !seen.plain || seen.end < prompt) return std::nullopt;
  if (prompt > 0 && seen.begin > 0) return std::nullopt;
  return Tokens{std::max<int64_t>(seen.begin - prompt, 0), seen.end - prompt};
}

// Of each query of the batch; none if those of one query are no range, or differ between heads.
std::optional<std::vector<CachedPlan::Tokens>> CachedPlan::VisibleTokens(const CachedCall& call) const {
  const int64_t mask_heads = call.mask.data != nullptr && call.mask.strides[1] != 0 ? call.heads : 1;
  std::vector<Tokens> all;
  for (int64_t i = 0; i < call.batch * call.queries; ++i) {
    const int64_t batch = i / call.queries, query = i % call.queries;
    const std::optional<Tokens> seen = VisibleTokens(call, batch, 0, query);
    if (!seen) return std::nullopt;
    for (int64_t head = 1; head < mask_heads; ++head) {
      const std::optional<Tokens> other = VisibleTokens(call, batch, head, query);
      if (!other || other->begin != seen->begin || other->end != seen->end) return std::nullopt;
    }
    all.push_back(*seen);
  }
  return all;
}

void CachedPlan::Attend(Host& host, const CachedCall& call) const {
  const bool is_short = call.queries <= kMostDecodeQueries;
  if (is_short && ValidateKeyCodeLayout({call.head_dim, 1}).empty()) {
    if (const auto seen = VisibleTokens(call)) return Decode(host, call, *seen);
  }
  // Of a short call each query has a window of its own.
  const int64_t count = form_.window.Any() && is_short ? 1 : call.queries;
  for (int64_t i = 0; i < call.queries; i += count) Prompt(host, call, i, count, is_short);
}

}  // namespace ortolan
