// Measures the peak rate of products with all operands in registers: the reference for kernels that multiply many rows.
#include "simd/target.h"
#include "simd_call.h"
#if defined(__x86_64__)
#include "simd/amx_tiles.h"
#endif

namespace ortolan {
namespace {

// Independent accumulators. Two registers hold the operands, and at least one is left for temporaries.
constexpr int kSums = Simd::kRegisters == 32 ? 16 : 12;

// Makes the register's contents unknown to the compiler, so that it cannot move products out of the loop.
template <typename Register>
[[gnu::always_inline]] inline void Forget(Register& a) {
  if constexpr (Simd::kLanes == 1) {
    __asm__ volatile("" : "+m"(a));
  } else {
#if defined(__aarch64__)
    __asm__ volatile("" : "+w"(a));
#elif defined(__AVX512F__)
    __asm__ volatile("" : "+v"(a));
#else
    __asm__ volatile("" : "+x"(a));
#endif
  }
}

template <typename Sum, typename Operand, typename Product>
[[gnu::noinline]] void Repeat(int64_t rounds, Sum zero, Operand a, Operand b, const Product& product) {
  Sum sums[kSums];
  for (Sum& sum : sums) sum = zero;
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) {
      Forget(b);
      sums[i] = product(sums[i], a, b);
    }
  }
  for (Sum& sum : sums) Forget(sum);
}

#if defined(__x86_64__)
// Four tiles of sums, two of x and two of weights, as in matmul/amx_loop.h. Returns the number of multiply-adds.
inline int64_t RepeatTiles(bool int8, int64_t rounds) {
  TileConfig config;
  for (int tile = 0; tile < kTiles; ++tile) config.Set(tile, kMaxTileRows, kMaxTileColsb);
  LoadTileConfig(config);
  for (int64_t round = 0; round < rounds; ++round) {
    if (int8) {
      TileDpBssd<0, 4, 6>();
      TileDpBssd<1, 4, 7>();
      TileDpBssd<2, 5, 6>();
      TileDpBssd<3, 5, 7>();
    } else {
      TileDpBf16<0, 4, 6>();
      TileDpBf16<1, 4, 7>();
      TileDpBf16<2, 5, 6>();
      TileDpBf16<3, 5, 7>();
    }
  }
  TileRelease();
  return rounds * 4 * kMaxTileRows * kMaxTileRows * kMaxTileColsb / (int8 ? 1 : 2);
}
#endif

// Run products of tiles, if the target has them. Returns 0 for other products.
template <typename Target>
int64_t RunTiles([[maybe_unused]] const char* product, [[maybe_unused]] int64_t rounds) {
#if defined(__x86_64__)
  if constexpr (requires { Target::kHasTiles; }) {
    if (__builtin_strcmp(product, "TileDpBssd") == 0) return RepeatTiles(true, rounds);
    if (__builtin_strcmp(product, "TileDpBf16") == 0) return RepeatTiles(false, rounds);
  }
#endif
  return 0;
}

}  // namespace

namespace ORTOLAN_TARGET {

int64_t RunPeak(const char* product, int64_t rounds) {
  const int64_t floats = rounds * kSums * Simd::kLanes;
  if (__builtin_strcmp(product, "MultiplyAdd") == 0) {
    const auto one = Simd::Set(1.0f);
    Repeat(rounds, Simd::Set(0.0f), one, one, [](auto sums, auto a, auto b) { return Simd::MultiplyAdd(a, b, sums); });
    return floats;
  }
  const auto a = Simd::SetBytes(3), b = Simd::SetBytes(5);
  if (__builtin_strcmp(product, "DotInt8") == 0) {
    Repeat(rounds, Simd::SetInt(0), a, b, [](auto sums, auto x, auto y) { return Simd::DotInt8(sums, x, y); });
    return 4 * floats;
  }
  if (__builtin_strcmp(product, "DotNibbles") == 0) {
    Repeat(rounds, Simd::SetInt(0), a, b, [](auto sums, auto x, auto y) { return Simd::DotNibbles(sums, x, y); });
    return 4 * floats;
  }
  return RunTiles<Simd>(product, rounds);
}

}  // namespace ORTOLAN_TARGET
}  // namespace ortolan
