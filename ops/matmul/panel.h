// A panel of packed weights as the loops see it, for any kind of weight. Included by the loops; local to each file.
#pragma once

#include <cstdint>

#include "formats/scales.h"
#include "isa/tuning.h"
#include "matmul/group_weight.h"
#include "matmul/kernel.h"
#include "matmul/panel_output.h"

namespace ortolan {
namespace {

// How a loop prefetches weights: not at all, if the hardware prefetcher is better; for rows it multiplies immediately;
// or for rows it only expands.
enum class Fetch { kNone, kMultiply, kExpand };

// Call each(0), each(step), … below count. Unrolled only if a panel takes few registers: otherwise compiling takes
// minutes.
template <bool kUnroll, typename Each>
__attribute__((always_inline)) inline void ForEach(int count, int step, const Each& each) {
  if constexpr (kUnroll) {
#pragma GCC unroll 8
    for (int i = 0; i < count; i += step) each(i);
  } else {
#pragma GCC unroll 1
    for (int i = 0; i < count; i += step) each(i);
  }
}

// A span is this number of inputs of a panel, in any layout, and the shortest group.
constexpr int64_t kSpanInputs = 32;

// Spans of a group, at most, whose sums of nibbles times bytes fit 16 bits (group_weight.h).
constexpr int64_t kChunkSpans = kGroupChunkInputs / kSpanInputs;

// The kind of weight that multiplies up to kMostRows rows of x, if it differs: it uses the same packed x.
template <typename Weights>
struct FewRowsKindOf {
  using Type = Weights;
  static constexpr int64_t kMostRows = 1;
};
constexpr int64_t kAnyRows = INT64_MAX;

// Properties shared by all panels of a call.
template <typename Weights>
struct Layer {
  static constexpr int kSpanRows = kSpanInputs / Weights::kRowInputs;

  explicit Layer(const MatMulArgs& args)
      : weight(WeightOf<typename Weights::Weight>(args)),
        padded_k(Weights::PaddedK(weight)),
        spans(padded_k / kSpanInputs),
        groups(ScaleRows(weight.k, Weights::Group(weight))),
        group_spans(Weights::Group(weight) == kWholeColumn ? spans : Weights::Group(weight) / kSpanInputs),
        row_bytes(Weights::PackedRowBytes(weight)),
        ahead(ActiveTuning().ahead) {}

  const typename Weights::Weight& weight;
  int64_t padded_k;
  int64_t spans;
  int64_t groups;
  int64_t group_spans;
  int64_t row_bytes;  // size of a packed row of x
  const PrefetchDistances& ahead;
};

template <typename Simd, typename Weights>
struct Panel {
  using Activation = typename Weights::Activation;
  template <int kRows>
  using RowTerms = typename Weights::template RowTerms<kRows>;

  Panel(const Layer<Weights>& layer_, const MatMulArgs& args_, int64_t index)
      : layer(layer_),
        args(args_),
        stream(layer.weight, index, layer.ahead),
        scales(layer.weight, index, layer.groups),
        output(args, index) {}

  // The block of packed rows that starts at row i.
  const Activation* X(int64_t i) const {
    return reinterpret_cast<const Activation*>(static_cast<const char*>(args.x) + i * layer.row_bytes);
  }
  // The terms stored after the activations of a block of kRows rows.
  template <int kRows>
  RowTerms<kRows> RowTermsOf(int64_t i) const {
    return {X(i) + layer.padded_k * kRows, layer.groups};
  }

  const Layer<Weights>& layer;
  const MatMulArgs& args;
  typename Weights::Stream stream;
  typename Weights::Scales scales;
  PanelOutput<Simd> output;
};

}  // namespace
}  // namespace ortolan
