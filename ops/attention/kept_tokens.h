// The tokens of padded sequences that are not padding, in sequence order: the rows of a packed tensor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ortolan {

struct KeptTokens {
  // kept: int64 [batch][tokens], unaligned; 0 for padding. A token with a negative value attends to its sequence, but
  // no query sees it. Throws std::bad_alloc.
  KeptTokens(const void* kept, int64_t batch_, int64_t tokens_);

  int64_t Count() const { return begins.back(); }
  // The number of tokens of sequence b, and its first row in the packed tensor.
  int64_t Count(int64_t b) const { return begins[static_cast<size_t>(b) + 1] - begins[static_cast<size_t>(b)]; }
  int64_t Begin(int64_t b) const { return begins[static_cast<size_t>(b)]; }
  // The Count(b) positions of its tokens in the padded sequence, ascending.
  const int64_t* Positions(int64_t b) const { return positions.data() + Begin(b); }
  bool IsContiguous(int64_t b) const;
  // Returns whether queries attend to token i of sequence b.
  bool IsSeen(int64_t b, int64_t i) const { return seen[static_cast<size_t>(Begin(b) + i)] != 0; }
  bool AllSeen(int64_t b) const;

  int64_t batch;
  int64_t tokens;                  // length of the padded sequences
  std::vector<int64_t> begins;     // [batch + 1]: first row of each sequence, then the number of rows
  std::vector<int64_t> positions;  // [rows]
  std::vector<char> seen;          // [rows]
};

}  // namespace ortolan
