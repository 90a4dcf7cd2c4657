#include "sampling.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "host/error_text.h"

namespace ortolan {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr float kLargestFloat = std::numeric_limits<float>::max();
constexpr int64_t kChunk = 1024;
constexpr int64_t kLanes = 8;

// Returns exp(z) for z <= 0, with a relative error below 2^-22; exp(0) is 1. Arguments below -64 give exp(-64). The
// order of operations is fixed, so that vector code of any width computes the same bits.
inline float Exp(float z) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  z = z < -64.0f ? -64.0f : z;
  const float shifted = z * 1.44269504f + kRound;
  const float n = shifted - kRound;
  const float f = (z - n * 0.693359375f) - n * -2.12194440e-4f;  // the first product is exact
  float p = 1.9875691500e-4f;
  p = p * f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  p = (p * (f * f) + f) + 1.0f;
  const uint32_t exponent = std::bit_cast<uint32_t>(shifted) << 23;  // the low bits of `shifted` hold n
  return std::bit_cast<float>(std::bit_cast<uint32_t>(p) + exponent);
}

// Returns the natural logarithm of x >= 1, in a fixed order of operations.
double Log(double x) {
  const uint64_t bits = std::bit_cast<uint64_t>(x);
  int64_t exponent = static_cast<int64_t>(bits >> 52) - 1023;
  double m = std::bit_cast<double>((bits & 0xFFFFFFFFFFFFFull) | 0x3FF0000000000000ull);
  if (m > 1.4142135623730951) {
    m *= 0.5;
    ++exponent;
  }
  const double s = (m - 1) / (m + 1);
  const double square = s * s;
  double series = 0;
  for (int k = 23; k >= 1; k -= 2) series = series * square + 1.0 / k;
  return static_cast<double>(exponent) * 0.6931471805599453 + 2 * s * series;
}

// Returns a weight of at most 1 as an integer in units of 2^-44. Sums of integers do not depend on their order.
inline uint64_t Fixed(float weight) {
  constexpr double kOffset = 256.0;  // doubles from 256 to 512 are multiples of 2^-44
  return std::bit_cast<uint64_t>(kOffset + static_cast<double>(weight)) - std::bit_cast<uint64_t>(kOffset);
}

constexpr double kFixedUnit = 1.0 / (uint64_t{1} << 44);

// Maps floats to unsigned integers of the same order. Both zeros have the same key.
inline uint32_t Key(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x + 0.0f);
  const uint32_t sign = static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31);
  return bits ^ (sign | 0x80000000u);  // a condition would compile to a branch, which random signs mispredict
}

inline uint64_t HighProduct(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
}

// Returns a uniform 53-bit integer. Reference: Salmon et al., Parallel random numbers: as easy as 1, 2, 3
// (Philox4x32-10).
uint64_t Uniform53(uint64_t seed, uint64_t generated, uint32_t choice) {
  std::array<uint32_t, 4> c{static_cast<uint32_t>(generated), static_cast<uint32_t>(generated >> 32), choice, 0};
  uint32_t key0 = static_cast<uint32_t>(seed);
  uint32_t key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * c[0];
    const uint64_t b = uint64_t{0xCD9E8D57u} * c[2];
    c = {static_cast<uint32_t>(b >> 32) ^ c[1] ^ key0, static_cast<uint32_t>(b),
         static_cast<uint32_t>(a >> 32) ^ c[3] ^ key1, static_cast<uint32_t>(a)};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return (uint64_t{c[1]} << 32 | c[0]) >> 11;
}

struct Largest {
  float value = kMinusInfinity;
  int64_t chunk = 0;     // where the first chunk with this value starts
  bool is_valid = true;  // no NaN, no +infinity
};

Largest FindLargest(const float* x, int64_t n) {
  Largest largest;
  for (int64_t begin = 0; begin < n; begin += kChunk) {
    const int64_t end = std::min(begin + kChunk, n);
    std::array<float, kLanes> most;
    std::array<uint32_t, kLanes> invalid{};
    most.fill(kMinusInfinity);
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      for (int64_t j = 0; j < kLanes; ++j) {
        most[j] = x[i + j] > most[j] ? x[i + j] : most[j];
        invalid[j] |= x[i + j] <= kLargestFloat ? 0u : 1u;
      }
    }
    for (; i < end; ++i) {
      most[0] = x[i] > most[0] ? x[i] : most[0];
      invalid[0] |= x[i] <= kLargestFloat ? 0u : 1u;
    }
    for (int64_t j = 0; j < kLanes; ++j) {
      largest.is_valid &= invalid[j] == 0;
      if (most[j] > largest.value) {
        largest.value = most[j];
        largest.chunk = begin;
      }
    }
  }
  return largest;
}

