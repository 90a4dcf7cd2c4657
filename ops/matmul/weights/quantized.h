// The common part of int8 and int4 weights: products of bytes, and activations quantized per row. Included by the
// headers beside it.
#pragma once

#include <cstdint>

#include "matmul/activations.h"
#include "matmul/quantize.h"
#include "matmul/weights/bitmap_stream.h"

namespace ortolan {
namespace {

template <typename Simd, bool kInt4>
struct ByteProducts {
  static constexpr bool kNibbles = kInt4;
  using Columns = simd::Columns<Simd>;
  using Activation = int8_t;
  static constexpr int kInputsTogether = kQuantizedTogether<Simd>;
  using Row = typename Columns::Bytes;
  using Sums = typename Columns::Ints;
  static constexpr int kRowInputs = 4;
  static constexpr int kRowBlock = kHalfOfRegisters<Simd>;
  static constexpr int64_t kStoredBytes = 64;
  static constexpr int64_t kMostInputs = kInt8Bitmap.max_k;
  static constexpr uint32_t kBias = kInt4 ? Simd::kNibbleBias : Simd::kInt8Bias;
  static_assert(kInt4Bitmap.PaddedK(1) == kInt8Bitmap.PaddedK(1) && kInt4Bitmap.max_k == kMostInputs);

  static int64_t PaddedK(const MatMulWeight& w) { return kInt8Bitmap.PaddedK(w.k); }

  static Row FromBytes(const Row& bytes) { return bytes; }
  static void StoreRow(const Row& weights, uint8_t* to) { Columns::StoreBytes(to, weights); }
  static Row LoadRow(const uint8_t* from) { return Columns::LoadBytes(from); }

  static constexpr bool kFloatSums = false;
  static constexpr bool kNarrowChunks = false;
  // Blocks of two or more rows of x hold x + 128.
  static constexpr bool kOffsetBlocks = false;
  static constexpr bool kFreeSpans = !kInt4 || !Simd::kNarrowNibbleSums;
  static Sums StartSpan(const Sums& sums) {
    if constexpr (kFreeSpans) return sums;
    return Columns::template Of<Sums>([&](int i) { return Simd::StartNibbleSums(sums.at[i]); });
  }
  static Sums EndSpan(const Sums& sums, const Sums& span_sums) {
    if constexpr (kFreeSpans) return span_sums;
    return Columns::template Of<Sums>([&](int i) { return Simd::EndNibbleSums(sums.at[i], span_sums.at[i]); });
  }
  static Sums Zero() { return Columns::SetInt(0); }
  static Sums AddChains(const Sums& a, const Sums& b) { return Columns::AddInt(a, b); }
  static Sums LoadSums(const void* from) { return Columns::LoadInt(static_cast<const int32_t*>(from)); }
  static void StoreSums(void* to, const Sums& sums) { Columns::StoreInt(static_cast<int32_t*>(to), sums); }

