// The recurrence by vectors (Simd: simd/target.h).
#include <cstdint>

#include "linear_attention/recurrence.h"
#include "simd/at_byte.h"
#include "simd/target.h"

namespace ortolan {
namespace {

// kDelta: u = beta (v - S^T k), else v. kWhole: all kWidth columns exist.
template <bool kDelta, bool kRowDecays, bool kWhole>
class Columns {
  using Float = Simd::Float;
  static constexpr int64_t kLanes = Simd::kLanes;
  // Two vectors fill the pipeline of AVX-512, because each has two sums.
  static constexpr int64_t kVectors = kLanes >= 16 ? 2 : 4;

 public:
  static constexpr int64_t kWidth = kVectors * kLanes;
  static_assert(kWidth <= kStripColumns);

  // first: the first of at most kWidth columns.
  Columns(const RecurrenceArgs& args, int64_t first)
      : args_(args),
        first_(first),
        left_(args.columns - first < kWidth ? args.columns - first : kWidth),
        state_(args.scratch == nullptr ? args.present + first : args.scratch),
        row_bytes_(args.scratch == nullptr ? args.state_row_bytes : kWidth * static_cast<int64_t>(sizeof(float))) {}

  void Run() {
    Float retrieved[kVectors], u[kVectors], y[kVectors];
    Load(retrieved);
    for (int64_t t = 0; t < args_.tokens; ++t) {
      const float decay = args_.decay == nullptr || kRowDecays ? 1.0f : *Decay(t);
      const float* v = AtByte(args_.v, t * args_.v_row_bytes) + first_;
#pragma GCC unroll 4
      for (int64_t j = 0; j < kVectors; ++j) {
        u[j] = LoadColumns(v, j);
        if constexpr (kDelta) {
          const Float difference = Simd::Subtract(u[j], Simd::Multiply(Simd::Set(decay), retrieved[j]));
          u[j] = Simd::Multiply(Simd::Set(*AtByte(args_.beta, t * args_.beta_row_bytes)), difference);
        }
      }
      if (t + 1 < args_.tokens) {
        Update<false>(t, decay, u, y, retrieved);
      } else {
        Update<true>(t, decay, u, y, retrieved);
      }
      Store(t, 0, y);
      for (int64_t i = 1; i < args_.queries; ++i) {
        Read(Query(t) + i * args_.key_size, y);
        Store(t, i, y);
      }
    }
  }

 private:
  const float* Key(int64_t t) const { return AtByte(args_.k, t * args_.k_row_bytes); }
  const float* Query(int64_t t) const { return AtByte(args_.q, t * args_.q_row_bytes); }
  const float* Decay(int64_t t) const { return AtByte(args_.decay, t * args_.decay_row_bytes); }
  // The columns from vector j on, 0 … kLanes and more.
  int64_t Left(int64_t j) const { return left_ > j * kLanes ? left_ - j * kLanes : 0; }
  Float LoadColumns(const float* from, int64_t j) const {
    if constexpr (kWhole) return Simd::Load(from + j * kLanes);
    const int64_t left = Left(j);
    return left == 0 ? Simd::Set(0.0f) : Simd::LoadSome(from + j * kLanes, left);
  }
  void StoreColumns(float* to, int64_t j, Float a) const {
    if constexpr (kWhole) return Simd::Store(to + j * kLanes, a);
    const int64_t left = Left(j);
    if (left > 0) Simd::StoreSome(to + j * kLanes, left, a);
  }

  // Copy the state to scratch memory, if there is any, and sum what the first token retrieves.
  void Load(Float (&retrieved)[kVectors]) const {
    Float sums[kVectors];
    for (Float& sum : sums) sum = Simd::Set(0.0f);
    if (!kDelta && args_.scratch == nullptr) return;
    for (int64_t i = 0, rows = args_.key_size; i < rows; ++i) {
      const float* from = AtByte(args_.past, i * args_.state_row_bytes) + first_;
      const Float key = Simd::Set(Retrieving(0, i));
#pragma GCC unroll 4
      for (int64_t j = 0; j < kVectors; ++j) {
        const Float a = LoadColumns(from, j);
        if (args_.scratch != nullptr) Simd::Store(args_.scratch + i * kWidth + j * kLanes, a);
        if constexpr (kDelta) sums[j] = Simd::MultiplyAdd(key, a, sums[j]);
      }
    }
    Copy(sums, retrieved);
  }

