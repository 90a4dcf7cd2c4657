// LayerNormalization, once for all tiers. Included by layer_norm.cc and x86_*.cc only; everything is local to the
// including file, as in vector_activations.h.
//
// A tier gives a struct Simd: support/vector_math.h.
#pragma once

#include <cstdint>

#include "epilogue/layer_norm.h"

namespace ortolan {
namespace {

template <typename Simd>
class VectorLayerNorm {
  using Float = typename Simd::Float;
  // Sums at once: an addition waits for the one before it, and fewer numbers in a sum are fewer roundings.
  static constexpr int kSums = 4;
  static constexpr int64_t kLanes = Simd::kLanes;

  static float SumOfLanes(Float a) {
    float lanes[kLanes];
    Simd::Store(lanes, a);
    for (int64_t width = kLanes / 2; width > 0; width /= 2) {
      for (int64_t i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    }
    return lanes[0];
  }

  // The sum of add(sum, x) over the row's vectors. Lanes behind the row hold `behind`.
  template <typename Add>
  static float Sum(const float* row, int64_t n, float behind, const Add& add) {
    Float sums[kSums];
    for (Float& sum : sums) sum = Simd::Set(0.0f);
    int64_t j = 0;
    for (; j + kSums * kLanes <= n; j += kSums * kLanes) {
#pragma GCC unroll 4
      for (int i = 0; i < kSums; ++i) sums[i] = add(sums[i], Simd::Load(row + j + i * kLanes));
    }
    for (int i = 0; j + kLanes <= n; j += kLanes, ++i) sums[i] = add(sums[i], Simd::Load(row + j));
    if (j < n) {
      float last[kLanes];
      Simd::Store(last, Simd::Set(behind));
      Simd::StoreFirst(last, n - j, Simd::LoadFirst(row + j, n - j));
      sums[kSums - 1] = add(sums[kSums - 1], Simd::Load(last));
    }
    return SumOfLanes(Simd::Add(Simd::Add(sums[0], sums[1]), Simd::Add(sums[2], sums[3])));
  }

  static void Row(float* row, const LayerNormArgs& args) {
    const float count = static_cast<float>(args.n);
    const float rough = Sum(row, args.n, 0.0f, [](Float sum, Float x) { return Simd::Add(sum, x); }) / count;
    const Float roughs = Simd::Set(rough);
    const float rest =
        Sum(row, args.n, rough, [roughs](Float sum, Float x) { return Simd::Add(sum, Simd::Subtract(x, roughs)); });
    const float mean = rough + rest / count;
    const Float means = Simd::Set(mean);
    const float squares = Sum(row, args.n, mean, [means](Float sum, Float x) {
      const Float difference = Simd::Subtract(x, means);
      return Simd::MultiplyAdd(difference, difference, sum);
    });
    const Float factor = Simd::Set(1.0f / __builtin_sqrtf(squares / count + args.epsilon));
    const auto normalize = [&](Float x, Float weight, Float bias) {
      return Simd::MultiplyAdd(Simd::Multiply(Simd::Subtract(x, means), factor), weight, bias);
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
  static void Run(const LayerNormArgs& args) {
    if (args.n == 0) return;
    for (int64_t i = 0; i < args.m; ++i) {
      Row(reinterpret_cast<float*>(reinterpret_cast<char*>(args.y) + i * args.y_row_bytes), args);
    }
  }
};

}  // namespace
}  // namespace ortolan
