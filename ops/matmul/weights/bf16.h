// bf16 weights for the loops (requirements: panel_loop.h, amx_loop.h). Included by bf16_kernels.cc only; local to each.
#pragma once

#include <cstdint>
#include <cstring>

#include "matmul/activations.h"
#include "matmul/quantize.h"
#include "matmul/weights/two_four.h"

namespace ortolan {
namespace {

// Products of pairs of bf16 as floats: first the even inputs of each pair, then the odd ones.
template <typename Simd>
struct Bf16Products {
  using Columns = simd::Columns<Simd>;
  using Floats = typename Columns::Floats;
  using Activation = float;
  static constexpr int kInputsTogether = 8;
  using Row = typename Columns::Bytes;
  static constexpr int64_t kStoredBytes = 64;
  // Six rows of 16 columns on AVX2: a product waits four cycles for the previous sum, and two products start per cycle.
  static constexpr int kRowBlock = Simd::kRegisters == 16 ? RowsWithSumsIn<Simd>(12) : kHalfOfRegisters<Simd>;

  static void Round(const float* x, int64_t left, float* to) {
    for (int64_t l = 0; l < kTileInputs; l += Simd::kLanes) {
      Simd::Store(to + l, Simd::RoundToBf16(Simd::LoadSome(x + l, left - l)));
    }
  }
  static Row FromBytes(const Row& bytes) { return bytes; }
  static void StoreRow(const Row& weights, uint8_t* to) { Columns::StoreBytes(to, weights); }
  static Row LoadRow(const uint8_t* from) { return Columns::LoadBytes(from); }

  // Even inputs, then odd ones.
  static constexpr int kParts = 2;
  template <int kPart>
  static Floats Part(const Row& weights) {
    return Columns::template Of<Floats>(
        [&](int i) { return kPart == 0 ? Simd::EvenBf16(weights.at[i]) : Simd::OddBf16(weights.at[i]); });
  }
  template <int kPart>
  static Floats MultiplyAddPart(const Floats& sums, const Floats& part, const float* pair) {
    const auto x = Simd::Set(pair[kPart]);
    return Columns::template Of<Floats>([&](int i) { return Simd::MultiplyAdd(x, part.at[i], sums.at[i]); });
  }
  static Floats MultiplyAdd(const Floats& sums, const Row& weights, const float* pair) {
    return MultiplyAddPart<1>(MultiplyAddPart<0>(sums, Part<0>(weights), pair), Part<1>(weights), pair);
  }
  static constexpr int kMostHeld = 0;
  struct Held {};
};

// Activations for targets with bf16 products.
template <typename Simd>
struct RoundedToBf16 {
  using Activation = uint16_t;
  static constexpr int64_t kStoredBytes = 64;
  static constexpr int kRowBlock = kHalfOfRegisters<Simd>;

  static void Round(const float* x, int64_t left, uint16_t* to) {
    for (int64_t l = 0; l < kTileInputs; l += 2 * Simd::kLanes) {
      const auto low = Simd::LoadSome(x + l, left - l);
      const auto high = Simd::LoadSome(x + l + Simd::kLanes, left - l - Simd::kLanes);
      Simd::StoreBytes(reinterpret_cast<uint8_t*>(to + l), Simd::PackBf16(low, high));
    }
  }
};

// Pairs of bf16, multiplied by one instruction.
template <typename Simd>
  requires Simd::kDotBf16
struct Bf16Products<Simd> : RoundedToBf16<Simd> {
  using Columns = simd::Columns<Simd>;
  using Floats = typename Columns::Floats;
  static constexpr int kInputsTogether = 8;
  using Row = typename Columns::Bytes;
  static Row FromBytes(const typename Columns::Bytes& bytes) { return bytes; }
  static void StoreRow(const Row& weights, uint8_t* to) { Columns::StoreBytes(to, weights); }
  static Row LoadRow(const uint8_t* from) { return Columns::LoadBytes(from); }

