// The vector API of a target, function by function (simd_call.h).
#include "simd/target.h"
#include "simd_call.h"

namespace ortolan {
namespace {

template <typename To>
To* As(uint8_t* memory) {
  return reinterpret_cast<To*>(memory);
}

// The arguments as the types that functions need.
struct Arguments {
  explicit Arguments(const SimdCall& call)
      : a(reinterpret_cast<const float*>(call.in[0])),
        b(reinterpret_cast<const float*>(call.in[1])),
        c(reinterpret_cast<const float*>(call.in[2])),
        d(reinterpret_cast<const float*>(call.in[3])),
        bytes(call.in[0]),
        ints(reinterpret_cast<const int32_t*>(call.in[0])),
        number(call.number),
        out(reinterpret_cast<float*>(call.out)),
        out_bytes(call.out) {}

  const float *a, *b, *c, *d;
  const uint8_t* bytes;
  const int32_t* ints;
  int64_t number;
  float* out;
  uint8_t* out_bytes;
};

// Calls the function with this name, if the target has it.
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
  ORTOLAN_TRY("PickFloats", S::Store(x.out, S::PickFloats(S::RepeatFour(x.a), S::LoadInt(x.b))));
  ORTOLAN_TRY("Lookup16", S::Store(x.out, S::Lookup16(x.a, S::LoadInt(x.b))));
  ORTOLAN_TRY("LoadBf16", S::Store(x.out, S::LoadBf16(x.bytes)));
  ORTOLAN_TRY("LoadInt8", S::Store(x.out, S::LoadInt8(x.bytes)));
  ORTOLAN_TRY("StoreBytes", S::StoreBytes(x.out_bytes, S::Load(x.a)));
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
  ORTOLAN_TRY("OrInt", S::StoreInt(x.out, S::OrInt(S::LoadInt(x.a), S::LoadInt(x.b))));
  ORTOLAN_TRY("SelectBits", S::StoreInt(x.out, S::SelectBits(S::LoadInt(x.a), S::LoadInt(x.b), S::LoadInt(x.c))));
  ORTOLAN_TRY("ShiftLeftInt", S::StoreInt(x.out, S::template ShiftLeftInt<5>(S::LoadInt(x.a))));
  ORTOLAN_TRY("ShiftRightInt", S::StoreInt(x.out, S::template ShiftRightInt<5>(S::LoadInt(x.a))));
  const auto bits = static_cast<uint64_t>(x.number);
  ORTOLAN_TRY("ListBits", *As<int64_t>(x.out_bytes + 2048) = S::ListBits(bits, uint16_t{7}, As<uint16_t>(x.out_bytes)));
  ORTOLAN_TRY("ListBits8", *As<int64_t>(x.out_bytes + 2048) = S::ListBits(bits, uint8_t{7}, x.out_bytes));
  ORTOLAN_TRY("CompressFloats", S::CompressFloats(bits, x.a, x.out));
  return false;
}

template <typename S, int kVectors>
void DotStoredRows(const uint8_t* stored, const uint8_t* weights, const int32_t* sums, int32_t* out) {
  constexpr int64_t kWidth = kVectors * S::kLanes;
  const uint8_t* const rows[4] = {stored, stored + kWidth, stored + 2 * kWidth, stored + 3 * kWidth};
  typename S::Quads tokens[kVectors];
  S::InterleaveRows(rows, tokens);
  const typename S::QuadWeights quads(reinterpret_cast<const int8_t*>(weights));
  for (int o = 0; o < 4; ++o) {
    int32_t weight_sum = 0;
    for (int i = 0; i < 4; ++i) weight_sum += static_cast<int8_t>(weights[4 * o + i]);
    const auto of_bias = S::SetInt(S::kQuadBias * weight_sum);
    typename S::Int total[kVectors];
    for (int v = 0; v < kVectors; ++v) total[v] = S::AddInt(S::LoadInt(sums + v * S::kLanes), of_bias);
    S::DotQuadWeights(total, tokens, quads, o);
    for (int v = 0; v < kVectors; ++v) S::StoreInt(out + (o * kVectors + v) * S::kLanes, total[v]);
  }
}

// Takes kVectors registers of tokens, with a token's quad in each lane. Converts them to rows of bytes and back to
// quads, multiplies with four quads of weights and adds `sums`.
template <typename S, int kVectors>
void DotRows(const uint8_t* tokens, const uint8_t* weights, const int32_t* sums, int32_t* out) {
  constexpr int64_t kRegisterBytes = 4 * S::kLanes;
  typename S::Bytes quads[kVectors], rows[kVectors];
  for (int v = 0; v < kVectors; ++v) quads[v] = S::LoadBytes(tokens + v * kRegisterBytes);
  S::DeinterleaveRows(quads, rows);
  uint8_t stored[kVectors * kRegisterBytes];
  for (int v = 0; v < kVectors; ++v) S::StoreBytes(stored + v * kRegisterBytes, rows[v]);
  DotStoredRows<S, kVectors>(stored, weights, sums, out);
}

// Packs 4 kVectors registers of integers, plus an offset, to rows of bytes, and multiplies them as in DotRows.
template <typename S, int kVectors>
void DotPackedRows(const int32_t* numbers, int32_t offset, const uint8_t* weights, int32_t* out) {
  constexpr int64_t kRegisterBytes = 4 * S::kLanes;
  uint8_t stored[kVectors * kRegisterBytes];
  for (int i = 0; i < kVectors; ++i) {
    typename S::Int four[4];
    for (int j = 0; j < 4; ++j) four[j] = S::LoadInt(numbers + (4 * i + j) * S::kLanes);
    S::StoreBytes(stored + i * kRegisterBytes, S::template PackRows<kVectors>(four, offset));
  }
  const int32_t zeros[kVectors * S::kLanes] = {};
  DotStoredRows<S, kVectors>(stored, weights, zeros, out);
}

// The element type of the target's rows of tokens; bytes if it has none.
template <typename S>
struct RowElementOrByte {
  using Type = uint8_t;
};
template <typename S>
  requires requires { typename S::RowElement; }
struct RowElementOrByte<S> {
  using Type = typename S::RowElement;
};
template <typename S>
using RowElementOf = typename RowElementOrByte<S>::Type;

// Packs 2 kLanes inputs of kTokens tokens, clamped to +-250, to rows, and multiplies four of the inputs with 16
// weights. The result is ordered by output and token; with few tokens by token and output, and the second half of the
// outputs uses the last 16 weights.
template <typename S, int kTokens>
void DotWordRows(const int32_t* inputs, const int8_t* weights, int32_t* out) {
  constexpr int64_t kRow = S::template kRowWords<kTokens>;
  typename S::Int tokens[kTokens];
  for (int t = 0; t < kTokens; ++t) {
    const int32_t* const from = inputs + t * 2 * S::kLanes;
    tokens[t] = S::PackWords(S::LoadInt(from), S::LoadInt(from + S::kLanes), -250, 250);
  }
  int16_t rows[2 * S::kLanes * kRow];
  S::template StoreInputs<kTokens>(tokens, rows);
  // Four inputs spread over the rows.
  constexpr int64_t kApart = (2 * S::kLanes - 1) / 3 * kRow;
  const int16_t* const four[4] = {rows, rows + kApart, rows + 2 * kApart, rows + 3 * kApart};
  typename S::Int sums[2][S::template kRowSums<kTokens>] = {};
  for (int i = 0; i < 2; ++i) S::template DotRows<kTokens>(sums[i], four, weights + 16 * i);
  if constexpr (kTokens < S::kLanes) {
    typename S::Int of[kTokens];
    S::template EndFewSums<kTokens>(sums[0], sums[1], of);
    for (int t = 0; t < kTokens; ++t) S::StoreInt(out + t * S::kLanes, of[t]);
  } else {
    constexpr int kVectors = kTokens / S::kLanes;
    typename S::Int of[4][kVectors];
    S::EndRowSums(sums[0], of);
    for (int o = 0; o < 4; ++o) {
      for (int v = 0; v < kVectors; ++v) S::StoreInt(out + (o * kVectors + v) * S::kLanes, of[o][v]);
    }
  }
}

// Converts a register of bytes to rows of 16-bit values minus `zero`, and multiplies with weights that pick one row
// each.
template <typename S, int kVectors>
void DotStoredWords(const uint8_t* bytes, int32_t zero, int32_t* out) {
  constexpr int kTokens = kVectors * S::kLanes, kRows = 4 / kVectors;
  int16_t stored[4 * S::kLanes];
  S::template StoreRows<kVectors>(stored, S::LoadBytes(bytes), zero);
  const auto row = [&](int i) { return stored + i % kRows * kTokens; };
  const int16_t* const rows[4] = {row(0), row(1), row(2), row(3)};
  const int8_t identity[] = {1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1};
  typename S::Int sums[S::template kRowSums<kTokens>] = {}, of[4][kVectors];
  S::template DotRows<kTokens>(sums, rows, identity);
  S::EndRowSums(sums, of);
  for (int i = 0; i < kRows; ++i) {
    for (int v = 0; v < kVectors; ++v) S::StoreInt(out + (i * kVectors + v) * S::kLanes, of[i][v]);
  }
}

template <typename S>
void TransposeInt(const int32_t* from, int32_t* to) {
  typename S::Int rows[S::kLanes];
  for (int64_t i = 0; i < S::kLanes; ++i) rows[i] = S::LoadInt(from + i * S::kLanes);
  S::Transpose(rows);
  for (int64_t i = 0; i < S::kLanes; ++i) S::StoreInt(to + i * S::kLanes, rows[i]);
}

template <typename S>
auto PackedBytes(const int32_t* from, int32_t offset) {
  const typename S::Int four[4] = {S::LoadInt(from), S::LoadInt(from + S::kLanes), S::LoadInt(from + 2 * S::kLanes),
                                   S::LoadInt(from + 3 * S::kLanes)};
  return S::PackBytes(four, offset);
}

// Gathers from two rows that are 1024 bytes apart.
template <typename S>
void Gather(const uint8_t* x, const uint8_t* indices, int64_t quads, uint8_t* out) {
  typename S::Bytes found[2];
  S::GatherBytes(x, 1024, indices, quads, found);
  for (int i = 0; i < 2; ++i) S::StoreBytes(out + i * 4 * S::kLanes, found[i]);
}

template <typename S>
bool RunMoreIntegers(const SimdCall& call, const Arguments& x) {
  ORTOLAN_TRY("AddInt", S::StoreInt(x.out, S::AddInt(S::LoadInt(x.a), S::LoadInt(x.b))));
  ORTOLAN_TRY("SubtractInt", S::StoreInt(x.out, S::SubtractInt(S::LoadInt(x.a), S::LoadInt(x.b))));
  ORTOLAN_TRY("MultiplyInt", S::StoreInt(x.out, S::MultiplyInt(S::LoadInt(x.a), S::LoadInt(x.b))));
  ORTOLAN_TRY("AndInt", S::StoreInt(x.out, S::AndInt(S::LoadInt(x.a), S::LoadInt(x.b))));
  ORTOLAN_TRY("MaxInt", S::StoreInt(x.out, S::MaxInt(S::LoadInt(x.a), S::LoadInt(x.b))));
  ORTOLAN_TRY("ShiftRightSigned", S::StoreInt(x.out, S::template ShiftRightSigned<5>(S::LoadInt(x.a))));
  ORTOLAN_TRY("RoundToInt", S::StoreInt(x.out, S::RoundToInt(S::Load(x.a))));
  ORTOLAN_TRY("LoadUint8", S::StoreInt(x.out, S::LoadUint8(x.bytes)));
  ORTOLAN_TRY("LoadSignedBytes", S::StoreInt(x.out, S::LoadSignedBytes(x.bytes)));
  ORTOLAN_TRY("StoreInt8", S::StoreInt8(x.out_bytes, S::LoadInt(x.a)));
  ORTOLAN_TRY("SumOfIntLanes", *As<int32_t>(x.out_bytes) = S::SumOfIntLanes(S::LoadInt(x.a)));
  ORTOLAN_TRY("MaxOfIntLanes", *As<int32_t>(x.out_bytes) = S::MaxOfIntLanes(S::LoadInt(x.a)));
  ORTOLAN_TRY("DotPair", S::StoreInt(x.out, S::DotPair(S::LoadInt(x.a), S::LoadInt(x.b), S::LoadInt(x.c))));
  if constexpr (requires(typename S::Int(&rows)[S::kLanes]) { S::Transpose(rows); }) {
    ORTOLAN_TRY("TransposeInt", TransposeInt<S>(x.ints, As<int32_t>(x.out_bytes)));
  }
  ORTOLAN_TRY("LoadSome", S::Store(x.out, S::LoadSome(x.a, x.number)));
  ORTOLAN_TRY("StoreSome", S::StoreSome(x.out, x.number, S::Load(x.a)));
  return false;
}

// Multiplies eight registers of nibbles with eight of bytes, the limit of the partial sums.
template <typename S>
auto DotNibbles(const uint8_t* nibbles, const uint8_t* bytes, typename S::Int sums) {
  auto part = S::StartNibbleSums(sums);
  for (int64_t i = 0; i < 8; ++i) {
    part = S::DotNibbles(part, S::LoadBytes(nibbles + 4 * i * S::kLanes), S::LoadBytes(bytes + 4 * i * S::kLanes));
  }
  return S::EndNibbleSums(sums, part);
}

// Deals the bytes of a into kParts, XORs part i with i, and interleaves the parts: every byte of a appears kParts
// times, XORed with 0 … kParts-1.
template <typename S, int kParts>
void DealAndInterleave(const uint8_t* a, uint8_t* out) {
  typename S::Bytes parts[kParts], to[kParts];
  const typename S::Bytes dealt = S::template DealBytes<kParts>(S::LoadBytes(a));
  for (int i = 0; i < kParts; ++i) parts[i] = S::XorBytes(dealt, S::SetBytes(i));
  S::InterleaveBytes(parts, to);
  for (int i = 0; i < kParts; ++i) S::StoreBytes(out + 4 * S::kLanes * i, to[i]);
}

template <typename S>
bool RunSomeProducts(const SimdCall& call, const Arguments& x) {
  const auto *a = call.in[0], *b = call.in[1], *c = call.in[2];
  auto* const out = x.out_bytes;
  const int number = static_cast<int>(x.number);
  ORTOLAN_TRY("DotInt8OfQuad",
              S::StoreInt(out, S::DotInt8OfQuad(S::LoadInt(c), S::LoadBytes(a), S::LoadBytes(b), number)));
  ORTOLAN_TRY("DotNibblesOfQuad",
              S::StoreInt(out, S::DotNibblesOfQuad(S::LoadInt(c), S::LoadBytes(a), S::LoadBytes(b), number)));
  ORTOLAN_TRY("InterleaveQuads0", S::StoreBytes(out, S::template InterleaveQuads<0>(S::LoadBytes(a), S::LoadBytes(b))));
  ORTOLAN_TRY("InterleaveQuads1", S::StoreBytes(out, S::template InterleaveQuads<1>(S::LoadBytes(a), S::LoadBytes(b))));
  ORTOLAN_TRY("EvenLanes", S::StoreInt(out, S::EvenLanes(S::LoadInt(a), S::LoadInt(b))));
  ORTOLAN_TRY("OddLanes", S::StoreInt(out, S::OddLanes(S::LoadInt(a), S::LoadInt(b))));
  ORTOLAN_TRY("EvenLanesOfFloats", S::Store(x.out, S::EvenLanes(S::Load(x.a), S::Load(x.b))));
  ORTOLAN_TRY("OddLanesOfFloats", S::Store(x.out, S::OddLanes(S::Load(x.a), S::Load(x.b))));
  ORTOLAN_TRY("DotEightsBf16", S::Store(x.out, S::DotEightsBf16(S::Load(x.c), S::LoadBytes(a), S::LoadBytes(b))));
  ORTOLAN_TRY("DotEightsInt8", S::StoreInt(out, S::DotEightsInt8(S::LoadInt(c), S::LoadBytes(a), S::LoadBytes(b))));
  ORTOLAN_TRY("DotEightsNibbles",
              S::StoreInt(out, S::DotEightsNibbles(S::LoadInt(c), S::LoadBytes(a), S::LoadBytes(b))));
  ORTOLAN_TRY("DotPairs", S::StoreInt(out, S::DotPairs(S::LoadInt(c), S::LoadBytes(a), S::LoadBytes(b))));
  ORTOLAN_TRY("EvenBytes", S::StoreInt(out, S::EvenBytes(S::LoadBytes(a))));
  ORTOLAN_TRY("OddBytes", S::StoreInt(out, S::OddBytes(S::LoadBytes(a))));
  ORTOLAN_TRY("MultiplyPairs", S::StoreInt(out, S::MultiplyPairs(S::LoadBytes(a), S::LoadBytes(b))));
  ORTOLAN_TRY("MultiplyBytes", S::StoreBytes(out, S::MultiplyBytes(S::LoadBytes(a), S::LoadBytes(b))));
  ORTOLAN_TRY("MultiplyWords", S::StoreInt(out, S::MultiplyWords(S::LoadInt(a), S::LoadInt(b))));
  ORTOLAN_TRY("RepeatEachByte", S::StoreBytes(out, S::RepeatEachByte(a)));
  return false;
}

template <typename S>
bool RunBytes(const SimdCall& call, const Arguments& x) {
  const auto *a = call.in[0], *b = call.in[1], *c = call.in[2];
  auto* const out = x.out_bytes;
  const int number = static_cast<int>(x.number);
  const auto mask = static_cast<uint64_t>(x.number);
  const int first = *reinterpret_cast<const int32_t*>(b);
  ORTOLAN_TRY("LoadBytes", S::StoreBytes(out, S::LoadBytes(a)));
  ORTOLAN_TRY("SetBytes", S::StoreBytes(out, S::SetBytes(number)));
  ORTOLAN_TRY("AndBytes", S::StoreBytes(out, S::AndBytes(S::LoadBytes(a), S::LoadBytes(b))));
  ORTOLAN_TRY("XorBytes", S::StoreBytes(out, S::XorBytes(S::LoadBytes(a), S::LoadBytes(b))));
  ORTOLAN_TRY("SubtractBytes", S::StoreBytes(out, S::SubtractBytes(S::LoadBytes(a), S::LoadBytes(b))));
  ORTOLAN_TRY("LowNibbles", S::StoreBytes(out, S::LowNibbles(S::LoadBytes(a))));
  ORTOLAN_TRY("HighNibbles", S::StoreBytes(out, S::HighNibbles(S::LoadBytes(a))));
  ORTOLAN_TRY("RepeatQuad", S::StoreBytes(out, S::RepeatQuad(a)));
  ORTOLAN_TRY("Repeat16", S::StoreBytes(out, S::Repeat16(a)));
  ORTOLAN_TRY("PickBytes", S::StoreBytes(out, S::PickBytes(S::RepeatEight(a), S::LoadBytes(b))));
  ORTOLAN_TRY("PickWords", S::StoreBytes(out, S::PickWords(S::RepeatEight(a), S::LoadBytes(b))));
  ORTOLAN_TRY("LowPositions", S::StoreBytes(out, S::LowPositions(S::LoadBytes(a), S::LoadBytes(b))));
  ORTOLAN_TRY("SpreadBytes0", S::StoreBytes(out, S::template SpreadBytes<0>(S::LoadBytes(a), S::LoadBytes(b))));
  ORTOLAN_TRY("SpreadBytes1", S::StoreBytes(out, S::template SpreadBytes<1>(S::LoadBytes(a), S::LoadBytes(b))));
  ORTOLAN_TRY("SpreadWords0", S::StoreBytes(out, S::template SpreadWords<0>(S::LoadBytes(a), S::LoadBytes(b))));
  ORTOLAN_TRY("SpreadWords1", S::StoreBytes(out, S::template SpreadWords<1>(S::LoadBytes(a), S::LoadBytes(b))));
  ORTOLAN_TRY("RepeatQuadOf16", S::StoreBytes(out, S::RepeatQuad(S::LoadBytes(a), number)));
  ORTOLAN_TRY("ExpandBytes", S::StoreBytes(out, S::ExpandBytes(mask, a, first)));
  ORTOLAN_TRY("ExpandBytesElse", S::StoreBytes(out, S::ExpandBytesElse(0x85, mask, a, first)));
  ORTOLAN_TRY("ExpandWords", S::StoreBytes(out, S::ExpandWords(mask, a, first)));
  ORTOLAN_TRY("DotQuad", S::StoreInt(out, S::DotQuad(S::LoadInt(c), S::LoadBytes(a), S::LoadBytes(b))));
  ORTOLAN_TRY(
      "DotInt8",
      S::StoreInt(out, S::DotInt8(S::LoadInt(c),
                                  S::SubtractBytes(S::LoadBytes(a), S::SetBytes(-static_cast<int>(S::kInt8Bias))),
                                  S::LoadBytes(b))));
  ORTOLAN_TRY("DotNibbles", S::StoreInt(out, DotNibbles<S>(a, b, S::LoadInt(c))));
  if constexpr (requires { typename S::ByteTable; })
    ORTOLAN_TRY("PackBytes", S::StoreBytes(out, PackedBytes<S>(x.ints, number)));
  ORTOLAN_TRY("Lookup256", S::StoreBytes(out, S::Lookup256(typename S::ByteTable(a), S::LoadBytes(b))));
  if constexpr (requires { S::template DealBytes<2>; }) {
    ORTOLAN_TRY("InterleaveBytes2", (DealAndInterleave<S, 2>(a, out)));
    ORTOLAN_TRY("InterleaveBytes4", (DealAndInterleave<S, 4>(a, out)));
  }
  ORTOLAN_TRY("LoadSomeQuads", S::StoreBytes(out, S::LoadSomeQuads(reinterpret_cast<const int8_t*>(a), x.number)));
  ORTOLAN_TRY("PermuteQuads", S::StoreBytes(out, S::PermuteQuads(S::LoadBytes(a), S::LoadInt(b))));
  ORTOLAN_TRY("SumsOfQuarters",
              S::StoreInt(out, S::SumsOfQuarters(S::LoadInt(a), S::LoadInt(b), S::LoadInt(c), S::LoadInt(call.in[3]))));
  ORTOLAN_TRY("LoadF16", S::Store(x.out, S::LoadF16(a)));
  ORTOLAN_TRY("EvenBf16", S::Store(x.out, S::EvenBf16(S::LoadBytes(a))));
  ORTOLAN_TRY("OddBf16", S::Store(x.out, S::OddBf16(S::LoadBytes(a))));
  ORTOLAN_TRY("RoundToBf16", S::Store(x.out, S::RoundToBf16(S::Load(x.a))));
  ORTOLAN_TRY("PackBf16", S::StoreBytes(out, S::PackBf16(S::Load(x.a), S::Load(x.b))));
  ORTOLAN_TRY("DotBf16", S::Store(x.out, S::DotBf16(S::Load(x.c), S::LoadBytes(a), S::LoadBytes(b))));
  if constexpr (sizeof(RowElementOf<S>) == 2) {
    const auto* const weights = reinterpret_cast<const int8_t*>(b);
    if constexpr (S::kDotsFewRows) {
      ORTOLAN_TRY("DotRows1", DotWordRows<S, 1>(x.ints, weights, As<int32_t>(out)));
      ORTOLAN_TRY("DotRows2", DotWordRows<S, 2>(x.ints, weights, As<int32_t>(out)));
    }
    if constexpr (S::kDotsFewRows || S::kLanes == 4) {
      ORTOLAN_TRY("DotRows4", DotWordRows<S, 4>(x.ints, weights, As<int32_t>(out)));
    }
    ORTOLAN_TRY("DotRows8", DotWordRows<S, 8>(x.ints, weights, As<int32_t>(out)));
    if constexpr (S::kLanes == 8) ORTOLAN_TRY("DotRows16", DotWordRows<S, 16>(x.ints, weights, As<int32_t>(out)));
    ORTOLAN_TRY("StoreRows1", DotStoredWords<S, 1>(a, number, As<int32_t>(out)));
    ORTOLAN_TRY("StoreRows2", DotStoredWords<S, 2>(a, number, As<int32_t>(out)));
  }
  if constexpr (requires { typename S::Quads; }) {
    ORTOLAN_TRY("InterleaveRows1", DotRows<S, 1>(a, b, reinterpret_cast<const int32_t*>(c), As<int32_t>(out)));
    ORTOLAN_TRY("InterleaveRows2", DotRows<S, 2>(a, b, reinterpret_cast<const int32_t*>(c), As<int32_t>(out)));
    ORTOLAN_TRY("PackRows1", DotPackedRows<S, 1>(x.ints, number, b, As<int32_t>(out)));
    ORTOLAN_TRY("PackRows2", DotPackedRows<S, 2>(x.ints, number, b, As<int32_t>(out)));
    if constexpr (S::kRegisters == 32) {
      ORTOLAN_TRY("InterleaveRows4", DotRows<S, 4>(a, b, reinterpret_cast<const int32_t*>(c), As<int32_t>(out)));
      ORTOLAN_TRY("PackRows4", DotPackedRows<S, 4>(x.ints, number, b, As<int32_t>(out)));
    }
    if constexpr (S::kGathersBytes) {
      ORTOLAN_TRY("GatherBytes", Gather<S>(a, b, x.number, out));
    }
  }
  return false;
}

}  // namespace

namespace ORTOLAN_TARGET {

extern const int64_t kSimdLanes;
constinit const int64_t kSimdLanes = Simd::kLanes;

bool RunSimd(const SimdCall& call) {
  const Arguments x(call);
  return RunFloats<Simd>(call, x) || RunBetweenLanes<Simd>(call, x) || RunIntegers<Simd>(call, x) ||
         RunMoreIntegers<Simd>(call, x) || RunSomeProducts<Simd>(call, x) || RunBytes<Simd>(call, x);
}

}  // namespace ORTOLAN_TARGET
}  // namespace ortolan
