// The kernel of LinearAttention: the recurrence of some columns of one head's state over the tokens of one sequence.
//
//     S = decay S                                   each row by its own factor, or all by one
//     u = beta (v - S^T k), or v without beta
//     S = S + k u^T
//     y = scale S^T q
//
// A column of S depends on no other column, so a kernel keeps a few columns in the L1 cache for all tokens. Sums run
// over the rows of S in ascending order, by fused multiply-adds, so every kernel gives the same bits, however the
// tokens of a sequence are divided into calls.
#pragma once

#include <cstdint>
#include <span>

#include "isa/features.h"

namespace ortolan {

// The most columns of a call, and of a row in scratch memory.
inline constexpr int64_t kStripColumns = 32;

// Pointers are those of the first token and column. Row bytes are the distance between tokens, or between rows of the
// state. Nothing needs to be aligned except `scratch`.
struct RecurrenceArgs {
  int64_t tokens = 0;        // at least 1
  int64_t key_size = 0;      // rows of the state
  int64_t columns = 0;       // 1 … kStripColumns
  int64_t queries = 1;       // query heads that read this state, at least 1
  const float* q = nullptr;  // [tokens, queries * key_size]
  int64_t q_row_bytes = 0;
  const float* k = nullptr;  // [tokens, key_size]
  int64_t k_row_bytes = 0;
  const float* v = nullptr;  // [tokens, columns]
  int64_t v_row_bytes = 0;
  const float* decay = nullptr;  // factors: [tokens, key_size] if row_decays, else [tokens]; null: 1
  int64_t decay_row_bytes = 0;
  bool row_decays = false;
  const float* beta = nullptr;  // [tokens]; null: u = v
  int64_t beta_row_bytes = 0;
  float scale = 1.0f;
  float* y = nullptr;  // [tokens, columns], for query i at y + i * y_query
  int64_t y_row_bytes = 0;
  int64_t y_query = 0;
  const float* past = nullptr;  // [key_size, columns]; may be `present`
  float* present = nullptr;     // [key_size, columns]
  int64_t state_row_bytes = 0;
  // [key_size, kStripColumns], aligned to kScratchAlignment; null: `past` is `present`, which is updated in place.
  // Faster unless there is one token.
  float* scratch = nullptr;
};

using RecurrenceFn = void(const RecurrenceArgs&);

struct RecurrenceKernel {
  RecurrenceFn* run = nullptr;
  const char* name = nullptr;
  Features needs;
};

// Best first; the last one runs anywhere.
std::span<const RecurrenceKernel> RecurrenceKernels();

}  // namespace ortolan
