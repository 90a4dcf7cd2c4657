#include <algorithm>
#include <cstring>

#include "attention/kv_cache/kv_cache.h"
#include "isa/kernel_table.h"
#include "nomad_attention/cached_op.h"
#include "ort/thread_scratch.h"

namespace ortolan {
namespace {

constexpr int64_t kFloat = sizeof(float);
// So few queries are computed one by one, on the cache as it is.
constexpr int64_t kMostDecodeQueries = 4;
// Tokens of a sequence that one thread goes through at least: more than building a query's tables costs.
constexpr int64_t kMinPartTokens = 4096;
// Enough pieces of work for the threads of a server.
constexpr int64_t kPieces = 64;
// Of keys and values as floats, of as many heads as fit at a time, and at least of one.
constexpr int64_t kMostFloatBytes = int64_t{64} << 20;

}  // namespace

// The tokens behind the prompt that a query sees, with all of the prompt; none if the mask does more than to hide
// others, or leaves a gap.
std::optional<CachedAttention::Tokens> CachedAttention::VisibleTokens(const AttentionCall& call, const Lengths& lengths,
                                                                      int64_t batch, int64_t head,
                                                                      int64_t query) const {
  const int64_t past = lengths.past[static_cast<size_t>(batch)];
  const int64_t prompt = prompt_.Tokens();
  const auto behind_prompt = [&](Tokens all) { return Tokens{all.begin - prompt, all.end - prompt}; };
  Tokens seen{0, prompt + past + lengths.added[static_cast<size_t>(batch)]};
  if (call.causal) seen.end = std::min(seen.end, prompt + past + query + 1);
  if (call.mask.data == nullptr) return behind_prompt({prompt, seen.end});
  const std::vector<int64_t>& strides = call.mask.strides;
  const float* row = call.mask.data + batch * strides[0] + head * strides[1] + query * strides[2];
  if (strides[3] == 0) {
    if (*row != 0.0f) return std::nullopt;
    return behind_prompt({prompt, seen.end});
  }
  const VisibleRange range = SelectKernel(SoftmaxKernels(), ActiveFeatures()).visible(row, seen.end);
  // What a row of hidden keys gives is the exact kernel's to say.
  if (range.begin == range.end || !range.plain) return std::nullopt;
  seen = {range.begin, range.end};
  if (prompt == 0) return seen;
  if (seen.begin > 0 || seen.end < prompt) return std::nullopt;  // some of the prompt is hidden
  return behind_prompt({prompt, seen.end});
}

// Of each query of the batch; none if those of one query are no range, or differ between heads.
std::optional<std::vector<CachedAttention::Tokens>> CachedAttention::VisibleTokens(const AttentionCall& call,
                                                                                   const Lengths& lengths) const {
  const int64_t mask_heads = call.mask.data != nullptr && call.mask.strides[1] != 0 ? call.heads : 1;
  std::vector<Tokens> all;
  for (int64_t i = 0; i < call.batch * call.queries; ++i) {
    const int64_t batch = i / call.queries, query = i % call.queries;
    const std::optional<Tokens> seen = VisibleTokens(call, lengths, batch, 0, query);
    if (!seen) return std::nullopt;
    for (int64_t head = 1; head < mask_heads; ++head) {
      const std::optional<Tokens> other = VisibleTokens(call, lengths, batch, head, query);
      if (!other || other->begin != seen->begin || other->end != seen->end) return std::nullopt;
    }
    all.push_back(*seen);
  }
  return all;
}

void CachedAttention::Attend(const Ort::KernelContext& context, const AttentionCall& call, const Lengths& lengths,
                             const Cache& cache) const {
  const bool is_short = call.queries <= kMostDecodeQueries;
  if (is_short && ValidateKeyCodeLayout({call.head_dim, 1}).empty()) {
    if (const auto seen = VisibleTokens(call, lengths)) return Decode(context, call, lengths, cache, *seen);
  }
  // Of a short call each query has a window of its own.
  const int64_t count = window_.Any() && is_short ? 1 : call.queries;
  for (int64_t i = 0; i < call.queries; i += count) Prompt(context, call, lengths, cache, i, count);
}

void CachedAttention::Decode(const Ort::KernelContext& context, const AttentionCall& call, const Lengths& lengths,
                             const Cache& cache, const std::vector<Tokens>& seen) const {
  const DecodeAttentionKernel& kernel = SelectKernel(DecodeAttentionKernels(), ActiveFeatures());
  const int64_t group = call.heads / call.kv_heads;
  const int64_t rows = call.batch * call.kv_heads * call.queries;
  const int64_t most = *std::max_element(lengths.past.begin(), lengths.past.end()) + call.queries;
  const int64_t parts = std::clamp<int64_t>(std::min((kPieces + rows - 1) / rows, most / kMinPartTokens), 1, kPieces);
  const int64_t partial_floats = Aligned(group * (2 + call.head_dim) * kFloat) / kFloat;
  const Scratch partials(context, static_cast<size_t>(rows * parts * partial_floats * kFloat));
  const auto partial_at = [&](float* at) { return DecodePartial{at, at + group, at + 2 * group}; };
  const auto partial_of = [&](int64_t item) {
    return partial_at(static_cast<float*>(partials.data()) + item * partial_floats);
  };
  const int64_t kernel_bytes = Aligned(kernel.scratch_bytes(group, call.head_dim));
  // Behind it, the partial result of a piece.
  const int64_t scratch_bytes = kernel_bytes + (window_.Any() ? partial_floats * kFloat : 0);
  ForEachWithScratch(context, node_, rows * parts, scratch_bytes, [&](int64_t item, char* scratch) {
    const int64_t row = item / parts, part = item % parts;
    const int64_t query = row % call.queries, kv_head = row / call.queries % call.kv_heads;
    const int64_t batch = row / call.queries / call.kv_heads;
    const int64_t past = lengths.past[static_cast<size_t>(batch)];
    const auto [begin, end] = seen[static_cast<size_t>(batch * call.queries + query)];
    const int64_t head = batch * call.kv_heads + kv_head;
    DecodeAttentionArgs args;
    args.heads = group;
    args.head_dim = call.head_dim;
    args.q = call.q.At(batch, kv_head * group, query);
    args.q_head_bytes = call.q.head_bytes;
    args.scale = call.scale;
    args.tokens = past + lengths.added[static_cast<size_t>(batch)];
    if (codebooks_ != nullptr) {
      args.key_codes = reinterpret_cast<const uint8_t*>(cache.keys.At(head, 0));
      args.d_sub = layout_.d_sub;
      args.codebook = codebooks_ + kv_head * layout_.CodebookFloats();
    } else {
      args.keys = reinterpret_cast<const float*>(cache.keys.At(head, 0));
      args.key_row_bytes = cache.keys.row_bytes;
    }
    if (int8_values_) {
      args.int8_values = reinterpret_cast<const uint8_t*>(cache.values.At(head, 0));
    } else {
      args.values = reinterpret_cast<const float*>(cache.values.At(head, 0));
      args.value_row_bytes = cache.values.row_bytes;
    }
    // Parts end with whole blocks.
    const int64_t step = ((end - begin + parts - 1) / parts + kKeyBlock - 1) / kKeyBlock * kKeyBlock;
    const int64_t from = std::min(end, begin + part * step), to = std::min(end, from + step);
    const DecodePartial whole = partial_of(item);
    const DecodePartial more = partial_at(reinterpret_cast<float*>(scratch + kernel_bytes));
    int64_t done = from;
    do {
      const KeyPiece piece = window_.First(Held(call, past), past + query, done, to);
      if (window_.Any()) {  // else the keys of the cache are all there is
        args.keys = nullptr;
        args.first_key = piece.begin;
        if (piece.source == KeyPiece::Source::kExact) {
          args.keys = reinterpret_cast<const float*>(cache.exact_keys.At(head, window_.Slot(piece.begin)));
          args.key_row_bytes = cache.exact_keys.row_bytes;
        } else if (piece.source == KeyPiece::Source::kCall) {
          args.keys = call.k.At(batch, kv_head, piece.begin - past);
          args.key_row_bytes = call.k.row_bytes;
        }
      }
      kernel.run(args, piece.begin, piece.end, done == from ? whole : more, scratch);
      if (done != from) SelectKernel(SoftmaxKernels(), ActiveFeatures()).merge(group, call.head_dim, more, whole);
      done = piece.end;
    } while (done < to);
  });
  std::optional<CachedPrompt::Partials> prompt;
  if (prompt_.Tokens() > 0) prompt.emplace(context, node_, prompt_, call);
  for (int64_t row = 0; row < rows; ++row) {
    const DecodePartial whole = partial_of(row * parts);
    for (int64_t part = 1; part < parts; ++part) {
      SelectKernel(SoftmaxKernels(), ActiveFeatures())
          .merge(group, call.head_dim, partial_of(row * parts + part), whole);
    }
    const int64_t query = row % call.queries, kv_head = row / call.queries % call.kv_heads;
    const int64_t batch = row / call.queries / call.kv_heads;
    if (prompt) prompt->MergeInto(whole, batch, kv_head, query);
    SelectKernel(SoftmaxKernels(), ActiveFeatures())
        .finish(group, call.head_dim, whole,
                call.y + ((batch * call.queries + query) * call.heads + kv_head * group) * call.head_dim,
                call.head_dim * kFloat);
  }
}

void CachedAttention::WriteKeys(const AttentionCall& call, const Lengths& lengths, int64_t batch, int64_t kv_head,
                                const Cache& cache, int64_t position, int64_t end, float* to) const {
  const int64_t past = lengths.past[static_cast<size_t>(batch)];
  const int64_t tokens = past + lengths.added[static_cast<size_t>(batch)];
  const int64_t head = batch * call.kv_heads + kv_head, row_bytes = call.head_dim * kFloat;
  if (codebooks_ == nullptr) {
    std::memcpy(to, cache.keys.At(head, 0), static_cast<size_t>(end * row_bytes));
    return;
  }
  for (KeyPiece piece; piece.end < end;) {
    piece = window_.First(Held(call, past), position, piece.end, end);
    float* rows = to + piece.begin * call.head_dim;
    const int64_t count = piece.end - piece.begin;
    if (piece.source == KeyPiece::Source::kCache) {
      SelectKernel(KvCacheKernels(), ActiveFeatures())
          .decode_keys(layout_, codebooks_ + kv_head * layout_.CodebookFloats(),
                       reinterpret_cast<const uint8_t*>(cache.keys.At(head, 0)), tokens, piece.begin, piece.end, rows,
                       row_bytes);
    } else if (piece.source == KeyPiece::Source::kExact) {
      std::memcpy(rows, cache.exact_keys.At(head, window_.Slot(piece.begin)), static_cast<size_t>(count * row_bytes));
    } else {
      for (int64_t i = 0; i < count; ++i) {
        std::memcpy(rows + i * call.head_dim, call.k.At(batch, kv_head, piece.begin - past + i),
                    static_cast<size_t>(row_bytes));
      }
    }
  }
}

void CachedAttention::WriteFloats(const AttentionCall& call, const Lengths& lengths, int64_t head, const Cache& cache,
                                  int64_t first, bool own_cached, float* k, float* v) const {
  const int64_t batch = head / call.kv_heads, kv_head = head % call.kv_heads;
  const int64_t past = lengths.past[static_cast<size_t>(batch)], added = lengths.added[static_cast<size_t>(batch)];
  const int64_t from_cache = own_cached ? past + added : past, row_bytes = call.head_dim * kFloat;
  const char* values = cache.values.At(head, 0);
  // In the past of a long call, what the exact keys hold.
  WriteKeys(call, lengths, batch, kv_head, cache, own_cached ? past + first : past - 1, from_cache, k);
  if (int8_values_) {
    SelectKernel(KvCacheKernels(), ActiveFeatures())
        .decode_values(call.head_dim, reinterpret_cast<const uint8_t*>(values), past + added, 0, from_cache, v,
                       row_bytes);
  } else {
    std::memcpy(v, values, static_cast<size_t>(from_cache * row_bytes));
  }
  for (int64_t i = from_cache - past; i < call.queries; ++i) {
    std::memcpy(k + (past + i) * call.head_dim, call.k.At(batch, kv_head, i), static_cast<size_t>(row_bytes));
    std::memcpy(v + (past + i) * call.head_dim, call.v.At(batch, kv_head, i), static_cast<size_t>(row_bytes));
  }
}

void CachedAttention::Prompt(const Ort::KernelContext& context, const AttentionCall& call, const Lengths& lengths,
                             const Cache& cache, int64_t first, int64_t count) const {
  const AttentionKernel& kernel = SelectKernel(AttentionKernels(), ActiveFeatures(), {.precision = call.precision});
  const int64_t group = call.heads / call.kv_heads;
  const int64_t prompt = prompt_.Tokens();
  const int64_t most = prompt + *std::max_element(lengths.past.begin(), lengths.past.end()) + call.queries;
  const int64_t row_bytes = call.head_dim * kFloat;
  // A short call reads all from the cache, whatever its masks are.
  const bool own_cached = call.queries <= kMostDecodeQueries && (codebooks_ != nullptr || int8_values_);
  const bool as_given = most == call.queries && !own_cached;  // there is no past
  const int64_t row_count = group * count;
  const int64_t chunks = (row_count + kAttentionRows - 1) / kAttentionRows;
  const int64_t heads = call.batch * call.kv_heads;
  // Keys and values of the prompt and the past, then this call's, as floats.
  std::optional<Scratch> floats;
  float* all = nullptr;
  int64_t at_once = heads;
  if (!as_given) {
    at_once = std::clamp<int64_t>(kMostFloatBytes / (2 * most * row_bytes), 1, heads);
    floats.emplace(context, static_cast<size_t>(2 * at_once * most * row_bytes));
    all = static_cast<float*>(floats->data());
  }
  const int64_t pieces = prompt > 0 ? prompt_.cache().Chunks() : 0;
  const int64_t unpack_bytes = prompt > 0 ? PromptUnpackBytes(prompt_.cache()) : 0;
  const int64_t bytes = kernel.scratch_bytes(call.head_dim);
  for (int64_t first_head = 0; first_head < heads; first_head += at_once) {
    const int64_t some = std::min(at_once, heads - first_head);
    if (!as_given) {
      ParallelFor(context, some, [&](int64_t place) {
        float* k = all + (2 * place * most + prompt) * call.head_dim;
        WriteFloats(call, lengths, first_head + place, cache, first, own_cached, k, k + most * call.head_dim);
      });
      ForEachWithScratch(context, node_, some * pieces, unpack_bytes, [&](int64_t item, char* scratch) {
        const int64_t place = item / pieces, chunk = item % pieces;
        float* k = all + (2 * place * most + chunk * prompt_.cache().ChunkTokens()) * call.head_dim;
        UnpackPrompt(prompt_.cache(), (first_head + place) % call.kv_heads, chunk, k, k + most * call.head_dim,
                     scratch);
      });
    }
    ForEachWithScratch(context, node_, some * chunks, bytes, [&](int64_t item, char* scratch) {
      const int64_t head = first_head + item / chunks, batch = head / call.kv_heads, kv_head = head % call.kv_heads;
      AttentionArgs args;
      args.heads = group;
      args.queries = count;
      // Causality hides padding, whose keys are the last ones. Without it they are left out.
      args.keys = prompt + lengths.past[static_cast<size_t>(batch)] +
                  (call.causal ? first + count : lengths.added[static_cast<size_t>(batch)]);
      args.head_dim = call.head_dim;
      args.q = call.q.At(batch, kv_head * group, first);
      args.q_head_bytes = call.q.head_bytes;
      args.q_row_bytes = call.q.row_bytes;
      if (as_given) {
        args.k = call.k.At(batch, kv_head, 0);
        args.k_row_bytes = call.k.row_bytes;
        args.v = call.v.At(batch, kv_head, 0);
        args.v_row_bytes = call.v.row_bytes;
      } else {
        args.k = all + 2 * (item / chunks) * most * call.head_dim;
        args.v = args.k + most * call.head_dim;
        args.k_row_bytes = args.v_row_bytes = row_bytes;
      }
      if (call.mask.data != nullptr) {
        const std::vector<int64_t>& strides = call.mask.strides;
        args.mask = call.mask.data + batch * strides[0] + kv_head * group * strides[1] + first * strides[2];
        args.mask_head_stride = group > 1 ? strides[1] : 0;
        args.mask_query_stride = strides[2];
        args.mask_key_stride = strides[3];
      }
      args.scale = call.scale;
      args.causal = call.causal;
      args.zero_hidden_rows = call.zero_hidden_rows;
      args.y = call.y + ((batch * call.queries + first) * call.heads + kv_head * group) * call.head_dim;
      args.y_head_bytes = row_bytes;
      args.y_row_bytes = call.heads * row_bytes;
      const int64_t row = item % chunks * kAttentionRows;
      kernel.run(args, row, std::min(row_count, row + kAttentionRows), scratch);
    });
  }
}

}  // namespace ortolan
