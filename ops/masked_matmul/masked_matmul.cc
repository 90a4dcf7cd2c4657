#include "masked_matmul/masked_matmul.h"

#include <cmath>

#include "formats/bf16.h"
#include "isa/kernel_table.h"
#include "masked_matmul/kernel_functions.h"

namespace ortolan {

#define ORTOLAN_KERNEL(set, name, tile_rows, sparse_tile_rows) \
  ScanRowsFn ScanRows##name;                                   \
  ScanBlocksFn ScanBlocks##name;                               \
  PackBlocksFn PackBlocks##name;                               \
  PackTileFn PackTile##name;                                   \
  PackTileFn PackSparseTile##name;                             \
  MultiplyTileFn MultiplyTile##name;                           \
  MultiplySparseTileFn MultiplySparseTile##name;               \
  ListNumbersFn ListNumbers##name;                             \
  PackPanelFn PackPanel##name;                                 \
  MultiplyNumbersFn MultiplyNumbers##name;                     \
  ListInputsFn ListInputs##name;                               \
  MultiplyRowsFn MultiplyRowsFloat##name;                      \
  MultiplyRowsFn MultiplyRowsBf16##name;                       \
  MultiplyRowsFn MultiplyRowsInt8##name;                       \
  PackInputsFn PackInputsFloat##name;                          \
  PackInputsFn PackInputsBf16##name;                           \
  PackInputsFn PackInputsInt8##name;                           \
  MultiplyPanelFn MultiplyPanel##name;
#include "masked_matmul/kernels.inc"
#undef ORTOLAN_KERNEL

namespace {

// A block of 16 floats on any CPU.
struct ScalarBlock {
  struct Vector {
    float lanes[kBlockColumns];
  };
  using Scalar = float;
  static constexpr int kVectorsABlock = 16;
  static constexpr int kTileColumns = 4;  // sums of a tile that are in registers

  static Vector Zero() { return {}; }
  static float Set(float value) { return value; }
  static Vector Load(const float* from) { return LoadFirst(from, kBlockColumns); }
  static Vector LoadFirst(const float* from, int64_t count) {
    Vector v = {};
    for (int64_t i = 0; i < count; ++i) v.lanes[i] = from[i];
    return v;
  }
  static void Store(float* to, const Vector& v) { StoreFirst(to, kBlockColumns, v); }
  static void StoreFirst(float* to, int64_t count, const Vector& v) {
    for (int64_t i = 0; i < count; ++i) to[i] = v.lanes[i];
  }
  static void Keep(Vector&) {}
  static void Keep(float&) {}
  static float Broadcast(const float* from) { return *from; }
  static Vector Add(const Vector& a, const Vector& b) {
    Vector v;
    for (int64_t i = 0; i < kBlockColumns; ++i) v.lanes[i] = a.lanes[i] + b.lanes[i];
    return v;
  }
  static Vector Multiply(const Vector& a, const Vector& b) {
    Vector v;
    for (int64_t i = 0; i < kBlockColumns; ++i) v.lanes[i] = a.lanes[i] * b.lanes[i];
    return v;
  }
  static Vector MultiplyAdd(float a, const Vector& b, const Vector& c) {
    Vector v;
    for (int64_t i = 0; i < kBlockColumns; ++i) v.lanes[i] = a * b.lanes[i] + c.lanes[i];
    return v;
  }
  static uint32_t Bits(const Vector& v) {
    uint32_t bits = 0;
    for (int64_t i = 0; i < kBlockColumns; ++i) bits |= static_cast<uint32_t>(v.lanes[i] != 0.0f) << i;
    return bits;
  }
  static bool HasNan(const Vector& v) {
    for (const float lane : v.lanes) {
      if (std::isnan(lane)) return true;
    }
    return false;
  }
  static Vector LoadBf16(const uint16_t* from) {
    Vector v;
    for (int64_t i = 0; i < kBlockColumns; ++i) v.lanes[i] = Bf16ToFloat(from[i]);
    return v;
  }
  static Vector LoadInt8(const int8_t* from) {
    Vector v;
    for (int64_t i = 0; i < kBlockColumns; ++i) v.lanes[i] = from[i];
    return v;
  }
  static void Transpose4x16(const float* from, int64_t row_bytes, float* to, int64_t to_row) {
    for (int64_t i = 0; i < 4; ++i) {
      for (int64_t l = 0; l < 16; ++l) to[l * to_row + i] = AtByte(from, i * row_bytes)[l];
    }
  }
  static int64_t ListBits(const uint64_t* a, const uint64_t* b, int64_t words, uint16_t* list) {
    return ListBitsOneByOne(a, b, words, list);
  }
  static void PackNumbers(const float* row, uint64_t mask, float* values, uint8_t* inputs) {
    PackNumbersOneByOne(row, mask, values, inputs);
  }
};

}  // namespace

ORTOLAN_MASKED_KERNEL(Scalar, ScalarBlock, 16, 4)

namespace {

constexpr MaskedMatMulKernel kKernels[] = {
#define ORTOLAN_KERNEL(set, name, tile_rows, sparse_tile_rows) \
  {#name,                                                      \
   feature_set::set,                                           \
   tile_rows,                                                  \
   sparse_tile_rows,                                           \
   &ScanRows##name,                                            \
   &ScanBlocks##name,                                          \
   &PackBlocks##name,                                          \
   &PackTile##name,                                            \
   &PackSparseTile##name,                                      \
   &MultiplyTile##name,                                        \
   &MultiplySparseTile##name,                                  \
   &ListNumbers##name,                                         \
   &PackPanel##name,                                           \
   &MultiplyNumbers##name,                                     \
   &ListInputs##name,                                          \
   &MultiplyRowsFloat##name,                                   \
   &MultiplyRowsBf16##name,                                    \
   &MultiplyRowsInt8##name,                                    \
   &PackInputsFloat##name,                                     \
   &PackInputsBf16##name,                                      \
   &PackInputsInt8##name,                                      \
   &MultiplyPanel##name},
#include "masked_matmul/kernels.inc"
#undef ORTOLAN_KERNEL
};

}  // namespace

std::span<const MaskedMatMulKernel> MaskedMatMulKernels() { return kKernels; }

const MaskedMatMulKernel& SelectMaskedMatMul(Features features) {
  return SelectKernel(MaskedMatMulKernels(), features);
}

}  // namespace ortolan
