// Exact float copies of some keys of a compressed cache: of the first tokens (attention sinks) and of a window of
// recent tokens.
//
//     exact keys  float [sinks + window][D] per head: a tensor [B, KV, sinks + window, D] of fixed size
//     slot of token p: p if p < sinks, else sinks + (p - sinks) % window            a ring buffer
//
// After T tokens the slots hold tokens p < min(sinks, T) and max(sinks, T - window) <= p < T; other slots are
// arbitrary. For the query at position i of a sequence, key p is read exactly if
//
//     p < sinks  or  p > i - window and window > 0
//
// so the window of a query ends with its own token. Keys of the current call are available as floats. Earlier keys are
// read from the ring as it was before the call. So the ring is updated after all queries are answered, except in a call
// with a single query, which updates it first.
#pragma once

#include <algorithm>
#include <cstdint>

namespace ortolan {

// Tokens begin … end-1, whose keys are contiguous in one source: the cache, the ring, or the current call.
struct KeyPiece {
  enum class Source { kCache, kExact, kCall };

  int64_t begin = 0;
  int64_t end = 0;
  Source source = Source::kCache;
};

struct ExactWindow {
  int64_t window = 0;
  int64_t sinks = 0;

  bool Any() const { return Slots() > 0; }
  int64_t Slots() const { return sinks + window; }
  int64_t Slot(int64_t token) const { return token < sinks ? token : sinks + (token - sinks) % window; }
  // Returns whether the ring holds `token` after `tokens` tokens.
  bool Holds(int64_t token, int64_t tokens) const { return token < sinks || (window > 0 && token >= tokens - window); }

  // Returns the first contiguous piece of tokens begin … end-1 for the query at `position` >= held - 1; empty if begin
  // >= end. held: number of tokens written to the ring; later tokens are in the call.
  KeyPiece First(int64_t held, int64_t position, int64_t begin, int64_t end) const {
    if (begin >= end || !Any()) return {begin, end, KeyPiece::Source::kCache};
    if (begin < sinks) {
      if (begin < held) return {begin, std::min({sinks, held, end}), KeyPiece::Source::kExact};
      return {begin, std::min(sinks, end), KeyPiece::Source::kCall};
    }
    const int64_t recent = window > 0 ? position + 1 - window : end;
    if (begin < recent) return {begin, std::min(recent, end), KeyPiece::Source::kCache};
    if (begin >= held) return {begin, end, KeyPiece::Source::kCall};
    const int64_t turn = begin + window - (begin - sinks) % window;  // where the ring wraps around
    return {begin, std::min({turn, held, end}), KeyPiece::Source::kExact};
  }
};

}  // namespace ortolan