  // The factor of row i in what token t retrieves: S has not decayed yet. A factor for all rows is applied to the sum.
  float Retrieving(int64_t t, int64_t i) const { return kRowDecays ? Key(t)[i] * Decay(t)[i] : Key(t)[i]; }

  // sums = S^T factors.
  void Read(const float* factors, Float (&sums)[kVectors]) const {
    Float found[kVectors];
    for (Float& sum : found) sum = Simd::Set(0.0f);
    const float* s = state_;
    for (int64_t i = 0, rows = args_.key_size; i < rows; ++i, s = AtByte(s, row_bytes_)) {
      const Float factor = Simd::Set(factors[i]);
#pragma GCC unroll 4
      for (int64_t j = 0; j < kVectors; ++j) found[j] = Simd::MultiplyAdd(factor, LoadColumns(s, j), found[j]);
    }
    Copy(found, sums);
  }

  // S = decay S + k u^T and y = S^T q in one pass over S, with what the next token retrieves, or, after the last token,
  // with the copy of S to `present`.
  template <bool kLast>
  void Update(int64_t t, float decay, const Float (&u)[kVectors], Float (&y)[kVectors],
              Float (&retrieved)[kVectors]) const {
    const float *k = Key(t), *q = Query(t), *next_k = kLast ? k : Key(t + 1);
    const float* decays = kRowDecays ? Decay(t) : nullptr;
    const float* next_decays = kRowDecays && !kLast ? Decay(t + 1) : nullptr;
    Float of_query[kVectors], of_key[kVectors], added[kVectors];
#pragma GCC unroll 4
    for (int64_t j = 0; j < kVectors; ++j) {
      of_query[j] = of_key[j] = Simd::Set(0.0f);
      added[j] = u[j];
    }
    float* s = state_;
    float* present = args_.scratch == nullptr ? nullptr : args_.present + first_;
    for (int64_t i = 0, rows = args_.key_size; i < rows; ++i, s = AtByte(s, row_bytes_)) {
      const Float kept = Simd::Set(kRowDecays ? decays[i] : decay), key = Simd::Set(k[i]), query = Simd::Set(q[i]);
      [[maybe_unused]] const Float next_key = Simd::Set(kRowDecays && !kLast ? next_k[i] * next_decays[i] : next_k[i]);
#pragma GCC unroll 4
      for (int64_t j = 0; j < kVectors; ++j) {
        Float a = Simd::Multiply(kept, LoadColumns(s, j));
        a = Simd::MultiplyAdd(key, added[j], a);
        StoreColumns(s, j, a);
        of_query[j] = Simd::MultiplyAdd(query, a, of_query[j]);
        if constexpr (kLast) {
          if (present != nullptr) StoreColumns(AtByte(present, i * args_.state_row_bytes), j, a);
        } else if constexpr (kDelta) {
          of_key[j] = Simd::MultiplyAdd(next_key, a, of_key[j]);
        }
      }
    }
    Copy(of_query, y);
    Copy(of_key, retrieved);
  }

  static void Copy(const Float (&from)[kVectors], Float (&to)[kVectors]) {
#pragma GCC unroll 4
    for (int64_t j = 0; j < kVectors; ++j) to[j] = from[j];
  }

  void Store(int64_t t, int64_t query, const Float (&y)[kVectors]) const {
    float* to = AtByte(args_.y, t * args_.y_row_bytes) + query * args_.y_query + first_;
    for (int64_t j = 0; j < kVectors; ++j) StoreColumns(to, j, Simd::Multiply(Simd::Set(args_.scale), y[j]));
  }

  const RecurrenceArgs& args_;
  int64_t first_, left_;
  float* state_;
  int64_t row_bytes_;
};

template <bool kDelta, bool kRowDecays>
void RunColumns(const RecurrenceArgs& args) {
  constexpr int64_t kWidth = Columns<kDelta, kRowDecays, true>::kWidth;
  int64_t first = 0;
  for (; first + kWidth <= args.columns; first += kWidth) Columns<kDelta, kRowDecays, true>(args, first).Run();
  if (first < args.columns) Columns<kDelta, kRowDecays, false>(args, first).Run();
}

}  // namespace

namespace ORTOLAN_TARGET {

void Recurrence(const RecurrenceArgs& args) {
  if (args.beta != nullptr) return args.row_decays ? RunColumns<true, true>(args) : RunColumns<true, false>(args);
  return args.row_decays ? RunColumns<false, true>(args) : RunColumns<false, false>(args);
}

}  // namespace ORTOLAN_TARGET
}  // namespace ortolan