  static Floats MultiplyAdd(const Floats& sums, const Row& weights, const uint16_t* pair) {
    const auto x = Simd::RepeatQuad(pair);
    return Columns::template Of<Floats>([&](int i) { return Simd::DotBf16(sums.at[i], weights.at[i], x); });
  }
  static constexpr int kParts = 1;
  template <int kPart>
  static const Row& Part(const Row& weights) {
    return weights;
  }
  template <int kPart>
  static Floats MultiplyAddPart(const Floats& sums, const Row& weights, const uint16_t* pair) {
    return MultiplyAdd(sums, weights, pair);
  }
  static constexpr int kMostHeld = 4;
  using Held = typename Simd::Bytes;
  static Held Hold(const uint16_t* pairs) { return Simd::Repeat16(pairs); }
  static Floats MultiplyAddHeld(const Floats& sums, const Row& weights, const Held& held, int row) {
    const auto x = Simd::RepeatQuad(held, row);
    return Columns::template Of<Floats>([&](int i) { return Simd::DotBf16(sums.at[i], weights.at[i], x); });
  }
};

template <typename Simd, Storage kStorage>
struct Bf16TileOrder;

template <typename Simd, Storage kStorage>
struct Bf16Weights : Bf16Products<Simd> {
  using Products = Bf16Products<Simd>;
  using Columns = simd::Columns<Simd>;
  using Weight = BitmapWeight;
  using Stream = typename StreamOf<Simd, kStorage, kBf16Bitmap>::Type;
  using Sums = typename Columns::Floats;
  static constexpr bool kDense = kStorage == Storage::kDense;
  static constexpr bool kStoredTiles = kDense;
  static constexpr bool kHasGroups = false;
  static constexpr bool kNibbles = false;
  static constexpr bool kBuffered = true;  // dense storage too, so both storages add in one order
  static constexpr int kRowInputs = 2;
  static constexpr bool kFloatSums = true;
  static constexpr bool kRowsApart = Products::kRowBlock == 1;
  static_assert(kRowsApart || Products::kRowBlock >= kManyRows - 1);
  static constexpr int kHeldOfPanel = kStorage == Storage::kTwoFour ? 1 : 0;
  using TileOrder = Bf16TileOrder<Simd, kStorage>;

  static constexpr int64_t kMostInputs = kBf16Bitmap.max_k;

  static bool Takes(const Weight& w) { return w.view.StoredAs() == kStorage; }
  static int64_t PaddedK(const Weight& w) { return BitmapPaddedK(w.k); }
  static int64_t Group(const Weight&) { return kWholeColumn; }
  static int64_t PackedRowBytes(const Weight& w) {
    const int64_t bytes = BitmapPaddedK(w.k) * static_cast<int64_t>(sizeof(typename Products::Activation));
    // Rows of a tile that are 2048 bytes apart would share one or two sets of the level-1 cache.
    return bytes % 2048 == 0 ? bytes + 64 : bytes;
  }

  static constexpr bool kNarrowChunks = false;
  static constexpr bool kFreeSpans = true;
  static Sums StartSpan(const Sums& sums) { return sums; }
  static Sums EndSpan(const Sums&, const Sums& span_sums) { return span_sums; }
  static Sums Zero() { return Columns::Set(0.0f); }
  template <typename Output>
  static Sums StartSums(const Output&) {
    return Zero();
  }
  template <typename Output>
  static void EndSums(const Output& output, int row, const Sums& sums) {
    output.StoreWithBias(row, End(sums));
  }
  // A zero is +0, whether products of either sign were added to it or, in 2:4 storage, left out.
  static Sums End(const Sums& sums) { return Columns::Add(sums, Zero()); }
  static Sums LoadSums(const void* from) { return Columns::Load(static_cast<const float*>(from)); }
  static void StoreSums(void* to, const Sums& sums) { Columns::Store(static_cast<float*>(to), sums); }

  struct Scales {
    Scales(const Weight&, int64_t, int64_t) {}
    int Of(int64_t) const { return 0; }
  };
  template <int kRows>
  struct RowTerms {
    RowTerms(const void*, int64_t) {}
    Sums Start(int64_t, int) const { return Zero(); }
    Sums Add(const Sums&, const Sums& sums, int, int64_t, int) const { return sums; }
    Sums End(const Sums& total, int) const { return Bf16Weights::End(total); }
  };

  // Pack in the order of activations.h.
  static void PackRows(const Weight& w, const float* x, int64_t x_row_bytes, int64_t m, int64_t row_block,
                       void* packed) {
    using Activation = typename Products::Activation;
    constexpr int64_t kTogether = Products::kInputsTogether;
    const auto pack = [&](const float* row, char* block, int64_t rows, int64_t i) {
      Activation* to = reinterpret_cast<Activation*>(block) + kTogether * i;
      for (int64_t l = 0; l < BitmapPaddedK(w.k); l += kTileInputs) {
        if (rows == 1) {
          Products::Round(row + l, w.k - l, to);
          to += kTileInputs;
          continue;
        }
        alignas(64) Activation rounded[kTileInputs];
        Products::Round(row + l, w.k - l, rounded);
        for (int64_t four = 0; four < kTileInputs; four += kTogether, to += kTogether * rows) {
          std::memcpy(to, rounded + four, kTogether * sizeof(Activation));
        }
      }
    };
    PackRowBlocks(x, x_row_bytes, m, row_block, packed, PackedRowBytes(w), pack);
  }
};

// Adds in the order of tile products (simd/amx_tiles.h), for contiguous packed rows of x: for each span one sum over
// even inputs and one over odd inputs, then both together are added to the total. The caller must flush denormals.
template <typename Simd, Storage kStorage>
struct Bf16TileOrder : Bf16Weights<Simd, kStorage> {
  using Columns = simd::Columns<Simd>;
  using Floats = typename Columns::Floats;
  using Row = typename Columns::Bytes;
  static constexpr bool kRowsApart = true;