// Fills weights with exp((x - largest) / temperature) and returns their sum.
uint64_t Weigh(const float* x, int64_t n, float largest, double temperature, float* weights) {
  const float factor = static_cast<float>(1 / temperature);
  uint64_t total = 0;
  for (int64_t begin = 0; begin < n; begin += kChunk) {
    const int64_t end = std::min(begin + kChunk, n);
    for (int64_t i = begin; i < end; ++i) weights[i] = Exp((x[i] - largest) * factor);
    for (int64_t i = begin; i < end; ++i) total += Fixed(weights[i]);
  }
  return total;
}

// A prefix of the tokens by descending logit and ascending index: tokens up to index `last` with logits of `value` or
// more, and later ones with larger logits.
struct Cut {
  float value = kMinusInfinity;
  int64_t last = 0;
};

// Returns the bucket, from the highest down, in which the running sum reaches the target. `above` becomes the sum of
// the buckets above it.
int64_t FindBucket(const std::vector<uint64_t>& histogram, uint64_t target, uint64_t& above) {
  int64_t bucket = static_cast<int64_t>(histogram.size()) - 1;
  while (bucket > 0 && above + histogram[bucket] < target) above += histogram[bucket--];
  return bucket;
}

// Returns the shortest prefix whose amounts sum to the target, by a radix search over the bits of the logits. The
// target is at least 1 and at most the sum of all amounts. Equal logits must have equal amounts.
template <typename Amount>
Cut FindCut(const float* x, int64_t n, uint64_t target, const Amount& amount, SamplingScratch& scratch) {
  constexpr int kBits = 11;
  std::vector<uint64_t>& histogram = scratch.histogram;
  std::vector<int32_t>& members = scratch.members;
  uint64_t above = 0;
  histogram.assign(size_t{1} << kBits, 0);
  for (int64_t i = 0; i < n; ++i) histogram[Key(x[i]) >> 21] += amount(i);
  uint32_t bucket = static_cast<uint32_t>(FindBucket(histogram, target, above));
  members.resize(n);
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    members[count] = static_cast<int32_t>(i);
    count += Key(x[i]) >> 21 == bucket ? 1 : 0;
  }
  for (const int shift : {10, 0}) {
    const uint32_t bits = shift == 0 ? 0x3FFu : 0x7FFu;
    histogram.assign(size_t{1} << kBits, 0);
    for (int64_t m = 0; m < count; ++m) histogram[Key(x[members[m]]) >> shift & bits] += amount(members[m]);
    bucket = static_cast<uint32_t>(FindBucket(histogram, target, above));
    int64_t kept = 0;
    for (int64_t m = 0; m < count; ++m) {
      const int32_t member = members[m];
      members[kept] = member;
      kept += (Key(x[member]) >> shift & bits) == bucket ? 1 : 0;
    }
    count = kept;
  }
  const uint64_t each = amount(members[0]);
  return {x[members[0]], members[(target - above + each - 1) / each - 1]};
}

Cut FindTop(const float* x, int64_t n, int64_t k, SamplingScratch& scratch) {
  return FindCut(x, n, static_cast<uint64_t>(k), [](int64_t) { return uint64_t{1}; }, scratch);
}

// Copies the logits and indices of a cut and returns their number.
int64_t Keep(const float* x, int64_t n, const Cut& cut, int64_t k, SamplingScratch& scratch) {
  scratch.values.resize(k);
  scratch.ids.resize(k);
  int64_t count = 0;
  for (int64_t i = 0; i < n && count < k; ++i) {
    if (x[i] > cut.value || (i <= cut.last && x[i] == cut.value)) {
      scratch.values[count] = x[i];
      scratch.ids[count++] = static_cast<int32_t>(i);
    }
  }
  return count;
}

