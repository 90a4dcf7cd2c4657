// The loop of attention in AMX tiles on AVX2 vectors, for CPUs without AVX-512 that run tile instructions in the
// emulator.
//
// The loop and its tile multiplications are those of the kernel. A vector of 16 lanes is two AVX2 registers.
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "attention/attention_loop.h"
#include "attention/attention_tiles.h"
#include "simd/avx2.h"

namespace ortolan {
namespace {

struct TwoOfAvx2 {
  using One = simd::avx2;
  static constexpr int kRegisters = 32;
  static constexpr int64_t kLanes = 16, kHalf = 8;
  static constexpr bool kDotBf16 = true;
  struct Float {
    __m256 at[2];
  };

  template <typename Op>
  static Float Both(const Op& op) {
    return {{op(0), op(1)}};
  }
  static Float Set(float value) {
    return Both([&](int) { return One::Set(value); });
  }
  static Float Load(const float* from) {
    return Both([&](int i) { return One::Load(from + i * kHalf); });
  }
  static Float LoadSome(const float* from, int64_t left) {
    return Both([&](int i) { return One::LoadSome(from + i * kHalf, left - i * kHalf); });
  }
  static void Store(float* to, const Float& a) {
    for (int i = 0; i < 2; ++i) One::Store(to + i * kHalf, a.at[i]);
  }
  static void StoreSome(float* to, int64_t left, const Float& a) {
    for (int i = 0; i < 2; ++i) One::StoreSome(to + i * kHalf, left - i * kHalf, a.at[i]);
  }
  static Float Add(const Float& a, const Float& b) {
    return Both([&](int i) { return One::Add(a.at[i], b.at[i]); });
  }
  static Float Subtract(const Float& a, const Float& b) {
    return Both([&](int i) { return One::Subtract(a.at[i], b.at[i]); });
  }
  static Float Multiply(const Float& a, const Float& b) {
    return Both([&](int i) { return One::Multiply(a.at[i], b.at[i]); });
  }
  static Float Abs(const Float& a) {
    return Both([&](int i) { return One::Abs(a.at[i]); });
  }
  static Float Rounded(const Float& a) {
    return Both([&](int i) { return One::Rounded(a.at[i]); });
  }
  static Float Divide(const Float& a, const Float& b) {
    return Both([&](int i) { return One::Divide(a.at[i], b.at[i]); });
  }
  static Float MultiplyAdd(const Float& a, const Float& b, const Float& c) {
    return Both([&](int i) { return One::MultiplyAdd(a.at[i], b.at[i], c.at[i]); });
  }
  static Float Max(const Float& a, const Float& b) {
    return Both([&](int i) { return One::Max(a.at[i], b.at[i]); });
  }
  static Float SelectLess(const Float& a, const Float& b, const Float& x, const Float& y) {
    return Both([&](int i) { return One::SelectLess(a.at[i], b.at[i], x.at[i], y.at[i]); });
  }
  static Float Exp2(const Float& a) {
    return Both([&](int i) { return One::Exp2(a.at[i]); });
  }
  static uint32_t NonZero(const Float& a) { return One::NonZero(a.at[0]) | One::NonZero(a.at[1]) << kHalf; }
  static void Transpose(Float (&a)[kLanes]) {
    float rows[kLanes][kLanes], columns[kLanes][kLanes];
    for (int i = 0; i < kLanes; ++i) Store(rows[i], a[i]);
    for (int i = 0; i < kLanes * kLanes; ++i) columns[i % kLanes][i / kLanes] = rows[i / kLanes][i % kLanes];
    for (int i = 0; i < kLanes; ++i) a[i] = Load(columns[i]);
  }

  static Float PackUnits(const Float& a, const Float& b) {
    return Both([&](int i) {
      const __m256i low = One::ShiftRightInt<16>(One::BitsOf(Round(a.at[i])));
      return One::FloatOf(One::OrInt(low, One::BitsOf(Round(b.at[i]))));
    });
  }
  static void StoreUnits(float* to, const Float& a) {
    uint32_t bits[kLanes];
    for (int i = 0; i < 2; ++i) One::StoreInt(bits + i * kHalf, One::BitsOf(Round(a.at[i])));
    uint16_t units[kLanes];
    for (int i = 0; i < kLanes; ++i) units[i] = static_cast<uint16_t>(bits[i] >> 16);
    std::memcpy(to, units, sizeof(units));
  }

 private:
  // Flush denormals: multiply with 1, which the compiler cannot see and therefore cannot remove.
  static __m256 Round(__m256 a) { return One::RoundToBf16(One::Multiply(a, One::Rounded(One::Set(1.0f)))); }
};

using Loop = AttentionLoop<TileUnits<TwoOfAvx2>>;

}  // namespace
}  // namespace ortolan

// Shapes: q and y [heads][queries][head_dim], k and v [keys][head_dim]. mask may be null; otherwise it has strides for
// heads, queries and keys.
extern "C" __attribute__((visibility("default"))) void attention_on_avx2(int64_t heads, int64_t queries, int64_t keys,
                                                                         int64_t head_dim, const float* q,
                                                                         const float* k, const float* v,
                                                                         const float* mask, const int64_t* mask_strides,
                                                                         float scale, float softcap, bool causal,
                                                                         bool zero_hidden_rows, float* y) {
  const int64_t row_bytes = head_dim * static_cast<int64_t>(sizeof(float));
  ortolan::AttentionArgs args;
  args.heads = heads;
  args.queries = queries;
  args.keys = keys;
  args.head_dim = head_dim;
  args.q = q;
  args.k = k;
  args.v = v;
  args.q_row_bytes = args.k_row_bytes = args.v_row_bytes = args.y_row_bytes = row_bytes;
  args.q_head_bytes = args.y_head_bytes = queries * row_bytes;
  args.mask = mask;
  args.mask_head_stride = mask_strides[0];
  args.mask_query_stride = mask_strides[1];
  args.mask_key_stride = mask_strides[2];
  args.scale = scale;
  args.softcap = softcap;
  args.causal = causal;
  args.zero_hidden_rows = zero_hidden_rows;
  args.y = y;
  const auto bytes = static_cast<size_t>((ortolan::Loop::ScratchBytes(head_dim) + 63) / 64 * 64);
  void* const scratch = std::aligned_alloc(64, bytes);
  std::memset(scratch, 0xff, bytes);  // NaN, which reaches y if the loop reads uninitialized scratch memory
  const int64_t rows = heads * queries;
  for (int64_t row = 0; row < rows; row += ortolan::kAttentionRows) {
    const int64_t end = row + ortolan::kAttentionRows < rows ? row + ortolan::kAttentionRows : rows;
    ortolan::Loop::Run(args, row, end, scratch);
  }
  std::free(scratch);
}
