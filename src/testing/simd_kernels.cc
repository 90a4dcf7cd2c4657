// The vocabulary of a column, function by function (simd_call.h).
#include "simd/bits.h"
#include "simd/column.h"
#include "simd_call.h"

namespace ortolan {
namespace {

template <typename To>
To* As(uint8_t* memory) {
  return reinterpret_cast<To*>(memory);
}

// The arguments, as what a function may want.
struct Arguments {
  explicit Arguments(const SimdCall& call)
      : a(reinterpret_cast<const float*>(call.in[0])),
        b(reinterpret_cast<const float*>(call.in[1])),
        c(reinterpret_cast<const float*>(call.in[2])),
        d(reinterpret_cast<const float*>(call.in[3])),
        bytes(call.in[0]),
        number(call.number),
        out(reinterpret_cast<float*>(call.out)),
        out_bytes(call.out) {}

  const float *a, *b, *c, *d;
  const uint8_t* bytes;
  int64_t number;
  float* out;
  uint8_t* out_bytes;
};

// Calls the function that is named so, if the column has it.
#define ORTOLAN_TRY(name, ...)                      \
  if (__builtin_strcmp(call.function, name) == 0) { \
    if constexpr (requires { __VA_ARGS__; }) {      \
      __VA_ARGS__;                                  \
      return true;                                  \
    }                                               \
  }

template <typename S>
bool RunFloats(const SimdCall& call, const Arguments& x) {
  ORTOLAN_TRY("Set", S::Store(x.out, S::Set(*x.a)));
  ORTOLAN_TRY("Load", S::Store(x.out, S::Load(x.a)));
  ORTOLAN_TRY("Store", S::Store(x.out, S::Load(x.a)));
  ORTOLAN_TRY("LoadFirst", S::Store(x.out, S::LoadFirst(x.a, x.number)));
  ORTOLAN_TRY("StoreFirst", S::StoreFirst(x.out, x.number, S::Load(x.a)));
  ORTOLAN_TRY("Add", S::Store(x.out, S::Add(S::Load(x.a), S::Load(x.b))));
  ORTOLAN_TRY("Subtract", S::Store(x.out, S::Subtract(S::Load(x.a), S::Load(x.b))));
  ORTOLAN_TRY("Multiply", S::Store(x.out, S::Multiply(S::Load(x.a), S::Load(x.b))));
  ORTOLAN_TRY("Divide", S::Store(x.out, S::Divide(S::Load(x.a), S::Load(x.b))));
  ORTOLAN_TRY("MultiplyAdd", S::Store(x.out, S::MultiplyAdd(S::Load(x.a), S::Load(x.b), S::Load(x.c))));
  ORTOLAN_TRY("Max", S::Store(x.out, S::Max(S::Load(x.a), S::Load(x.b))));
  ORTOLAN_TRY("Min", S::Store(x.out, S::Min(S::Load(x.a), S::Load(x.b))));
  ORTOLAN_TRY("Abs", S::Store(x.out, S::Abs(S::Load(x.a))));
  ORTOLAN_TRY("NonZero", *As<uint32_t>(x.out_bytes) = S::NonZero(S::Load(x.a)));
  ORTOLAN_TRY("HasNan", *As<uint32_t>(x.out_bytes) = S::HasNan(S::Load(x.a)));
  ORTOLAN_TRY("SumOfLanes", *x.out = S::SumOfLanes(S::Load(x.a)));
  ORTOLAN_TRY("MaxOfLanes", *x.out = S::MaxOfLanes(S::Load(x.a)));
  ORTOLAN_TRY("ExponentFromLowBits", S::Store(x.out, S::ExponentFromLowBits(S::Load(x.a))));
  ORTOLAN_TRY("SelectLess", S::Store(x.out, S::SelectLess(S::Load(x.a), S::Load(x.b), S::Load(x.c), S::Load(x.d))));
  ORTOLAN_TRY("Exp2", S::Store(x.out, S::Exp2(S::Load(x.a))));
  ORTOLAN_TRY("Rounded", S::Store(x.out, S::Rounded(S::Load(x.a))));
  return false;
}

// ReduceFour with a sum.
template <typename S>
auto Reduced(const float* from) {
  const typename S::Float four[] = {S::Load(from), S::Load(from + S::kLanes), S::Load(from + 2 * S::kLanes),
                                    S::Load(from + 3 * S::kLanes)};
  return S::ReduceFour(four, [](auto a, auto b) { return S::Add(a, b); });
}

template <typename S>
void Transpose(const float* from, float* to) {
  typename S::Float rows[S::kLanes];
  for (int64_t i = 0; i < S::kLanes; ++i) rows[i] = S::Load(from + i * S::kLanes);
  S::Transpose(rows);
  for (int64_t i = 0; i < S::kLanes; ++i) S::Store(to + i * S::kLanes, rows[i]);
}

template <typename S>
bool RunBetweenLanes(const SimdCall& call, const Arguments& x) {
  constexpr int64_t kRowBytes = 4 * S::kLanes;
  ORTOLAN_TRY("Transpose", Transpose<S>(x.a, x.out));
  ORTOLAN_TRY("Transpose4", S::Transpose4(x.a, kRowBytes, x.out, 16));
  if constexpr (S::kLanes > 1) ORTOLAN_TRY("ReduceFour", S::Store(x.out, Reduced<S>(x.a)));
  ORTOLAN_TRY("LoadStrided", S::Store(x.out, S::LoadStrided(x.a, x.number)));
  ORTOLAN_TRY("LoadTwice", S::Store(x.out, S::LoadTwice(x.a)));
  ORTOLAN_TRY("SwapPairs", S::Store(x.out, S::SwapPairs(S::Load(x.a))));
  ORTOLAN_TRY("SubtractAdd", S::Store(x.out, S::SubtractAdd(S::Load(x.a), S::Load(x.b))));
  ORTOLAN_TRY("Lookup16", S::Store(x.out, S::Lookup16(x.a, S::LoadInt(x.b))));
  ORTOLAN_TRY("LoadBf16", S::Store(x.out, S::LoadBf16(x.bytes)));
  ORTOLAN_TRY("LoadInt8", S::Store(x.out, S::LoadInt8(x.bytes)));
  ORTOLAN_TRY("StoreBytes", S::StoreBytes(x.out_bytes, S::Load(x.a)));
  ORTOLAN_TRY("StoreInt8", S::StoreInt8(x.out_bytes, S::Load(x.a)));
  ORTOLAN_TRY("SignedByte0", S::Store(x.out, S::template SignedByte<0>(S::LoadInt(x.a))));
  ORTOLAN_TRY("SignedByte3", S::Store(x.out, S::template SignedByte<3>(S::LoadInt(x.a))));
  ORTOLAN_TRY("PackUnits", S::Store(x.out, S::PackUnits(S::Load(x.a), S::Load(x.b))));
  ORTOLAN_TRY("StoreUnits", S::StoreUnits(x.out, S::Load(x.a)));
  ORTOLAN_TRY("MultiplyAddUnits", S::Store(x.out, S::MultiplyAddUnits(S::Load(x.a), S::Load(x.b), S::Load(x.c))));
  return false;
}

template <typename S>
bool RunIntegers(const SimdCall& call, const Arguments& x) {
  ORTOLAN_TRY("SetInt", S::StoreInt(x.out, S::SetInt(static_cast<int32_t>(x.number))));
  ORTOLAN_TRY("LoadInt", S::StoreInt(x.out, S::LoadInt(x.bytes)));
  ORTOLAN_TRY("StoreInt", S::StoreInt(x.out, S::LoadInt(x.bytes)));
  ORTOLAN_TRY("LoadFirstInt", S::StoreInt(x.out, S::LoadFirstInt(x.bytes, x.number)));
  ORTOLAN_TRY("BitsOf", S::StoreInt(x.out, S::BitsOf(S::Load(x.a))));
  ORTOLAN_TRY("FloatOf", S::Store(x.out, S::FloatOf(S::LoadInt(x.bytes))));
  ORTOLAN_TRY("ToFloat", S::Store(x.out, S::ToFloat(S::LoadInt(x.bytes))));
  ORTOLAN_TRY("ExpandBytes", S::StoreInt(x.out, S::ExpandBytes(x.bytes)));
  ORTOLAN_TRY("OrInt", S::StoreInt(x.out, S::OrInt(S::LoadInt(x.a), S::LoadInt(x.b))));
  ORTOLAN_TRY("SelectBits", S::StoreInt(x.out, S::SelectBits(S::LoadInt(x.a), S::LoadInt(x.b), S::LoadInt(x.c))));
  ORTOLAN_TRY("ShiftLeftInt", S::StoreInt(x.out, S::template ShiftLeftInt<5>(S::LoadInt(x.a))));
  ORTOLAN_TRY("ShiftRightInt", S::StoreInt(x.out, S::template ShiftRightInt<5>(S::LoadInt(x.a))));
  const auto bits = static_cast<uint64_t>(x.number);
  ORTOLAN_TRY("ListBits", *As<int64_t>(x.out_bytes + 2048) = ListBits<S>(bits, uint16_t{7}, As<uint16_t>(x.out_bytes)));
  ORTOLAN_TRY("ListBits8", *As<int64_t>(x.out_bytes + 2048) = ListBits<S>(bits, uint8_t{7}, x.out_bytes));
  ORTOLAN_TRY("CompressFloats", CompressFloats<S>(bits, x.a, x.out));
  return false;
}

}  // namespace

namespace ORTOLAN_COLUMN {

extern const int64_t kSimdLanes;
constinit const int64_t kSimdLanes = Simd::kLanes;

bool RunSimd(const SimdCall& call) {
  const Arguments x(call);
  return RunFloats<Simd>(call, x) || RunBetweenLanes<Simd>(call, x) || RunIntegers<Simd>(call, x);
}

}  // namespace ORTOLAN_COLUMN
}  // namespace ortolan
