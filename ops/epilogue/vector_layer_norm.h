// LayerNormalization, for all targets (Simd: simd/target.h). Included only by kernels.cc; local to it.
#pragma once

#include <cstdint>

#include "epilogue/layer_norm.h"
#include "simd/at_byte.h"
#include "simd/columns.h"

namespace ortolan {
namespace {

template <typename Simd>
class VectorLayerNorm {
  using Float = typename Simd::Float;
  using Columns = simd::Columns<Simd>;
  using Floats = typename Columns::Floats;
  // Independent partial sums hide the latency of additions; with fewer values in a sum, it has fewer roundings.
  static constexpr int kSums = 4;
  static constexpr int64_t kColumns = Columns::kColumns;
  static constexpr int64_t kLanes = Simd::kLanes;
  static constexpr int64_t kRows = 4;

  // Accumulates add(sum, x) over the row in the order of layer_norm.h. `behind` pads the columns beyond the row.
  template <typename Add>
  static float Sum(const float* row, int64_t n, float behind, const Add& add) {
    Floats sums[kSums];
    for (Floats& sum : sums) sum = Columns::Set(0.0f);
    int64_t j = 0;
    for (; j + kSums * kColumns <= n; j += kSums * kColumns) {
#pragma GCC unroll 4
      for (int i = 0; i < kSums; ++i) sums[i] = add(sums[i], Columns::Load(row + j + i * kColumns));
    }
    for (; j + kColumns <= n; j += kColumns) sums[0] = add(sums[0], Columns::Load(row + j));
    if (j < n) {
      float last[kColumns];
      Columns::Store(last, Columns::Set(behind));
      Columns::StoreFirst(last, n - j, Columns::LoadFirst(row + j, n - j));
      sums[0] = add(sums[0], Columns::Load(last));
    }
    return Columns::SumOfColumns(Columns::Add(Columns::Add(sums[0], sums[1]), Columns::Add(sums[2], sums[3])));
  }

  // Statistics of a row; `mean` is first an estimate, then corrected.
  struct Statistics {
    float mean;
    float factor;
  };

  static float Mean(const float* row, int64_t n) {
    const auto add = [](const Floats& sum, const Floats& x) { return Columns::Add(sum, x); };
    return Sum(row, n, 0.0f, add) / static_cast<float>(n);
  }

  static float MeanDifference(const float* row, int64_t n, float from) {
    const Floats froms = Columns::Set(from);
    const auto add = [&froms](const Floats& sum, const Floats& x) {
      return Columns::Add(sum, Columns::Subtract(x, froms));
    };
    return Sum(row, n, from, add) / static_cast<float>(n);
  }

  static float Variance(const float* row, int64_t n, float mean) {
    const Floats means = Columns::Set(mean);
    const auto add = [&means](const Floats& sum, const Floats& x) {
      const Floats difference = Columns::Subtract(x, means);
      return Columns::MultiplyAdd(difference, difference, sum);
    };
    return Sum(row, n, mean, add) / static_cast<float>(n);
  }

  static void Normalize(float* row, const LayerNormArgs& args, const Statistics& statistics) {
    const Float mean = Simd::Set(statistics.mean);
    const Float factor = Simd::Set(statistics.factor);
    const auto normalize = [mean, factor](Float x, Float weight, Float bias) {
      return Simd::MultiplyAdd(Simd::Multiply(Simd::Subtract(x, mean), factor), weight, bias);
    };
    int64_t j = 0;
    for (; j + kLanes <= args.n; j += kLanes) {
      Simd::Store(row + j, normalize(Simd::Load(row + j), Simd::Load(args.weight + j), Simd::Load(args.bias + j)));
    }
    const int64_t tail = args.n - j;
    if (tail == 0) return;
    Simd::StoreFirst(row + j, tail,
                     normalize(Simd::LoadFirst(row + j, tail), Simd::LoadFirst(args.weight + j, tail),
                               Simd::LoadFirst(args.bias + j, tail)));
  }

 public:
  // Processes kRows rows together: each step waits for the horizontal sum of the previous one, and other rows fill that
  // time.
  static void Run(const LayerNormArgs& args) {
    if (args.n == 0) return;
    const auto row = [&](int64_t i) { return AtByte(args.y, i * args.y_row_bytes); };
    for (int64_t first = 0; first < args.m; first += kRows) {
      const int64_t count = args.m - first < kRows ? args.m - first : kRows;
      Statistics of[kRows];
      for (int64_t i = 0; i < count; ++i) of[i].mean = Mean(row(first + i), args.n);
      for (int64_t i = 0; i < count; ++i) of[i].mean += MeanDifference(row(first + i), args.n, of[i].mean);
      for (int64_t i = 0; i < count; ++i) {
        of[i].factor = 1.0f / __builtin_sqrtf(Variance(row(first + i), args.n, of[i].mean) + args.epsilon);
      }
      for (int64_t i = 0; i < count; ++i) Normalize(row(first + i), args, of[i]);
    }
  }
};

}  // namespace
}  // namespace ortolan
