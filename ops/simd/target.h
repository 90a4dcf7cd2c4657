// Simd: the vectors of the target that this file is compiled for (CMakeLists.txt). Included by *kernels.cc, which
// define their functions in namespace ortolan::ORTOLAN_TARGET, where isa/kernel_table.h finds them; everything else in
// them is local to the file. They call no inline function of the standard library: compiled with AVX-512, it could be
// the copy that the linker keeps for all CPUs.
//
// Functions shared by all targets: vectors.h.
//
// Every function returns the same bits on all targets, except for the bits of a NaN and where noted. So a kernel whose
// sums have one order gives the same answer on every CPU: sum over 16 lanes or `Columns` (columns.h), not over kLanes.
//
// Floats:
//
//     Float, kLanes                                   kLanes floats
//     Float Set(float), Load(const float*), LoadFirst(const float*, int64_t count)
//     void Store(float*, Float), StoreFirst(float*, int64_t count, Float)
//         First: `count` lanes, 0 … kLanes; no other memory is touched, and the other lanes are 0
//     Float LoadSome(const float*, int64_t left), void StoreSome(float*, int64_t left, Float)
//         the first `left` lanes; all of them if left is larger
//     Float Add(a, b), Subtract(a, b), Multiply(a, b), Divide(a, b)
//     Float MultiplyAdd(a, b, c)                      a b + c, rounded once (fused); nothing else is ever fused
//     Float Max(a, b), Min(a, b)                      b if either is NaN, and Max(+0, -0) = -0
//     Float Abs(a)
//     uint32_t NonZero(a)                             a bit for each lane that is not zero; NaN is not zero
//     bool HasNan(a)
//     float SumOfLanes(a)                             lane i plus lane i + kLanes / 2, and so on by halves
//     Float ExponentFromLowBits(a)                    the bits of a, shifted left by the 23 bits of the mantissa
//     Float SelectLess(a, b, x, y)                    a < b ? x : y; y if a or b is NaN
//     Float Exp2(a)                                   2^a for a <= 0; NaN for NaN. May be zero below -126, where 2^a is
//                                                     denormal; the same bits where denormals are flushed
//     float MaxOfLanes(a)
//     Float Exp2OfProduct(a, b)                       2^(a b) for -127.4 <= a b <= 0; zero below -126.5. a b is not
//                                                     rounded
//     Float Polynomial(x, coefficients)               the lowest power first
//     Float Rounded(a)                                a, in a register whose value is opaque to the compiler
//
// kRegisters is the number of vector registers. Floats between lanes:
//
//     void Transpose(Float (&)[kLanes])
//     void Transpose4(const float* from, int64_t row_bytes, float* to, int64_t to_row_bytes)
//         four rows of kLanes floats to kLanes rows of four
//     Float ReduceFour(const Float (&)[4], op)        op over all lanes of each, in lanes 0 … 3, 4 … 7, …
//     Float LoadStrided(const float*, int64_t stride) every stride-th float
//     Float LoadTwice(const float*)                   kLanes / 2 floats, each in two lanes
//     Float SwapPairs(a)                              lanes 1, 0, 3, 2, …
//     Float SubtractAdd(a, b)                         a - b in even lanes, a + b in odd lanes
//     Float Lookup16(const float*, Int index)         one of 16 floats, by the low 4 bits of each index
//     Float PickFloats(RepeatFour(const float*), Int index)      one of four floats, by the low 2 bits of each index
//
// Floats from and to bytes:
//
//     Float LoadBf16(const uint8_t*), LoadF16, LoadInt8           kLanes values, at any address
//     void StoreBytes(uint8_t*, Float)                kLanes values 0 … 255, rounded to nearest
//     Float SignedByte<n>(Int)                        byte n of each lane
//
// If kDotBf16, units of 32 bits, which hold pairs of bf16:
//
//     Float PackUnits(a, b)                           pairs of a and b
//     void StoreUnits(float*, Float)                  kLanes units, contiguous
//     Float MultiplyAddUnits(a, b, c)                 c plus the products of the upper halves of a and b, fused, then
//                                                     plus the products of the lower halves, fused; denormal operands,
//                                                     products and sums are zero
//
// Integers and bytes:
//
//     Int, Bytes            kLanes int32, and 4 kLanes bytes; possibly the same C++ type, so function names say which
//
//     SetInt(i), LoadInt(p), LoadFirstInt(p, count), StoreInt(p, a), AddInt, SubtractInt, AndInt, OrInt, MaxInt
//     ShiftLeftInt<n>(a), ShiftRightInt<n>(a), ShiftRightSigned<n>(a)        shift in zeros, or the sign
//     SelectBits(where, a, b)               bits of a where those of `where` are 1, else bits of b
//     LoadUint8(p), LoadSignedBytes(p)      kLanes bytes as int32
//     StoreInt8(p, a)       kLanes int32 as int8, saturated
//     MultiplyInt (the low 32 bits), Transpose, SumOfIntLanes(a), MaxOfIntLanes(a)
//     ToFloat(Int), RoundToInt(Float) to nearest even; BitsOf(Float), FloatOf(Int): the same bits
//     ListBits(uint64_t bits, first, list)  write first + the positions of the set bits, ascending, as 8 or 16 bits;
//                                           return their count
//     CompressFloats(uint64_t bits, p, to)  the floats at p whose bits are set. Both: the output has space for 64
//     DotPair(Int sums, Int a, Int b)       sums + the dot products of pairs of int16
//
//     SetBytes(i), LoadBytes(p), StoreBytes(p, a), AndBytes, XorBytes, SubtractBytes
//     LowNibbles(a), HighNibbles(a)         of each byte, as 0 … 15
//     ExpandBytes(mask, p, first)           move the next stored bytes to the positions whose bit is set, zero
//                                           elsewhere: one register, from position `first` of the mask; p belongs to
//                                           position 0
//     ExpandBytesElse(fill, mask, p, first) the byte `fill` elsewhere
//     ExpandWords(mask, p, first)           values of 2 bytes; each of the three may load 64 bytes from p
//     MultiplyBytes(a, b)                   products of unsigned bytes below 256; b as from RepeatEachByte
//     RepeatEachByte(p)                     kLanes bytes, each repeated in its quad
//     RepeatQuad(p)                         four bytes
//     PickBytes(RepeatEight(p), positions)  for each position, 0 … 7, that byte of the eight at p
//     PickWords(RepeatEight(p), positions)  if kDotBf16: for each word, one of the four at p, by its lowest two bits
//     LowPositions(a, positions)            if kDotBf16: the words of a whose position is 0 or 1; zero elsewhere
//     SpreadBytes<half>(a, positions)       move bytes 2 half and 2 half + 1 of each quad of a to the positions in the
//                                           quad, 0 … 3, given by the same bytes of `positions`, which ascend; zero
//                                           elsewhere
//     SpreadWords<half>(a, positions)       move each pair of words to positions 0 … 3 of four words, and return words
//                                           2 half and 2 half + 1
//     Repeat16(p), RepeatQuad(a, which)     if kRegisters is 32: 16 bytes; one quad of each 16 bytes, repeated
//
//     DotInt8(Int sums, Bytes a, Bytes b)   sums + the dot products of quads, exact; a is int8 + kInt8Bias, modulo
//                                           256, b -127 … 127
//     DotNibbles(sums, Bytes a, Bytes b)    the same for a = int4 + kNibbleBias, between StartNibbleSums(Int sums) and
//                                           EndNibbleSums(Int sums, sums), at most eight of them. If kNarrowNibbleSums,
//                                           the sums between are 16 bits; otherwise Int. If kNibblesTimes16, a may be
//                                           any unsigned byte, not only 0 … 15
//
//     DotInt8OfQuad(sums, a, b, which)      if kDotsOfQuad, in one instruction: DotInt8 with RepeatQuad(b, which)
//     DotNibblesOfQuad(sums, a, b, which)   the same for DotNibbles
//
// If kConvertsInt8, because DotInt8 is slower. Targets with tiles have the first three too:
//
//     EvenBytes(a), OddBytes(a)             bytes 0 and 2, or 1 and 3, of each quad as pairs of int16
//     MultiplyWords(a, b)                   the low 16 bits of the products of words
//     DotPairs(Int sums, Bytes a, Bytes b)  sums + the dot products of unsigned quads a and signed quads b, exact if
//                                           every sum of two products fits 16 bits
//
// If kMultipliesPairs:
//
//     MultiplyPairs(Bytes a, Bytes b)       sums of two products of unsigned a and signed b, as int16, which must hold
//                                           them; DotNibbles adds to such sums
//
// If kRowPairs:
//
//     InterleaveQuads<half>(a, b)           the quads of the lower or upper half of a and b, alternating
//     DotEightsInt8(Int sums, a, b)         lane 2 i + j: plus the dot product of eight bytes i of a and eight bytes
//                                           j of b, exact; a and b as in DotInt8
//     DotEightsNibbles(Int sums, a, b)      the same, a and b as in DotNibbles
//     DotEightsBf16(Float sums, Bytes a, Bytes b)     the same for four bf16: plus (the first product plus the second),
//                                           plus (the third plus the fourth), each rounded to odd; denormal operands
//                                           and sums are zero
//     PackBf16(Float low, high)             bf16 values, rounded as by RoundToBf16
//     EvenLanes(a, b), OddLanes(a, b)       Int or Float: lanes 0 and 2 of a, then of b; lanes 1 and 3
//
//     EvenBf16(Bytes), OddBf16(Bytes)       the first or second of each pair of bf16, as floats
//     RoundToBf16(Float)                    floats that hold a bf16
//     PackBf16(Float low, high), DotBf16(Float sums, Bytes a, Bytes b)     if kDotBf16: pairs of bf16
//
//     PackBytes(Int (&integers)[4], offset)           integers saturated to 16 bits, plus offset, clamped to 0 … 255
//     Lookup256(ByteTable, Bytes)                     entries of a table of 256 bytes
//     DealBytes<n>(a), InterleaveBytes(Bytes (&parts)[n], Bytes (&to)[n])    optional; n is 2 or 4. InterleaveBytes
//                                                     writes byte i of each part, one after another, if the parts were
//                                                     looked up by the bytes that DealBytes reordered
//
// Rows of values, one row per token, four rows at a time. RowElement is uint8_t or int16_t. Rows of bytes are v kLanes
// long; quad i is byte i of each row. A target may choose the order of bytes in a row; these functions agree on it.
//
//     InterleaveRows(rows, Quads (&quads)[v])         Quads: kLanes quads of unsigned bytes less kQuadBias, ready for
//                                                     products
//     DeinterleaveRows(Bytes (&quads)[v], Bytes (&rows)[v])      the inverse; the rows are contiguous
//     PackRows<v>(Int (&integers)[4], offset)         PackBytes for 4 / v contiguous rows
//     DotQuadWeights(Int (&sums)[v], Quads (&quads)[v], QuadWeights, o)   sums plus the dot products of quads with
//                                                     quad o of QuadWeights(p), 16 signed bytes; exact. The
//                                                     caller adds kQuadBias times the sum of the weights
//
// Rows of words, whose products with signed bytes are exact, have n = kLanes or 2 kLanes words. If kDotsFewRows they
// may also hold 1, 2 or 4 tokens, kRowWords<n> words each (one token is stored twice). The target chooses the order of
// words in a row and of the kRowSums<n> registers of sums of four outputs:
//
//     PackWords(Int a, b, least, most)      2 kLanes inputs of a token, clamped, for StoreInputs
//     StoreInputs<n>(Int (&tokens)[n], to)  their 2 kLanes contiguous rows
//     StoreRows<v>(to, Bytes, zero)         4 / v rows of v kLanes bytes, less `zero`
//     DotRows<n>(Int (&sums)[kRowSums<n>], rows, weights)        sums plus the products of four rows with 16 signed
//                                           bytes, four for each output
//     EndRowSums(Int (&sums)[…], Int (&of)[4][v])                by output, then token: n is v kLanes
//     EndFewSums<n>(Int (&a)[…], (&b)[…], Int (&of)[n])          by token, n = 1, 2 or 4: the outputs of a, then of b
//
// If kGathersBytes:
//
//     GatherBytes(x, row_bytes, indices, quads, Bytes (&found)[rows])    from each row of x, the bytes at 4 quads
//                                                     ascending 16-bit indices; reads 128 bytes at a time
//     LoadSomeQuads(p, left)                          Bytes whose first `left` quads are loaded, the others zero
//     PermuteQuads(Bytes, Int order)                  quad order[i] to lane i
//     SumsOfQuarters(Int a, b, c, d)                  lane 4 g + o: the sum over i of lane 4 i + o of the g-th argument
//     DotQuad(Int sums, Bytes a, Bytes b)             sums plus the dot products of unsigned quads and signed quads
#pragma once

#include ORTOLAN_TARGET_HEADER

namespace ortolan {
namespace {

using Simd = simd::ORTOLAN_TARGET;

}  // namespace
}  // namespace ortolan