// Draws an index below n with a probability proportional to its weight, among the tokens that top_p and min_p keep.
int64_t Draw(const SamplingRow& row, const float* x, int64_t n, float largest, SamplingScratch& scratch) {
  const SamplingOptions& options = row.options();
  scratch.weights.resize(n);
  float* const weights = scratch.weights.data();
  uint64_t total = Weigh(x, n, largest, std::min(options.temperature, kLargestTemperature), weights);
  if (options.top_p < 1) {
    // Weights below 2^-45 count as 0, so `total` can be reached before the last token.
    const uint64_t target =
        std::clamp<uint64_t>(static_cast<uint64_t>(static_cast<double>(total) * options.top_p), 1, total);
    const Cut cut = FindCut(x, n, target, [=](int64_t i) { return Fixed(weights[i]); }, scratch);
    for (int64_t i = 0; i <= cut.last; ++i) weights[i] = x[i] >= cut.value ? weights[i] : 0.0f;
    for (int64_t i = cut.last + 1; i < n; ++i) weights[i] = x[i] > cut.value ? weights[i] : 0.0f;
  }
  if (options.min_p > 0) {
    const float least = static_cast<float>(options.min_p);
    for (int64_t i = 0; i < n; ++i) weights[i] = weights[i] >= least ? weights[i] : 0.0f;
  }
  if (options.top_p < 1 || options.min_p > 0) {
    total = 0;
    for (int64_t i = 0; i < n; ++i) total += Fixed(weights[i]);
  }
  uint64_t rest = HighProduct(total, Uniform53(options.seed, row.generated(), options.choice) << 11);
  for (int64_t begin = 0;; begin += kChunk) {
    const int64_t end = std::min(begin + kChunk, n);
    uint64_t sum = 0;
    for (int64_t i = begin; i < end; ++i) sum += Fixed(weights[i]);
    if (rest >= sum) {
      rest -= sum;
      continue;
    }
    for (int64_t i = begin;; ++i) {
      const uint64_t weight = Fixed(weights[i]);
      if (rest < weight) return i;
      rest -= weight;
    }
  }
}

void ApplyMask(TokenMask mask, float* x, int64_t n) {
  for (int64_t begin = 0; begin < n; begin += 32) {
    const uint32_t word = begin / 32 < mask.count ? mask.words[begin / 32] : 0;
    if (word == 0xFFFFFFFFu) continue;
    const int64_t end = std::min(begin + 32, n);
    for (int64_t i = begin; i < end; ++i) x[i] = word >> (i - begin) & 1 ? x[i] : kMinusInfinity;
  }
}

void ReportLogprobs(const float* logits, int64_t n, float largest, int64_t best, SamplingScratch& scratch,
                    SampledToken& sampled) {
  scratch.weights.resize(n);
  const uint64_t total = Weigh(logits, n, largest, 1, scratch.weights.data());
  const double log_total = Log(static_cast<double>(total) * kFixedUnit);
  const auto logprob = [&](int64_t token) { return (static_cast<double>(logits[token]) - largest) - log_total; };
  sampled.logprob = logprob(sampled.token);
  best = std::min(best, n);
  if (best == 0) return;
  best = Keep(logits, n, FindTop(logits, n, best, scratch), best, scratch);
  sampled.best_tokens.assign(scratch.ids.begin(), scratch.ids.begin() + best);
  std::stable_sort(sampled.best_tokens.begin(), sampled.best_tokens.end(),
                   [&](int64_t a, int64_t b) { return logits[a] > logits[b]; });
  for (const int64_t token : sampled.best_tokens) sampled.best_logprobs.push_back(logprob(token));
}

// Describes the first logit that is NaN or +infinity.
std::string InvalidLogit(const float* x, int64_t n, const char* what) {
  const int64_t token = std::find_if(x, x + n, [](float value) { return !(value <= kLargestFloat); }) - x;
  return ErrorText(what, " of token ", token, " is ", std::isnan(x[token]) ? "NaN" : "+infinity",
                   ", expected a number or -infinity");
}

void RequireToken(int64_t token) {
  if (token < 0 || token >= kMostTokens) {
    throw std::invalid_argument(ErrorText("token ", token, " is out of range, expected 0 to ", kMostTokens - 1));
  }
}

}  // namespace

std::string ValidateSampling(const SamplingOptions& options) {
  // Comparisons are written so that NaN fails.
  const auto finite = [](double value) { return std::abs(value) <= std::numeric_limits<double>::max(); };
  const auto error = [](const char* name, auto value, const char* expected) {
    return ErrorText(name, " is ", value, ", expected ", expected);
  };
  if (!(finite(options.temperature) && options.temperature >= 0)) {
    return error("temperature", options.temperature, "a finite number of at least 0");
  }
  if (options.top_k < 0) return error("top_k", options.top_k, "at least 0 (0: all tokens)");
  if (!(options.top_p > 0 && options.top_p <= 1)) return error("top_p", options.top_p, "above 0 and at most 1");
  if (!(options.min_p >= 0 && options.min_p <= 1)) return error("min_p", options.min_p, "0 to 1");
  if (!(finite(options.repetition_penalty) && options.repetition_penalty > 0)) {
    return error("repetition_penalty", options.repetition_penalty, "a finite number above 0");
  }
  if (!finite(options.presence_penalty)) return error("presence_penalty", options.presence_penalty, "a finite number");
  if (!finite(options.frequency_penalty)) {
    return error("frequency_penalty", options.frequency_penalty, "a finite number");
  }
  if (options.logprobs < -1) return error("logprobs", options.logprobs, "at least -1 (-1: no report)");
  return {};
}

