#include "attention/kept_tokens.h"

#include <algorithm>
#include <cstring>

namespace ortolan {
namespace {

// Tensors may be unaligned.
int64_t Load(const char* mask_value) {
  int64_t value;
  std::memcpy(&value, mask_value, sizeof(value));
  return value;
}

}  // namespace

KeptTokens::KeptTokens(const void* kept, int64_t batch_, int64_t tokens_) : batch(batch_), tokens(tokens_) {
  begins.reserve(static_cast<size_t>(batch) + 1);
  positions.resize(static_cast<size_t>(batch * tokens));
  seen.resize(static_cast<size_t>(batch * tokens));
  size_t count = 0;
  for (int64_t b = 0; b < batch; ++b) {
    begins.push_back(static_cast<int64_t>(count));
    const char* const row = static_cast<const char*>(kept) + b * tokens * static_cast<int64_t>(sizeof(int64_t));
    for (int64_t position = 0; position < tokens; ++position) {
      const int64_t mask_value = Load(row + position * static_cast<int64_t>(sizeof(int64_t)));
      positions[count] = position;  // overwritten by the next token if this one is not kept
      seen[count] = mask_value > 0;
      count += mask_value != 0;
    }
  }
  begins.push_back(static_cast<int64_t>(count));
  positions.resize(count);
  seen.resize(count);
}

bool KeptTokens::IsContiguous(int64_t b) const {
  const int64_t count = Count(b);
  return count == 0 || Positions(b)[count - 1] - Positions(b)[0] == count - 1;
}

bool KeptTokens::AllSeen(int64_t b) const {
  const auto end = seen.begin() + Begin(b + 1);
  return std::find(seen.begin() + Begin(b), end, char{0}) == end;
}

}  // namespace ortolan
