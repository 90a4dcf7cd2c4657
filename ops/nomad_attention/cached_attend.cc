#include <cstring>

#include "nomad_attention/cached_plan.h"
#include "nomad_attention/prompt_partials.h"

namespace ortolan {
namespace {

constexpr int64_t kFloat = sizeof(float);
// Tokens of a sequence that one thread goes through at least: more than building a query's tables costs.
constexpr int64_t kMinPartTokens = 4096;
// Enough pieces of work for the threads of a server.
constexpr int64_t kPieces = 64;
// Of keys and values as floats, of as many heads as fit at a time, and at least of one.
constexpr int64_t kMostFloatBytes = int64_t{64} << 20;

DecodePartial PartialAt(char* memory, int64_t heads) {
  float* at = reinterpret_cast<float*>(memory);
  return {at, at + heads, at + 2 * heads};
}

}  // namespace

DecodeAttentionArgs CachedPlan::DecodeArgs(const CachedCall& call, Row row) const {
  const int64_t head = row.batch * call.kv_heads + row.kv_head;
  DecodeAttentionArgs args;
  args.heads = call.Group();
  args.head_dim = call.head_dim;
  args.q = call.q.At(row.batch, row.kv_head * args.heads, row.query);
  args.q_head_bytes = call.q.head_bytes;
  args.scale = call.scale;
  args.tokens = call.Tokens(row.batch);
  if (form_.codebooks != nullptr) {
    args.key_codes = reinterpret_cast<const uint8_t*>(call.key_cache.At(head, 0));
    args.d_sub = form_.layout.d_sub;
    args.codebook = form_.codebooks + row.kv_head * form_.layout.CodebookFloats();
  } else {
    args.keys = reinterpret_cast<const float*>(call.key_cache.At(head, 0));
    args.key_row_bytes = call.key_cache.row_bytes;
  }
  if (form_.int8_values) {
    args.int8_values = reinterpret_cast<const uint8_t*>(call.value_cache.At(head, 0));
  } else {
    args.values = reinterpret_cast<const float*>(call.value_cache.At(head, 0));
    args.value_row_bytes = call.value_cache.row_bytes;
  }
  return args;
}

// A piece of tokens after another, whose keys lie side by side; more: room for the partial result of one.
void CachedPlan::DecodeRange(const CachedCall& call, Row row, Tokens range, const DecodePartial& whole,
                             const DecodePartial& more, void* scratch) const {
  const int64_t past = call.Past(row.batch), head = row.batch * call.kv_heads + row.kv_head;
  DecodeAttentionArgs args = DecodeArgs(call, row);
  int64_t done = range.begin;
  do {
    const KeyPiece piece = form_.window.First(Held(call, past), past + row.query, done, range.end);
    if (form_.window.Any()) {  // else the keys of the cache are all there is
      args.keys = nullptr;
      args.first_key = piece.begin;
      if (piece.source == KeyPiece::Source::kExact) {
        args.keys = reinterpret_cast<const float*>(call.exact_keys.At(head, form_.window.Slot(piece.begin)));
        args.key_row_bytes = call.exact_keys.row_bytes;
      } else if (piece.source == KeyPiece::Source::kCall) {
        args.keys = call.k.At(row.batch, row.kv_head, piece.begin - past);
        args.key_row_bytes = call.k.row_bytes;
      }
    }
    const bool first = done == range.begin;
    decode_.run(args, piece.begin, piece.end, first ? whole : more, scratch);
    if (!first) softmax_.merge(args.heads, call.head_dim, more, whole);
    done = piece.end;
  } while (done < range.end);
}

void CachedPlan::Decode(Host& host, const CachedCall& call, const std::vector<Tokens>& seen) const {
  const int64_t group = call.Group();
  const int64_t rows = call.batch * call.kv_heads * call.queries;
  const int64_t parts =
      std::clamp<int64_t>(std::min((kPieces + rows - 1) / rows, call.MostTokens() / kMinPartTokens), 1, kPieces);
  const int64_t partial_bytes = Aligned(group * (2 + call.head_dim) * kFloat);
  const HostMemory partials(host, rows * parts * partial_bytes);
  const auto partial_of = [&](int64_t item) { return PartialAt(partials.data() + item * partial_bytes, group); };
  const auto row_of = [&](int64_t row) {
    return Row{row / call.queries / call.kv_heads, row / call.queries % call.kv_heads, row % call.queries};
  };
  const int64_t kernel_bytes = Aligned(decode_.scratch_bytes(group, call.head_dim));
  // Behind it, the partial result of a piece.
  const int64_t scratch_bytes = kernel_bytes + (form_.window.Any() ? partial_bytes : 0);
  ForEachWithScratch(host, rows * parts, scratch_bytes, [&](int64_t item, char* scratch) {
    const Row row = row_of(item / parts);
    const auto [begin, end] = seen[static_cast<size_t>(row.batch * call.queries + row.query)];
    // Parts end with whole blocks.
    const int64_t step = ((end - begin + parts - 1) / parts + kKeyBlock - 1) / kKeyBlock * kKeyBlock;
    const int64_t from = std::min(end, begin + item % parts * step);
    DecodeRange(call, row, {from, std::min(end, from + step)}, partial_of(item),
                PartialAt(scratch + kernel_bytes, group), scratch);
  });
  std::optional<PromptPartials> prompt;
  if (form_.prompt.tokens > 0) prompt.emplace(host, form_.prompt, softmax_, call);
  for (int64_t i = 0; i < rows; ++i) {
    const DecodePartial whole = partial_of(i * parts);
    for (int64_t part = 1; part < parts; ++part) {
      softmax_.merge(group, call.head_dim, partial_of(i * parts + part), whole);
    }
    const Row row = row_of(i);
    if (prompt) prompt->MergeInto(whole, row.batch, row.kv_head, row.query);
    softmax_.finish(group, call.head_dim, whole, call.Y(row.batch, row.kv_head * group, row.query),
                    call.head_dim * kFloat);
  }
}

void CachedPlan::WriteKeys(const CachedCall& call, int64_t batch, int64_t kv_head, int64_t position, int64_t end,
                           float* to) const {
  const int64_t past = call.Past(batch), head = batch * call.kv_heads + kv_head, row_bytes = call.head_dim * kFloat;
  if (form_.codebooks == nullptr) {
    std::memcpy(to, call.key_cache.At(head, 0), static_cast<size_t>(end * row_bytes));
    return;
  }
  for (KeyPiece piece; piece.end < end;) {
    piece = form_.window.First(Held(call, past), position, piece.end, end);
    float* rows = to + piece.begin * call.head_dim;
    const int64_t count = piece.end - piece.begin;
    if (piece.source == KeyPiece::Source::kCache) {
      cache_.decode_keys(form_.layout, form_.codebooks + kv_head * form_.layout.CodebookFloats(),
                         reinterpret_cast<const uint8_t*>(call.key_cache.At(head, 0)), call.Tokens(batch), piece.begin,
                         piece.end, rows, row_bytes);
    } else if (piece.source == KeyPiece::Source::kExact) {
      std::memcpy(rows, call.exact_keys.At(head, form_.window.Slot(piece.begin)),
                  static_cast<size_t>(count * row_bytes));
    } else {
      for (int64_t i = 0; i < count; ++i) {
        std::memcpy(rows + i * call.head_dim, call.k.At(batch, kv_head, piece.begin - past + i),
                    static_cast<size_t>(row_bytes));
      }
    }
  }
}

void CachedPlan::WriteFloats(const CachedCall& call, int64_t head, int64_t first, bool own_cached, float* k,
                             float* v) const {
  const int64_t batch = head / call.kv_heads, kv_head = head % call.kv_heads, past = call.Past(batch);
  const int64_t from_cache = own_cached ? call.Tokens(batch) : past, row_bytes = call.head_dim * kFloat;
  const char* values = call.value_cache.At(head, 0);
  // In the past of a long call, what the exact keys hold.
  WriteKeys(call, batch, kv_head, own_cached ? past + first : past - 1, from_cache, k);
  if (form_.int8_values) {
    cache_.decode_values(call.head_dim, reinterpret_cast<const uint8_t*>(values), call.Tokens(batch), 0, from_cache, v,
                         row_bytes);
  } else {
    std::memcpy(v, values, static_cast<size_t>(from_cache * row_bytes));
  }
  for (int64_t i = from_cache - past; i < call.queries; ++i) {
    std::memcpy(k + (past + i) * call.head_dim, call.k.At(batch, kv_head, i), static_cast<size_t>(row_bytes));
    std::memcpy(v + (past + i) * call.head_dim, call.v.At(batch, kv_head, i), static_cast<size_t>(row_bytes));
  }
}

void CachedPlan::WriteHeads(Host& host, const CachedCall& call, int64_t first_head, int64_t heads, int64_t first,
                            bool own_cached, int64_t most, float* to) const {
  const PromptCache& prompt = form_.prompt;
  host.ParallelFor(heads, [&](int64_t place) {
    float* k = to + (2 * place * most + prompt.tokens) * call.head_dim;
    WriteFloats(call, first_head + place, first, own_cached, k, k + most * call.head_dim);
  });
  if (prompt.tokens == 0) return;
  const int64_t pieces = prompt.Chunks();
  ForEachWithScratch(host, heads * pieces, PromptUnpackBytes(prompt), [&](int64_t item, char* scratch) {
    const int64_t place = item / pieces, chunk = item % pieces;
    float* k = to + (2 * place * most + chunk * prompt.ChunkTokens()) * call.head_dim;
    UnpackPrompt(prompt, (first_head + place) % call.kv_heads, chunk, k, k + most * call.head_dim, scratch);
  });
}

void CachedPlan::Prompt(Host& host, const CachedCall& call, int64_t first, int64_t count, bool is_short) const {
  const int64_t prompt = form_.prompt.tokens;
  const int64_t most = prompt + call.MostTokens(), row_bytes = call.head_dim * kFloat;
  // A short call reads all from the cache, whatever its masks are.
  const bool own_cached = is_short && (form_.codebooks != nullptr || form_.int8_values);
  const bool as_given = most == call.queries && !own_cached;  // there is no past
  const int64_t heads = call.batch * call.kv_heads;
  // Keys and values of the prompt and the past, then this call's, as floats.
  std::optional<HostMemory> floats;
  float* all = nullptr;
  int64_t at_once = heads;
  if (!as_given) {
    at_once = std::clamp<int64_t>(kMostFloatBytes / (2 * most * row_bytes), 1, heads);
    floats.emplace(host, 2 * at_once * most * row_bytes);
    all = reinterpret_cast<float*>(floats->data());
  }
  for (int64_t first_head = 0; first_head < heads; first_head += at_once) {
    const int64_t some = std::min(at_once, heads - first_head);
    if (!as_given) WriteHeads(host, call, first_head, some, first, own_cached, most, all);
    AttendHeads(host, attention_, some, call.Group() * count, most, call.head_dim, [&](int64_t place) {
      const int64_t batch = (first_head + place) / call.kv_heads;
      AttentionArgs args = ArgsOf(call, batch, (first_head + place) % call.kv_heads, first, count);
      // Causality hides padding, whose keys are the last ones. Without it they are left out.
      args.keys = prompt + (call.causal ? call.Past(batch) + first + count : call.Tokens(batch));
      if (!as_given) {
        args.k = all + 2 * place * most * call.head_dim;
        args.v = args.k + most * call.head_dim;
        args.k_row_bytes = args.v_row_bytes = row_bytes;
      }
      return args;
    });
  }
}

}  // namespace ortolan
