// The tokens of padded sequences that are there, in the order of the sequences: rows of a packed tensor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ortolan {

struct KeptTokens {
  // kept: int64 [batch][tokens] at any address, not 0 where a token is there. No query sees a token whose number is
  // negative; the token's own query sees the others. Throws std::bad_alloc.
  KeptTokens(const void* kept, int64_t batch_, int64_t tokens_);

  int64_t Count() const { return begins.back(); }
  // Of a sequence.
  int64_t Count(int64_t b) const { return begins[static_cast<size_t>(b) + 1] - begins[static_cast<size_t>(b)]; }
  int64_t Begin(int64_t b) const { return begins[static_cast<size_t>(b)]; }
  // Its places in it, rising; of Count(b).
  const int64_t* Positions(int64_t b) const { return positions.data() + Begin(b); }
  // Whether they follow each other without a gap.
  bool IsInteger(int64_t b) const;
  // Whether queries see the i-th token of sequence b.
  bool IsSeen(int64_t b, int64_t i) const { return seen[static_cast<size_t>(Begin(b) + i)] != 0; }
  bool AllSeen(int64_t b) const;

  int64_t batch;
  int64_t tokens;                  // of a padded sequence
  std::vector<int64_t> begins;     // [batch + 1]: the row of the first token of each; the last one is their number
  std::vector<int64_t> positions;  // [rows]
  std::vector<char> seen;          // [rows]
};

}  // namespace ortolan
