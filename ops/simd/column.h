// The column that this file is compiled for (CMakeLists.txt): Simd is its vectors. Included by *kernels.cc, which
// define their functions in namespace ortolan::ORTOLAN_COLUMN, where isa/kernel_table.h finds them; everything else in
// them is local to the file. An inline function compiled with AVX-512 may be the copy that the linker keeps for
// everyone, so nothing of the standard library that is a function is used there.
#pragma once

#include ORTOLAN_COLUMN_HEADER

namespace ortolan {
namespace {

using Simd = simd::ORTOLAN_COLUMN;

}  // namespace
}  // namespace ortolan
