// Vector functions shared by all targets, written with C++ operators or other functions of the target. A target may
// replace one by a better version of the same name. target.h specifies each function. Local to each file that includes
// it.
#pragma once

#include <cstdint>

namespace ortolan::simd {
namespace {

// Target is the struct derived from this one. Types gives its Float and Int, and Unsigned and Signed, the integer types
// of Int's lanes, whose sums wrap around.
template <typename Target, typename Types>
struct Vectors : Types {
  using typename Types::Float;
  using typename Types::Int;
  using typename Types::Signed;
  using typename Types::Unsigned;
  using Bytes = Int;
  static constexpr int64_t kLanes = sizeof(Float) / sizeof(float);

  static Float LoadSome(const float* from, int64_t left) {
    return left >= kLanes ? Target::Load(from) : Target::LoadFirst(from, left);
  }
  static void StoreSome(float* to, int64_t left, Float a) {
    if (left >= kLanes) return Target::Store(to, a);
    Target::StoreFirst(to, left, a);
  }
  static Float Add(Float a, Float b) { return a + b; }
  static Float Subtract(Float a, Float b) { return a - b; }
  static Float Multiply(Float a, Float b) { return a * b; }
  static Float Divide(Float a, Float b) { return a / b; }
  static Float Exp2(Float a) {
    // Adding 1.5 x 2^23 leaves the sum rounded to an integer in the low bits. Adding 128 as well makes it an exponent
    // field plus 1; 128 is even, so ties round the same way.
    const Float magic = Target::Set(12582912.0f + 128.0f);
    const Float most = Target::Max(Target::Set(-128.0f), a);
    const Float shifted = Target::Add(most, magic);
    const Float fraction = Target::Subtract(most, Target::Subtract(shifted, magic));
    return Multiply(Polynomial(fraction, kHalfExp2), ExponentFromLowBits(shifted));
  }
  // 2^f / 2 for |f| <= 1/2: a minimax polynomial with a fixed constant term, relative error 1.9 x 2^-24.
  static constexpr float kHalfExp2[] = {0x1p-1f,        0x1.62e42ap-2f, 0x1.ebf9bcp-4f,
                                        0x1.c6b752p-6f, 0x1.3cea88p-8f, 0x1.5bba14p-11f};
  template <int kTerms>
  static Float Polynomial(Float x, const float (&coefficients)[kTerms]) {  // lowest power first
    Float sum = Target::Set(coefficients[kTerms - 1]);
#pragma GCC unroll 8
    for (int i = kTerms - 2; i >= 0; --i) sum = Target::MultiplyAdd(sum, x, Target::Set(coefficients[i]));
    return sum;
  }

  // a b is not rounded.
  static Float Exp2OfProduct(Float a, Float b) {
    // Adding 1.5 x 2^23 leaves the sum rounded to an integer in the low bits; 127 is the exponent bias of float32. -127
    // gives an exponent field of zero, so flushing to zero needs no extra step.
    const Float magic = Target::Set(12582912.0f + 127.0f);
    const Float shifted = Target::MultiplyAdd(a, b, magic);
    const Float fraction = Target::MultiplyAdd(a, b, Subtract(magic, shifted));
    // 2^f for |f| <= 1/2: a minimax polynomial with constant term 1, relative error 0.05 x 2^-24.
    constexpr float kExp2[] = {1.0f,           0x1.62e430p-1f,  0x1.ebfbdcp-3f, 0x1.c6af7cp-5f,
                               0x1.3b2de0p-7f, 0x1.5f082ep-10f, 0x1.416b52p-13f};
    return Multiply(Polynomial(fraction, kExp2), ExponentFromLowBits(shifted));
  }
  static Float ExponentFromLowBits(Float a) { return FloatOf(ShiftLeftInt<23>(BitsOf(a))); }
  template <int kByte>
  static Float SignedByte(Int a) {
    return Target::ToFloat(ShiftRightSigned<24>(ShiftLeftInt<24 - 8 * kByte>(a)));
  }

