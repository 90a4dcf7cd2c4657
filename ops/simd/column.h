// The column that this file is compiled for (CMakeLists.txt): Simd is its vectors. Included by *kernels.cc, which
// define their functions in namespace ortolan::ORTOLAN_COLUMN, where isa/kernel_table.h finds them; everything else in
// them is local to the file. An inline function compiled with AVX-512 may be the copy that the linker keeps for
// everyone, so nothing of the standard library that is a function is used there.
//
// Floats: math.h. Beside these:
//
//     LoadSome(p, left), StoreSome(p, left, a)        the lanes that `left` floats fill: none, some or all
//
// Integers: Int, kLanes int32. SetInt, LoadInt, StoreInt, AddInt, SubtractInt, MultiplyInt (its low 32 bits),
// Transpose, ToFloat, RoundToInt (to nearest even).
//
// Bytes: Bytes, 4 kLanes of them, and one C++ type with Int or not. SetBytes, LoadBytes, StoreBytes.
//
//     PackBytes(Int (&numbers)[4], offset)            numbers saturated to 16 bits, plus offset, cut off to 0 … 255
//     Lookup256(ByteTable, Bytes)                     entries of a table of 256 bytes
//     DealBytes<n>(a), InterleaveBytes(Bytes (&parts)[n], Bytes (&to)[n])    where a column has them, n 2 or 4: byte i
//                                                     of each of the parts, one behind the other, where these were
//                                                     looked up by the dealt bytes of a
//
// Rows of bytes, four at a time: quad i is byte i of each of the rows, which are v kLanes bytes long. A column may like
// the bytes of a row in another order: its own, which these functions agree on.
//
//     InterleaveRows(rows, Quads (&quads)[v])         Quads: kLanes quads of unsigned bytes, ready for products
//     DeinterleaveRows(Bytes (&quads)[v], Bytes (&rows)[v])      the inverse: the rows one behind the other
//     PackRows<v>(Int (&numbers)[4], offset)          PackBytes: 4 / v rows, one behind the other
//     DotQuadWeights(Int (&sums)[v], Quads (&quads)[v], QuadWeights, o)   sums plus the dot products of quads with
//                                                     quad o of QuadWeights(p), 16 signed bytes; exact
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

#include ORTOLAN_COLUMN_HEADER

namespace ortolan {
namespace {

using Simd = simd::ORTOLAN_COLUMN;

}  // namespace
}  // namespace ortolan
