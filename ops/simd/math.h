// Formulas over a column's vectors of floats. Included by kernels only; everything is local to the including file: an
// inline function compiled for one column must never be linked in place of another's.
//
// A column gives a struct Simd with
//     Float, kLanes                                   kLanes floats
//     Float Set(float), Load(const float*), LoadFirst(const float*, int64_t count)
//     void Store(float*, Float), StoreFirst(float*, int64_t count, Float)
//         First: `count` lanes, 0 … kLanes; no other memory is touched, and the other lanes are 0
//     Float LoadSome(const float*, int64_t left), void StoreSome(float*, int64_t left, Float)
//         the lanes that `left` floats fill: none, some or all
//     Float Add(a, b), Subtract(a, b), Multiply(a, b), Divide(a, b), MultiplyAdd(a, b, c) = a b + c, fused or not
//     Float Max(a, b), Min(a, b)                      b if either is NaN, and Max(+0, -0) = -0
//     Float Abs(a)
//     uint32_t NonZero(a)                             a bit for each lane that is not zero, as NaN is not
//     bool HasNan(a)
//     float SumOfLanes(a)
//     Float ExponentFromLowBits(a)                    the bits of a, shifted left by the 23 of the mantissa
//     Float SelectLess(a, b, x, y)                    a < b ? x : y; y if a or b is NaN
//     Float Exp2(a)                                   2^a, a <= 0; NaN of NaN; below -126.5 zero may be given
//     float MaxOfLanes(a)
//     Float Rounded(a)                                a, which the compiler does not fuse with what is done to it
// kRegisters of them. Between lanes:
//     void Transpose(Float (&)[kLanes])
//     void Transpose4(const float* from, int64_t row_bytes, float* to, int64_t to_row_bytes)
//         four rows of kLanes numbers to kLanes rows of four
//     Float ReduceFour(const Float (&)[4], op)        op over all lanes of each, in lanes 0 … 3, 4 … 7, …
//     Float LoadStrided(const float*, int64_t stride) every stride-th float
//     Float LoadTwice(const float*)                   kLanes / 2 floats, each in two lanes
//     Float SwapPairs(a)                              lanes 1, 0, 3, 2, …
//     Float SubtractAdd(a, b)                         a - b in even lanes, a + b in odd ones
//     Float Lookup16(const float*, Int index)         of 16 floats, by the low 4 bits of each index
// From and to bytes:
//     Float LoadBf16(const uint8_t*), LoadF16, LoadInt8           kLanes numbers, at any address
//     void StoreBytes(uint8_t*, Float)                kLanes numbers 0 … 255, rounded to nearest
//     Float SignedByte<n>(Int)                        byte n of each lane
// In units of 32 bits that are multiplied at once, a float (kUnit = 1) or a pair of bf16 (2):
//     Float PackUnits(a, b)                           the numbers of a, or pairs of a and b
//     void StoreUnits(float*, Float)                  kLanes numbers one after another, rounded to their type
//     Float MultiplyAddUnits(a, b, c)                 a b + c of units a and b, floats c
// Int, as many integers of 32 bits: column.h.
#pragma once

namespace ortolan {
namespace {

template <typename Simd>
struct VectorMath {
  using Float = typename Simd::Float;

  template <int kTerms>
  static Float Polynomial(Float x, const float (&coefficients)[kTerms]) {  // lowest power first
    Float sum = Simd::Set(coefficients[kTerms - 1]);
#pragma GCC unroll 8
    for (int i = kTerms - 2; i >= 0; --i) sum = Simd::MultiplyAdd(sum, x, Simd::Set(coefficients[i]));
    return sum;
  }

  // 2^(a b) for -127.4 <= a b <= 0; zero below -126.5. a b is not rounded where MultiplyAdd is fused.
  static Float Exp2(Float a, Float b) {
    // Adding 1.5 x 2^23 leaves the sum rounded to an integer in the low bits; 127 is the bias of float32's exponent.
    // -127 meets exponent bits of zero: the flush to zero costs nothing.
    const Float magic = Simd::Set(12582912.0f + 127.0f);
    const Float shifted = Simd::MultiplyAdd(a, b, magic);
    const Float fraction = Simd::MultiplyAdd(a, b, Simd::Subtract(magic, shifted));
    // 2^f for |f| <= 1/2, minimax with the constant fixed at 1: relative error 0.05 x 2^-24.
    constexpr float kExp2[] = {1.0f,           0x1.62e430p-1f,  0x1.ebfbdcp-3f, 0x1.c6af7cp-5f,
                               0x1.3b2de0p-7f, 0x1.5f082ep-10f, 0x1.416b52p-13f};
    return Simd::Multiply(Polynomial(fraction, kExp2), Simd::ExponentFromLowBits(shifted));
  }
};

}  // namespace
}  // namespace ortolan
