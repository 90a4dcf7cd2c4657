// The activation formulas and the loop over rows, for all targets (Simd: simd/target.h). Included only by kernels.cc;
// local to it. Derivation and fits: README.md.
#pragma once

#include <cstdint>

#include "epilogue/epilogue.h"
#include "simd/at_byte.h"

namespace ortolan {
namespace {

template <typename Simd>
class VectorActivations {
  using Float = typename Simd::Float;

  static Float Set(float value) { return Simd::Set(value); }

  // For gates g with g(-x) = 1 - g(x): x g(x) = max(x, 0) - |x| (1 - g(|x|)). Excess(a) = a (1 - g(a)) for 0 <= a <=
  // kMost. Larger |x| are clamped to kMost, whose power of two is 2^-127 and counts as zero.
  struct Gelu {
    static constexpr float kMost = 13.2687f;
    static Float Excess(Float a) {
      // 1 - Phi(a) = exp(-a^2 / 2) R(a); R = P / Q, minimax on 0 … 13.3: relative error 0.41 x 2^-24.
      constexpr float kP[] = {0.5f, 0x1.bd7114p-2f, 0x1.72404ep-3f, 0x1.461612p-5f, 0x1.05aa76p-8f};
      constexpr float kQ[] = {1.0f, 0x1.aafab8p+0f, 0x1.313dfcp+0f, 0x1.da1deep-2f, 0x1.98b828p-4f, 0x1.47f1d8p-7f};
      constexpr float kHalfLog2E = 0.72134752f;
      const Float e = Simd::Exp2OfProduct(Simd::Multiply(a, Set(-kHalfLog2E)), a);
      return Simd::Divide(Simd::Multiply(Simd::Multiply(a, e), Simd::Polynomial(a, kP)), Simd::Polynomial(a, kQ));
    }
  };

  // For logistic gates such as g(x) = 1 / (1 + exp(-x)): 1 - g(a) = e / (1 + e).
  static Float LogisticExcess(Float a, Float e) { return Simd::Divide(Simd::Multiply(a, e), Simd::Add(e, Set(1.0f))); }

  struct GeluTanh {  // (1 + tanh(t)) / 2 = 1 / (1 + exp(-2 t))
    static constexpr float kMost = 10.0311f;
    static Float Excess(Float a) {
      constexpr float kLinear = 2.3022082f;  // 2 sqrt(2 / pi) log2(e)
      constexpr float kCubic = 0.10294324f;  // that times 0.044715
      return LogisticExcess(
          a, Simd::Exp2OfProduct(a, Simd::MultiplyAdd(Simd::Multiply(a, a), Set(-kCubic), Set(-kLinear))));
    }
  };

  struct Silu {
    static constexpr float kMost = 88.0297f;
    static Float Excess(Float a) {
      constexpr float kLog2E = 1.44269504f;
      return LogisticExcess(a, Simd::Exp2OfProduct(a, Set(-kLog2E)));
    }
  };

  struct Identity {
    static Float Apply(Float x) { return x; }
  };

  struct Relu {
    static Float Apply(Float x) { return Simd::Max(Set(0.0f), x); }
  };

  template <typename Gate>
  struct Gated {
    static Float Apply(Float x) {
      const Float a = Simd::Min(Set(Gate::kMost), Simd::Abs(x));
      return Simd::Subtract(Relu::Apply(x), Gate::Excess(a));
    }
  };

  template <bool kFactor, bool kResidual>
  static Float End(Float value, Float factor, Float residual) {
    if constexpr (kFactor && kResidual) return Simd::MultiplyAdd(value, factor, residual);
    if constexpr (kFactor) return Simd::Multiply(value, factor);
    if constexpr (kResidual) return Simd::Add(value, residual);
    return value;
  }

  template <typename Function, bool kFactor, bool kResidual>
  static void Rows(const EpilogueArgs& args) {
    const int64_t tail = args.n % Simd::kLanes;
    const int64_t full = args.n - tail;
    for (int64_t i = 0; i < args.m; ++i) {
      float* y = AtByte(args.y, i * args.y_row_bytes);
      const float* x = AtByte(args.x, i * args.x_row_bytes);
      const float* factor = kFactor ? AtByte(args.factor, i * args.x_row_bytes) : nullptr;
      const float* residual = kResidual ? AtByte(args.residual, i * args.residual_row_bytes) : nullptr;
      for (int64_t j = 0; j < full; j += Simd::kLanes) {
        Float value = Function::Apply(Simd::Load(x + j));
        value = End<kFactor, kResidual>(value, kFactor ? Simd::Load(factor + j) : value,
                                        kResidual ? Simd::Load(residual + j) : value);
        Simd::Store(y + j, value);
      }
      if (tail == 0) continue;
      Float value = Function::Apply(Simd::LoadFirst(x + full, tail));
      value = End<kFactor, kResidual>(value, kFactor ? Simd::LoadFirst(factor + full, tail) : value,
                                      kResidual ? Simd::LoadFirst(residual + full, tail) : value);
      Simd::StoreFirst(y + full, tail, value);
    }
  }

  template <typename Function>
  static void Run(const EpilogueArgs& args) {
    if (args.factor != nullptr) {
      if (args.residual != nullptr) return Rows<Function, true, true>(args);
      return Rows<Function, true, false>(args);
    }
    if (args.residual != nullptr) return Rows<Function, false, true>(args);
    Rows<Function, false, false>(args);
  }

 public:
  static void Run(const EpilogueArgs& args) {
    switch (args.activation) {
      case Activation::kNone:
        return Run<Identity>(args);
      case Activation::kRelu:
        return Run<Relu>(args);
      case Activation::kGelu:
        return Run<Gated<Gelu>>(args);
      case Activation::kGeluTanh:
        return Run<Gated<GeluTanh>>(args);
      case Activation::kSilu:
        return Run<Gated<Silu>>(args);
    }
  }
};

}  // namespace
}  // namespace ortolan
