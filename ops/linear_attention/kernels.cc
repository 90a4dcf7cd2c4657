// The recurrence by vectors (Simd: simd/target.h).
#include <cstdint>

#include "linear_attention/recurrence.h"
#include "simd/at_byte.h"
#include "simd/target.h"

namespace ortolan {
namespace {

// kDelta: u = beta (v - S^T k), else v.
template <bool kDelta, bool kRowDecays>
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
      : args_(args), first_(first), left_(args.columns - first < kWidth ? args.columns - first : kWidth) {}

  void Run() {
    Load();
    Float retrieved[kVectors], u[kVectors], y[kVectors];
    if constexpr (kDelta) Read(Key(0), kRowDecays ? Decay(0) : nullptr, retrieved);
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
      // After the last token nothing is retrieved; the sums of any key do.
      Update(t, t + 1 < args_.tokens ? t + 1 : t, decay, u, y, retrieved);
      Store(t, 0, y);
      for (int64_t i = 1; i < args_.queries; ++i) {
        Read(Query(t) + i * args_.key_size, nullptr, y);
        Store(t, i, y);
      }
    }
    Save();
  }

 private:
  const float* Key(int64_t t) const { return AtByte(args_.k, t * args_.k_row_bytes); }
  const float* Query(int64_t t) const { return AtByte(args_.q, t * args_.q_row_bytes); }
  const float* Decay(int64_t t) const { return AtByte(args_.decay, t * args_.decay_row_bytes); }
  // The columns from vector j on, 0 … kLanes and more.
  int64_t Left(int64_t j) const { return left_ > j * kLanes ? left_ - j * kLanes : 0; }
  Float LoadColumns(const float* from, int64_t j) const {
    const int64_t left = Left(j);
    return left == 0 ? Simd::Set(0.0f) : Simd::LoadSome(from + j * kLanes, left);
  }
  void StoreColumns(float* to, int64_t j, Float a) const {
    const int64_t left = Left(j);
    if (left > 0) Simd::StoreSome(to + j * kLanes, left, a);
  }

  void Load() {
    for (int64_t i = 0; i < args_.key_size; ++i) {
      for (int64_t j = 0; j < kVectors; ++j) {
        const Float a = args_.past == nullptr ? Simd::Set(0.0f)
                                              : LoadColumns(AtByte(args_.past, i * args_.state_row_bytes) + first_, j);
        Simd::Store(args_.scratch + i * kWidth + j * kLanes, a);
      }
    }
  }

  void Save() const {
    for (int64_t i = 0; i < args_.key_size; ++i) {
      float* to = AtByte(args_.present, i * args_.state_row_bytes) + first_;
      for (int64_t j = 0; j < kVectors; ++j) {
        StoreColumns(to, j, Simd::Load(args_.scratch + i * kWidth + j * kLanes));
      }
    }
  }

  // sums = S^T (factors * decays), the products rounded; without decays: S^T factors.
  void Read(const float* factors, const float* decays, Float (&sums)[kVectors]) const {
    Float found[kVectors];
    for (Float& sum : found) sum = Simd::Set(0.0f);
    const float* s = args_.scratch;
    for (int64_t i = 0, rows = args_.key_size; i < rows; ++i, s += kWidth) {
      const Float factor = Simd::Set(decays == nullptr ? factors[i] : factors[i] * decays[i]);
#pragma GCC unroll 4
      for (int64_t j = 0; j < kVectors; ++j) found[j] = Simd::MultiplyAdd(factor, Simd::Load(s + j * kLanes), found[j]);
    }
#pragma GCC unroll 4
    for (int64_t j = 0; j < kVectors; ++j) sums[j] = found[j];
  }

  // S = decay S + k u^T, y = S^T q, and what token `next` retrieves, as by Read. One pass over S.
  void Update(int64_t t, int64_t next, float decay, const Float (&u)[kVectors], Float (&y)[kVectors],
              Float (&retrieved)[kVectors]) const {
    const float *k = Key(t), *q = Query(t), *next_k = Key(next);
    const float* decays = kRowDecays ? Decay(t) : nullptr;
    const float* next_decays = kRowDecays ? Decay(next) : nullptr;
    Float of_query[kVectors], of_key[kVectors], added[kVectors];
#pragma GCC unroll 4
    for (int64_t j = 0; j < kVectors; ++j) {
      of_query[j] = of_key[j] = Simd::Set(0.0f);
      added[j] = u[j];
    }
    float* s = args_.scratch;
    for (int64_t i = 0, rows = args_.key_size; i < rows; ++i, s += kWidth) {
      const Float kept = Simd::Set(kRowDecays ? decays[i] : decay), key = Simd::Set(k[i]), query = Simd::Set(q[i]);
      const Float next_key = Simd::Set(kRowDecays ? next_k[i] * next_decays[i] : next_k[i]);
#pragma GCC unroll 4
      for (int64_t j = 0; j < kVectors; ++j) {
        Float a = Simd::Multiply(kept, Simd::Load(s + j * kLanes));
        a = Simd::MultiplyAdd(key, added[j], a);
        Simd::Store(s + j * kLanes, a);
        of_query[j] = Simd::MultiplyAdd(query, a, of_query[j]);
        if constexpr (kDelta) of_key[j] = Simd::MultiplyAdd(next_key, a, of_key[j]);
      }
    }
#pragma GCC unroll 4
    for (int64_t j = 0; j < kVectors; ++j) {
      y[j] = of_query[j];
      retrieved[j] = of_key[j];
    }
  }

  void Store(int64_t t, int64_t query, const Float (&y)[kVectors]) const {
    float* to = AtByte(args_.y, t * args_.y_row_bytes) + query * args_.y_query + first_;
    for (int64_t j = 0; j < kVectors; ++j) StoreColumns(to, j, Simd::Multiply(Simd::Set(args_.scale), y[j]));
  }

  const RecurrenceArgs& args_;
  int64_t first_, left_;
};

template <bool kDelta, bool kRowDecays>
void RunColumns(const RecurrenceArgs& args) {
  using Some = Columns<kDelta, kRowDecays>;
  for (int64_t first = 0; first < args.columns; first += Some::kWidth) Some(args, first).Run();
}

}  // namespace

namespace ORTOLAN_TARGET {

void Recurrence(const RecurrenceArgs& args) {
  if (args.beta != nullptr) return args.row_decays ? RunColumns<true, true>(args) : RunColumns<true, false>(args);
  return args.row_decays ? RunColumns<false, true>(args) : RunColumns<false, false>(args);
}

}  // namespace ORTOLAN_TARGET
}  // namespace ortolan
