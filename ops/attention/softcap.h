// Soft-capping of attention's scores. Included only by the loops of attention kernels; local to each target.
//
//     capped(x) = softcap tanh(x / softcap)
//
// for x in powers of two, x = log2(e) s. The result is in powers of two too:
//
//     sign(x) (2 C / (1 + 2^(-2 |x| / softcap)) - C),   C = log2(e) softcap
//
// The error is at most 4 u C.
#pragma once

namespace ortolan {
namespace {

template <typename Simd>
class Softcap {
  using Float = typename Simd::Float;

 public:
  explicit Softcap(float softcap)
      : most_(Simd::Set(1.44269504f * softcap)),
        twice_(Simd::Set(2 * 1.44269504f * softcap)),
        factor_(Simd::Set(-2 / softcap)) {}

  // Rounded keeps the compiler from fusing operations, so that all targets return the same bits.
  Float Of(Float x) const {
    const Float zero = Simd::Set(0.0f);
    const Float power = Simd::Exp2(Simd::Rounded(Simd::Multiply(Simd::Abs(x), factor_)));
    const Float size = Simd::Subtract(Simd::Rounded(Simd::Divide(twice_, Simd::Add(Simd::Set(1.0f), power))), most_);
    return Simd::SelectLess(x, zero, Simd::Subtract(zero, size), size);
  }

 private:
  Float most_, twice_, factor_;
};

}  // namespace
}  // namespace ortolan