  // Operations on 32-bit integers.
  static Int BitsOf(Float a) { return __builtin_bit_cast(Int, a); }
  static Float FloatOf(Int a) { return __builtin_bit_cast(Float, a); }
  static Int AddInt(Int a, Int b) { return Int(Unsigned(a) + Unsigned(b)); }
  static Int SubtractInt(Int a, Int b) { return Int(Unsigned(a) - Unsigned(b)); }
  static Int MultiplyInt(Int a, Int b) { return Int(Unsigned(a) * Unsigned(b)); }
  static Int AndInt(Int a, Int b) { return a & b; }
  static Int OrInt(Int a, Int b) { return a | b; }
  template <int kBits>
  static Int ShiftLeftInt(Int a) {
    return Int(Unsigned(a) << kBits);
  }
  template <int kBits>
  static Int ShiftRightInt(Int a) {
    return Int(Unsigned(a) >> kBits);
  }
  template <int kBits>
  static Int ShiftRightSigned(Int a) {
    return Int(Signed(a) >> kBits);
  }
  static void Transpose(Int (&a)[kLanes]) {
    Float bits[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) bits[i] = FloatOf(a[i]);
    Target::Transpose(bits);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) a[i] = BitsOf(bits[i]);
  }

  // bf16.
  static constexpr bool kDotBf16 = false;
  static Float EvenBf16(Bytes pairs) { return FloatOf(ShiftLeftInt<16>(pairs)); }
  static Float OddBf16(Bytes pairs) {
    return FloatOf(AndInt(pairs, Target::SetInt(static_cast<int32_t>(0xffff0000u))));
  }
  static Float RoundToBf16(Float a) {
    const Int bits = BitsOf(a);
    const Int lowest = AndInt(ShiftRightInt<16>(bits), Target::SetInt(1));
    const Int rounded = AddInt(bits, AddInt(lowest, Target::SetInt(0x7fff)));
    const Int quiet = OrInt(bits, Target::SetInt(0x00400000));
    // Without its sign, every value but NaN is greater than -1.
    const Float chosen = Target::SelectLess(Target::Set(-1.0f), Target::Abs(a), FloatOf(rounded), FloatOf(quiet));
    return OddBf16(BitsOf(chosen));
  }

  using Eight = Bytes;  // eight bytes, repeated to fill a register
  using Four = Float;   // four floats, repeated to fill a register
  static Bytes LoadBytes(const uint8_t* from) { return Target::LoadInt(from); }
  static Bytes RepeatQuad(const void* from) {
    int32_t quad;
    __builtin_memcpy(&quad, from, sizeof(quad));
    return Target::SetInt(quad);
  }
  static Bytes RepeatEachByte(const uint8_t* from) {
    return MultiplyInt(Target::LoadUint8(from), Target::SetInt(0x01010101));
  }
  static Bytes AndBytes(Bytes a, Bytes b) { return a & b; }
  static Bytes XorBytes(Bytes a, Bytes b) { return a ^ b; }
  static Bytes LowNibbles(Bytes a) { return AndBytes(a, Target::SetBytes(0x0f)); }
  static Bytes HighNibbles(Bytes a) { return LowNibbles(ShiftRightInt<4>(a)); }
  static constexpr int32_t kQuadBias = 0;
  static constexpr uint32_t kNibbleBias = 8;
  static constexpr bool kNarrowNibbleSums = false;
  static constexpr bool kMultipliesPairs = false;
  static constexpr bool kNibblesTimes16 = false;
  static Int StartNibbleSums(Int sums) { return sums; }
  static Int DotNibbles(Int sums, Bytes a, Bytes b) { return Target::DotInt8(sums, a, b); }
  static Int EndNibbleSums(Int, Int sums) { return sums; }

  static constexpr bool kDotsFewRows = false;
  static constexpr bool kDotsOfQuad = false;
  static constexpr bool kRowPairs = false;
  static constexpr bool kConvertsInt8 = false;

  // Lists of the set bits of a mask.
  template <typename Element>
  static int64_t ListBits(uint64_t bits, Element first, Element* list) {
    int64_t count = 0;
    for (; bits != 0; bits &= bits - 1) list[count++] = static_cast<Element>(first + __builtin_ctzll(bits));
    return count;
  }
  static void CompressFloats(uint64_t bits, const float* from, float* to) {
    for (; bits != 0; bits &= bits - 1) *to++ = from[__builtin_ctzll(bits)];
  }
};

}  // namespace
}  // namespace ortolan::simd
