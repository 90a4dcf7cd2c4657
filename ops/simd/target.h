// The target that this file is compiled for (CMakeLists.txt): Simd is its vectors. Included by *kernels.cc, which
// define their functions in namespace ortolan::ORTOLAN_TARGET, where isa/kernel_table.h finds them; everything else in
// them is local to the file. An inline function compiled with AVX-512 may be the copy that the linker keeps for
// everyone, so nothing of the standard library that is a function is used there.
//
// What all targets do alike: vectors.h.
//
// Every function gives the same bits in all targets, but for which NaN it gives and where it says otherwise. So a
// kernel whose sums have one order gives the same answer on every CPU: over 16 lanes or `Columns` (columns.h), not
// kLanes.
//
// Floats:
//
//     Float, kLanes                                   kLanes floats
//     Float Set(float), Load(const float*), LoadFirst(const float*, int64_t count)
//     void Store(float*, Float), StoreFirst(float*, int64_t count, Float)
//         First: `count` lanes, 0 … kLanes; no other memory is touched, and the other lanes are 0
//     Float LoadSome(const float*, int64_t left), void StoreSome(float*, int64_t left, Float)
//         the lanes that `left` floats fill: none, some or all
//     Float Add(a, b), Subtract(a, b), Multiply(a, b), Divide(a, b)
//     Float MultiplyAdd(a, b, c)                      a b + c, rounded once (fused); nothing else is ever fused
//     Float Max(a, b), Min(a, b)                      b if either is NaN, and Max(+0, -0) = -0
//     Float Abs(a)
//     uint32_t NonZero(a)                             a bit for each lane that is not zero, as NaN is not
//     bool HasNan(a)
//     float SumOfLanes(a)                             lane i plus lane i + kLanes / 2, and so on by halves
//     Float ExponentFromLowBits(a)                    the bits of a, shifted left by the 23 of the mantissa
//     Float SelectLess(a, b, x, y)                    a < b ? x : y; y if a or b is NaN
//     Float Exp2(a)                                   2^a, a <= 0; NaN of NaN. Below -126, where 2^a is denormal, zero
//                                                     may be given; the same bits where denormals are flushed
//     float MaxOfLanes(a)
//     Float Exp2OfProduct(a, b)                       2^(a b) for -127.4 <= a b <= 0; zero below -126.5. a b is not
//                                                     rounded
//     Float Polynomial(x, coefficients)               the lowest power first
//     Float Rounded(a)                                a, in a register, of which the compiler knows nothing
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
//     Float PickFloats(RepeatFour(const float*), Int index)      of four floats, by the low 2 bits of each index
// From and to bytes:
//     Float LoadBf16(const uint8_t*), LoadF16, LoadInt8           kLanes numbers, at any address
//     void StoreBytes(uint8_t*, Float)                kLanes numbers 0 … 255, rounded to nearest
//     Float SignedByte<n>(Int)                        byte n of each lane
// Where kDotBf16, units of 32 bits, pairs of bf16:
//     Float PackUnits(a, b)                           pairs of a and b
//     void StoreUnits(float*, Float)                  kLanes numbers one after another
//     Float MultiplyAddUnits(a, b, c)                 c plus the products of the upper numbers of units a and b, fused,
//                                                     then plus those of the lower ones, fused; denormal numbers,
//                                                     products and sums are zero
//
// Integers and bytes:
//
//     Int, Bytes            kLanes int32, and 4 kLanes bytes: one C++ type or two, so that the functions carry the type
//
//     SetInt(i), LoadInt(p), LoadFirstInt(p, count), StoreInt(p, a), AddInt, SubtractInt, AndInt, OrInt, MaxInt
//     ShiftLeftInt<n>(a), ShiftRightInt<n>(a), ShiftRightSigned<n>(a)        zeros come in, or the sign
//     SelectBits(where, a, b)               bits of a where those of `where` are 1, else of b
//     LoadUint8(p)          kLanes bytes as int32
//     StoreInt8(p, a)       kLanes int32 as int8, saturated
//     MultiplyInt (the low 32 bits), Transpose, SumOfIntLanes(a), MaxOfIntLanes(a)
//     ToFloat(Int), RoundToInt(Float) to nearest even; BitsOf(Float), FloatOf(Int): the bits as they are
//     ListBits(uint64_t bits, first, list)  first + the numbers of the set bits, ascending, of 8 or 16 bits; how many
//     CompressFloats(uint64_t bits, p, to)  the floats at p whose bits are set; both: the list has space for 64
//     DotPair(Int sums, Int a, Int b)       sums + the dot products of pairs of int16
//
//     SetBytes(i), LoadBytes(p), StoreBytes(p, a), AndBytes, XorBytes, SubtractBytes
//     LowNibbles(a), HighNibbles(a)         of each byte, as 0 … 15
//     ExpandBytes(mask, p, first)           the next stored bytes to the places whose bit is set, zero elsewhere: a
//                                           register of them, from place `first` of the mask on; p is for place 0
//     ExpandBytesElse(fill, mask, p, first) the byte `fill` elsewhere
//     ExpandWords(mask, p, first)           values of 2 bytes; each of the three may load 64 bytes from p
//     RepeatQuad(p)                         four bytes
//     PickBytes(RepeatEight(p), places)     for each place, 0 … 7, the byte that is there of the eight at p
//     PickWords(RepeatEight(p), places)     where kDotBf16: for each word the one of the four at p that its lowest two
//                                           bits name
//     LowPlaces(a, places)                  where kDotBf16: the words of a whose place is 0 or 1; zero elsewhere
//     SpreadBytes<half>(a, places)          of each quad of a the bytes 2 half and 2 half + 1, moved to the places of
//     the
//                                           quad, 0 … 3, that the same bytes of `places` name; these ascend. Zero
//                                           elsewhere
//     SpreadWords<half>(a, places)          of each pair of words the places 2 half and 2 half + 1 of four, likewise
//     Repeat16(p), RepeatQuad(a, which)     where kRegisters is 32: 16 bytes; of each 16 a quad, in its 16
//
//     DotInt8(Int sums, Bytes a, Bytes b)   sums + the dot products of quads, exact; a is int8 + kInt8Bias, modulo
//                                           256, b -127 … 127
//     DotNibbles(sums, Bytes a, Bytes b)    likewise, a int4 + kNibbleBias; between StartNibbleSums(Int sums) and
//                                           EndNibbleSums(Int sums, sums), at most eight of them. kNarrowNibbleSums: in
//                                           between they are 16 bits; otherwise they are Int. kNibblesTimes16: a may be
//                                           any unsigned byte, and not only 0 … 15
//
//     DotInt8OfQuad(sums, a, b, which)      where kDotsOfQuad, in one instruction: DotInt8 with RepeatQuad(b, which)
//     DotNibblesOfQuad(sums, a, b, which)   likewise DotNibbles
// Where kConvertsInt8, as DotInt8 is slower:
//     EvenBytes(a), OddBytes(a)             bytes 0 and 2, or 1 and 3, of each quad as pairs of int16
//     DotPairs(Int sums, Bytes a, Bytes b)  sums + the dot products of unsigned quads a and signed ones b, exact where
//                                           no sum of two products is beyond 16 bits
// Where kRowPairs:
//     InterleaveQuads<half>(a, b)           the quads of the lower or upper half of each, a's and b's in turn
//     DotEightsInt8(Int sums, a, b)         lane 2 i + j: plus eight bytes i of a times eight bytes j of b, summed up
//                                           exactly; a and b as in DotInt8
//     DotEightsNibbles(Int sums, a, b)      likewise, a and b as in DotNibbles
//     DotEightsBf16(Float sums, Bytes a, Bytes b)     likewise four bf16: plus (the first product plus the second one),
//                                           plus (the third plus the fourth), each rounded to odd; denormal numbers and
//                                           sums are zero
//     PackBf16(Float low, high)             bf16 numbers, rounded as RoundToBf16 does it
//     EvenLanes(a, b), OddLanes(a, b)       Int or Float: lanes 0 and 2 of a, then of b; lanes 1 and 3
//
//     EvenBf16(Bytes), OddBf16(Bytes)       of pairs of bf16, as floats
//     RoundToBf16(Float)                    floats that hold a bf16
//     PackBf16(Float low, high), DotBf16(Float sums, Bytes a, Bytes b)     where kDotBf16: pairs of bf16
//
//     PackBytes(Int (&numbers)[4], offset)            numbers saturated to 16 bits, plus offset, cut off to 0 … 255
//     Lookup256(ByteTable, Bytes)                     entries of a table of 256 bytes
//     DealBytes<n>(a), InterleaveBytes(Bytes (&parts)[n], Bytes (&to)[n])    where a target has them, n 2 or 4: byte i
//                                                     of each of the parts, one behind the other, where these were
//                                                     looked up by the dealt bytes of a
//
// Rows of numbers, one of each token, four at a time: RowNumber is uint8_t or int16_t. Of bytes: quad i is byte i of
// each of the rows, which are v kLanes bytes long. A target may like the bytes of a row in another order: its own,
// which these functions agree on.
//
//     InterleaveRows(rows, Quads (&quads)[v])         Quads: kLanes quads of unsigned bytes less kQuadBias, ready for
//                                                     products
//     DeinterleaveRows(Bytes (&quads)[v], Bytes (&rows)[v])      the inverse: the rows one behind the other
//     PackRows<v>(Int (&numbers)[4], offset)          PackBytes: 4 / v rows, one behind the other
//     DotQuadWeights(Int (&sums)[v], Quads (&quads)[v], QuadWeights, o)   sums plus the dot products of quads with
//                                                     quad o of QuadWeights(p), 16 signed bytes; exact. The
//                                                     caller adds kQuadBias times the sum of the weights
//
// Of words, whose products with signed bytes are exact: rows of n = kLanes or 2 kLanes words; where kDotsFewRows also
// of 1, 2 and 4 tokens, kRowWords<n> words each, for one token stands twice. Orders are again the target's own, of
// words in a row and of the kRowSums<n> registers of sums of four outputs:
//
//     PackWords(Int a, b, least, most)      2 kLanes inputs of a token, cut off: for StoreInputs
//     StoreInputs<n>(Int (&tokens)[n], to)  their 2 kLanes rows, one behind the other
//     StoreRows<v>(to, Bytes, zero)         4 / v rows of v kLanes bytes, less `zero`
//     DotRows<n>(Int (&sums)[kRowSums<n>], rows, weights)        sums plus the products of four rows with 16 signed
//                                           bytes, four of each output
//     EndRowSums(Int (&sums)[…], Int (&of)[4][v])                by output, then token: n is v kLanes
//     EndFewSums<n>(Int (&a)[…], (&b)[…], Int (&of)[n])          by token, n 1, 2 or 4: the outputs of a, then those of
//     b
//
// Where kGathersBytes:
//
//     GatherBytes(x, row_bytes, indices, quads, Bytes (&found)[rows])    of some rows of x the bytes at the 4 quads
//                                                     indices of 16 bits, which ascend; 128 bytes at a time are read
//     LoadSomeQuads(p, left)                          Bytes whose first `left` quads are loaded, the others zero
//     PermuteQuads(Bytes, Int order)                  quad order[i] to lane i
//     SumsOfQuarters(Int a, b, c, d)                  lane 4 g + o: the sum over i of lane 4 i + o of the g-th
//     DotQuad(Int sums, Bytes a, Bytes b)             sums plus the dot products of unsigned quads with signed ones
#pragma once

#include ORTOLAN_TARGET_HEADER

namespace ortolan {
namespace {

using Simd = simd::ORTOLAN_TARGET;

}  // namespace
}  // namespace ortolan
