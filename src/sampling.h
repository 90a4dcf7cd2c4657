// Chooses the next token of each sequence from its logits.
//
// A token depends only on the logits of its row, the sequence's options and history, and (seed, tokens generated so
// far, choice), which are the key and counter of the random generator. All compilers and CPUs choose the same token:
// floats are combined in a fixed order, and sums of probabilities are integers.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace ortolan {

struct SamplingOptions {
  double temperature = 1;  // below kGreedyTemperature: choose the most likely token
  int64_t top_k = 0;       // 0: all tokens
  double top_p = 1;
  double min_p = 0;
  double repetition_penalty = 1;  // of tokens in prompt and answer
  double presence_penalty = 0;    // of tokens in the answer
  double frequency_penalty = 0;   // of tokens in the answer, times their count
  uint64_t seed = 0;
  uint32_t choice = 0;    // the index among the answers to one prompt
  int64_t logprobs = -1;  // report the logprobs of this number of best tokens; -1: report no logprobs
};

constexpr double kGreedyTemperature = 1e-6;        // dividing by smaller values would overflow
constexpr double kLargestTemperature = 1e6;        // larger values are reduced to it; the distribution is uniform
constexpr int64_t kMostTokens = int64_t{1} << 19;  // of a vocabulary: 2^19 integers of 44 bits sum to less than 2^64

// Returns what is wrong with the options, or an empty string.
std::string ValidateSampling(const SamplingOptions& options);

// Options and history of one sequence.
class SamplingRow {
 public:
  // A bias is (token, value added to its logit). Throws std::invalid_argument if an option, a token or a
  // value is out of range.
  SamplingRow(const SamplingOptions& options, const std::vector<int64_t>& prompt,
              std::vector<std::pair<int64_t, float>> bias);

  // Adds a token to the answer. Throws std::invalid_argument if it is negative or kMostTokens or more.
  void Append(int64_t token);

  const SamplingOptions& options() const { return options_; }
  uint64_t generated() const { return generated_; }
  int64_t largest_token() const { return largest_token_; }  // of bias and history; -1 without any
  bool ChangesLogits() const { return !bias_.empty() || !history_.empty(); }
  // Applies bias and penalties, except for tokens that are excluded by a logit of -infinity.
  void ApplyBias(float* logits) const;
  void ApplyPenalties(float* logits) const;

 private:
  struct Seen {
    int64_t token;
    int64_t answer_count;
  };
  Seen& Find(int64_t token);

  SamplingOptions options_;
  std::vector<std::pair<int64_t, float>> bias_;
  bool has_penalties_;
  std::vector<Seen> history_;  // distinct tokens; empty without penalties
  std::unordered_map<int64_t, size_t> history_index_;
  uint64_t generated_ = 0;
  int64_t largest_token_ = -1;
};

// Tokens that a grammar allows: bit t % 32 of word t / 32. Tokens beyond the last word are not allowed.
struct TokenMask {
  const uint32_t* words = nullptr;  // null: all tokens are allowed
  int64_t count = 0;
};

struct SampledToken {
  int64_t token = -1;
  double logprob = 0;  // log softmax of the logits as given, before bias, mask, penalties and temperature
  std::vector<int64_t> best_tokens;
  std::vector<double> best_logprobs;
  std::string problem;  // why there is no token; empty if there is one
};

// Memory that calls for successive rows reuse.
struct SamplingScratch {
  std::vector<float> adjusted;
  std::vector<float> values;
  std::vector<float> weights;
  std::vector<int32_t> ids;
  std::vector<int32_t> members;
  std::vector<uint64_t> histogram;
};

// Chooses a token of 1 to kMostTokens logits. Bias, mask, repetition penalty, presence and frequency penalties,
// temperature, top_k, top_p and min_p are applied in this order. Equal logits are ordered by token id.
SampledToken SampleToken(const SamplingRow& row, const float* logits, int64_t vocabulary, TokenMask mask,
                         SamplingScratch& scratch);

}  // namespace ortolan