SamplingRow::SamplingRow(const SamplingOptions& options, const std::vector<int64_t>& prompt,
                         std::vector<std::pair<int64_t, float>> bias)
    : options_(options),
      bias_(std::move(bias)),
      has_penalties_(options.repetition_penalty != 1 || options.presence_penalty != 0 ||
                     options.frequency_penalty != 0) {
  if (const std::string problem = ValidateSampling(options); !problem.empty()) throw std::invalid_argument(problem);
  for (const auto& [token, value] : bias_) {
    RequireToken(token);
    if (!(std::abs(value) <= kLargestFloat)) {
      throw std::invalid_argument(ErrorText("the bias of token ", token, " is ", value, ", expected a finite float32"));
    }
    largest_token_ = std::max(largest_token_, token);
  }
  if (options.repetition_penalty == 1) return;  // no other penalty applies to the prompt
  for (const int64_t token : prompt) {
    RequireToken(token);
    Find(token);
  }
}

SamplingRow::Seen& SamplingRow::Find(int64_t token) {
  const auto [found, is_new] = history_index_.try_emplace(token, history_.size());
  if (is_new) {
    history_.push_back({token, 0});
    largest_token_ = std::max(largest_token_, token);
  }
  return history_[found->second];
}

void SamplingRow::Append(int64_t token) {
  RequireToken(token);
  if (has_penalties_) ++Find(token).answer_count;
  ++generated_;
}

void SamplingRow::ApplyBias(float* logits) const {
  for (const auto& [token, value] : bias_) logits[token] += value;
}

void SamplingRow::ApplyPenalties(float* logits) const {
  const float repetition = static_cast<float>(options_.repetition_penalty);
  const float presence = static_cast<float>(options_.presence_penalty);
  const float frequency = static_cast<float>(options_.frequency_penalty);
  for (const Seen& seen : history_) {
    float value = logits[seen.token];
    value = value > 0 ? value / repetition : value * repetition;
    if (seen.answer_count > 0) {
      value -= frequency * static_cast<float>(seen.answer_count);
      value -= presence;
    }
    logits[seen.token] = value;
  }
}

SampledToken SampleToken(const SamplingRow& row, const float* logits, int64_t vocabulary, TokenMask mask,
                         SamplingScratch& scratch) {
  SampledToken sampled;
  const auto fail = [&](std::string problem) {
    sampled.problem = std::move(problem);
    return sampled;
  };
  if (row.largest_token() >= vocabulary) {
    return fail(ErrorText("bias or history has token ", row.largest_token(), ", expected 0 to ", vocabulary - 1));
  }
  const Largest raw = FindLargest(logits, vocabulary);
  if (!raw.is_valid) return fail(InvalidLogit(logits, vocabulary, "the logit"));
  const float* x = logits;
  Largest largest = raw;
  if (row.ChangesLogits() || mask.words != nullptr) {
    scratch.adjusted.assign(logits, logits + vocabulary);
    float* const adjusted = scratch.adjusted.data();
    row.ApplyBias(adjusted);
    if (mask.words != nullptr) ApplyMask(mask, adjusted, vocabulary);
    row.ApplyPenalties(adjusted);
    x = adjusted;
    largest = FindLargest(x, vocabulary);
    if (!largest.is_valid) return fail(InvalidLogit(x, vocabulary, "after bias and penalties, the logit"));
  }
  if (largest.value == kMinusInfinity) {
    return fail(raw.value == kMinusInfinity ? "all logits are -infinity" : "the grammar excludes every token");
  }
  const SamplingOptions& options = row.options();
  if (options.temperature < kGreedyTemperature || options.top_k == 1) {
    sampled.token = std::find(x + largest.chunk, x + vocabulary, largest.value) - x;
  } else if (options.top_k > 0 && options.top_k < vocabulary) {
    const Cut cut = FindTop(x, vocabulary, options.top_k, scratch);
    const int64_t count = Keep(x, vocabulary, cut, options.top_k, scratch);
    sampled.token = scratch.ids[Draw(row, scratch.values.data(), count, largest.value, scratch)];
  } else {
    sampled.token = Draw(row, x, vocabulary, largest.value, scratch);
  }
  if (options.logprobs >= 0) {
    ReportLogprobs(logits, vocabulary, raw.value, options.logprobs, scratch, sampled);
  }
  return sampled;
}

}  // namespace ortolan
