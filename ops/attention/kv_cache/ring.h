// Which keys of a compressed cache are there as floats too: those of the first tokens (attention sinks) and of a
// window of recent ones.
//
//     exact keys  float [sinks + window][D], of one head: a tensor [B, KV, sinks + window, D] of a fixed size
//     slot of token p: p if p < sinks, else sinks + (p - sinks) % window            a ring
//
// After T tokens it holds p < min(sinks, T) and max(sinks, T - window) <= p < T; other slots hold anything. For the
// query at position i of a sequence, key p is exact if
//
//     p < sinks  or  p > i - window and window > 0
//
// so that its window ends with its own token. Keys of the call itself are at hand as floats; those before are in the
// ring as it was before the call, which is written when all queries are answered (of a single query, before).
#pragma once

#include <algorithm>
#include <cstdint>

namespace ortolan {

// Tokens begin … end-1, whose keys lie side by side: in the cache, in a row of slots, or in the call.
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
  // Whether it holds a token after `tokens` of them.
  bool Holds(int64_t token, int64_t tokens) const { return token < sinks || (window > 0 && token >= tokens - window); }

  // The first piece of tokens begin … end-1, as the query at `position` >= held - 1 sees them; empty if they are none.
  // held: the tokens that the ring has been written for; the call holds those behind.
  KeyPiece First(int64_t held, int64_t position, int64_t begin, int64_t end) const {
    if (begin >= end || !Any()) return {begin, end, KeyPiece::Source::kCache};
    if (begin < sinks) {
      if (begin < held) return {begin, std::min({sinks, held, end}), KeyPiece::Source::kExact};
      return {begin, std::min(sinks, end), KeyPiece::Source::kCall};
    }
    const int64_t recent = window > 0 ? position + 1 - window : end;
    if (begin < recent) return {begin, std::min(recent, end), KeyPiece::Source::kCache};
    if (begin >= held) return {begin, end, KeyPiece::Source::kCall};
    const int64_t turn = begin + window - (begin - sinks) % window;  // where the ring begins again
    return {begin, std::min({turn, held, end}), KeyPiece::Source::kExact};
  }
};

}  // namespace ortolan