  struct Sums {
    Floats even, odd;  // between spans: the total, and zero
  };
  template <typename Output>
  static Sums StartSums(const Output& output) {
    return {output.Bias(), Columns::Set(0.0f)};
  }
  template <typename Output>
  static void EndSums(const Output& output, int row, const Sums& sums) {
    output.Store(row, Bf16Weights<Simd, kStorage>::End(sums.even));
  }
  static Sums StartSpan(const Sums&) { return {Columns::Set(0.0f), Columns::Set(0.0f)}; }
  static Sums EndSpan(const Sums& sums, const Sums& span) {
    return {Columns::Add(sums.even, Columns::Add(span.even, span.odd)), sums.odd};
  }
  static Sums MultiplyAdd(const Sums& sums, const Row& weights, const uint16_t* pair) {
    const auto x = Simd::RepeatQuad(pair);
    const auto even_x = Simd::EvenBf16(x), odd_x = Simd::OddBf16(x);
    return {Columns::template Of<Floats>(
                [&](int i) { return Simd::MultiplyAdd(even_x, Simd::EvenBf16(weights.at[i]), sums.even.at[i]); }),
            Columns::template Of<Floats>(
                [&](int i) { return Simd::MultiplyAdd(odd_x, Simd::OddBf16(weights.at[i]), sums.odd.at[i]); })};
  }
};

// Multiplies each four activations with the two stored weights of each column, in the order of the expanded pairs.
template <typename Simd, typename Kind>
struct TwoFourBf16Row : TwoFourRow<Simd, Kind> {
  using Columns = simd::Columns<Simd>;
  using Activation = typename Kind::Activation;
  using Sums = typename Kind::Sums;
  using Row = typename TwoFourRow<Simd, Kind>::Row;
  static constexpr int kHeldOfPanel = 0;  // with few registers, positions are read from memory

  struct Stream : TwoFourRows<Simd, kBf16Bitmap> {
    using TwoFourRows<Simd, kBf16Bitmap>::TwoFourRows;

    template <Fetch kFetch, bool kOddTimes16>
    Row Next(int row) {
      return {this->template Weights<kFetch, kOddTimes16>(row), this->Positions()};
    }
    void EndSpan() {}
  };

  static Sums MultiplyAdd(const Sums& sums, const Row& row, const float* x) {
    const auto four = Simd::RepeatFour(x);
    return Columns::template Of<Sums>([&](int i) {
      const auto even = Simd::PickFloats(four, row.positions.at[i]);
      const auto odd = Simd::PickFloats(four, Simd::template ShiftRightInt<16>(row.positions.at[i]));
      return Simd::MultiplyAdd(odd, Simd::OddBf16(row.weights.at[i]),
                               Simd::MultiplyAdd(even, Simd::EvenBf16(row.weights.at[i]), sums.at[i]));
    });
  }
  static Sums MultiplyAdd(const Sums& sums, const Row& row, const uint16_t* x) {
    const auto eight = Simd::RepeatEight(x);
    return Columns::template Of<Sums>([&](int i) {
      const auto picked = Simd::PickWords(eight, row.positions.at[i]);
      const auto first = Simd::LowPositions(row.weights.at[i], row.positions.at[i]);
      const auto second = Simd::XorBytes(row.weights.at[i], first);  // the other words
      return Simd::DotBf16(Simd::DotBf16(sums.at[i], first, picked), second, picked);
    });
  }

  // Rejects rows with an Inf or a NaN: if a column stores no weight for that input, its output would not become NaN.
  static bool TakesRow(const void* x, int64_t padded_k) {
    const Activation* const row = static_cast<const Activation*>(x);
    if constexpr (Simd::kDotBf16) {
      constexpr uint16_t kExponent = 0x7f80;
      bool finite = true;
      for (int64_t l = 0; l < padded_k; ++l) finite &= (row[l] & kExponent) != kExponent;
      return finite;
    } else {
      auto nans = Simd::Set(0.0f);
      for (int64_t l = 0; l < padded_k; l += Simd::kLanes) {
        const auto some = Simd::Load(row + l);
        nans = Simd::Add(nans, Simd::Subtract(some, some));
      }
      return !Simd::HasNan(nans);
    }
  }
};

template <typename Simd>
struct FewRowsKindOf<Bf16Weights<Simd, Storage::kTwoFour>> {
  using Type = TwoFourBf16Row<Simd, Bf16Weights<Simd, Storage::kTwoFour>>;
  static constexpr int64_t kMostRows = 1;
};

}  // namespace
}  // namespace ortolan