  static Sums Dot(const Sums& sums, const Row& weights, const typename Simd::Bytes& x) {
    return Columns::template Of<Sums>([&](int i) {
      return kInt4 ? Simd::DotNibbles(sums.at[i], weights.at[i], x) : Simd::DotInt8(sums.at[i], weights.at[i], x);
    });
  }
  // The product for a register of pairs_loop.h.
  static typename Simd::Int DotEights(typename Simd::Int sums, const typename Simd::Bytes& weights,
                                      const typename Simd::Bytes& x) {
    return kInt4 ? Simd::DotEightsNibbles(sums, weights, x) : Simd::DotEightsInt8(sums, weights, x);
  }
  static Sums MultiplyAdd(const Sums& sums, const Row& weights, const int8_t* quad) {
    return Dot(sums, weights, Simd::RepeatQuad(quad));
  }
  static constexpr int kParts = 1;
  template <int kPart>
  static const Row& Part(const Row& weights) {
    return weights;
  }
  template <int kPart>
  static Sums MultiplyAddPart(const Sums& sums, const Row& weights, const int8_t* quad) {
    return MultiplyAdd(sums, weights, quad);
  }
  // True if all rows of x are repeated from registers: that is free, or one shuffle.
  static constexpr bool kHoldsAll = Simd::kDotsOfQuad;
  // Registers left beside 16 registers of sums.
  static constexpr int kMostHeld = (Simd::kRegisters - 16) / 4;
  using Held = typename Simd::Bytes;
  static Held Hold(const int8_t* quads) { return Simd::Repeat16(quads); }
  static Sums MultiplyAddHeld(const Sums& sums, const Row& weights, const Held& held, int row) {
    if constexpr (kHoldsAll) {
      return Columns::template Of<Sums>([&](int i) {
        return kInt4 ? Simd::DotNibblesOfQuad(sums.at[i], weights.at[i], held, row)
                     : Simd::DotInt8OfQuad(sums.at[i], weights.at[i], held, row);
      });
    } else {
      return Dot(sums, weights, Simd::RepeatQuad(held, row));
    }
  }
};

// Stored after the q of kRows packed rows, for activations quantized per row:
//
//     scales  f32 [r]             NaN for a row that is not finite, whose q are zero
//     starts  i32 [groups][r]     - (bias of the weights) x (sum of q over the group): initial sums
//     minus_zero_points  i32 [r]  int8 weights only
//     minus_sums         i32 [r]  int8 weights only: - (sum of q - zero point)
template <typename Simd, int kRows>
struct QuantizedRowTerms {
  using Columns = simd::Columns<Simd>;

  QuantizedRowTerms(const void* from, int64_t)
      : scales(static_cast<const float*>(from)), starts(reinterpret_cast<const int32_t*>(scales + kRows)) {}
  typename Columns::Ints Start(int64_t group, int64_t row) const {
    return Columns::SetInt(starts[group * kRows + row]);
  }

  const float* scales;
  const int32_t* starts;
};

// Weights in a bitmap format whose activations are quantized per row. A block of r rows is
//
//     q  i8   in the order of activations.h
//     QuantizedRowTerms
template <typename Simd, bool kInt4>
struct RowQuantized : ByteProducts<Simd, kInt4> {
  using Weight = BitmapWeight;
  using Products = ByteProducts<Simd, kInt4>;

  static int64_t PackedRowBytes(const Weight& w) { return w.QuantizedRowBytes(); }

  static void PackRows(const Weight& w, const float* x, int64_t x_row_bytes, int64_t m, int64_t row_block,
                       void* packed) {
    const int64_t padded_k = Products::PaddedK(w);
    const int64_t groups = ScaleRows(w.k, w.group);
    const auto pack = [&](const float* row, char* block, int64_t rows, int64_t i) {
      float* scales = reinterpret_cast<float*>(block + rows * padded_k);
      uint32_t* starts = reinterpret_cast<uint32_t*>(scales + rows);
      const RowScale scale = w.column_sums == nullptr ? ScaleOf<Simd>(row, w.k) : ScaleWithZeroPoint<Simd>(row, w.k);
      scales[i] = scale.scale;
      for (int64_t g = 0; g < groups; ++g) {
        // The last group includes the padding.
        const int64_t end = g + 1 == groups ? padded_k : (g + 1) * w.group;
        const int32_t sum = QuantizeInputs<Simd>(row, w.k, g * w.group, end, scale, block, rows, i).all;
        starts[g * rows + i] = 0 - Products::kBias * static_cast<uint32_t>(sum);
        if constexpr (!kInt4) {
          starts[rows + i] = static_cast<uint32_t>(-scale.zero_point);
          // The padding consists of zero points.
          starts[2 * rows + i] = static_cast<uint32_t>(static_cast<int32_t>(padded_k) * scale.zero_point - sum);
        }
      }
    };
    PackRowBlocks(x, x_row_bytes, m, row_block, packed, PackedRowBytes(w), pack);
  }
};

}  // namespace
}  // namespace ortolan
