#include "vnni_spmm/quantized_tokens.h"

#include <algorithm>
#include <iterator>

#include "vnni_spmm/token_range.h"

namespace ortolan {

#if defined(__x86_64__)
#define ORTOLAN_X86_KERNEL ORTOLAN_KERNEL
#else
#define ORTOLAN_X86_KERNEL(set, name)
#endif

#define ORTOLAN_KERNEL(set, name)        \
  QuantizeTokensFn QuantizeTokens##name; \
  QuantizedSpmmFn MultiplyQuantized##name;
#include "vnni_spmm/quantized_kernels.inc"
#undef ORTOLAN_KERNEL

namespace {

// Calls body(first token, width) for each block.
template <typename Body>
void ForEachBlock(int64_t m, const Body& body) {
  for (int64_t first = 0; first < m;) {
    const int64_t width = TokenBlockWidth(m - first);
    body(first, width);
    first += width;
  }
}

}  // namespace

void QuantizeTokensScalar(const float* x, int64_t x_row_bytes, int64_t m, int64_t k, float factor, int32_t zero_point,
                          uint8_t* blocks) {
  ForEachBlock(m, [&](int64_t first, int64_t width) {
    uint8_t* block = blocks + first * k;
    for (int64_t place = 0; place < width; ++place) {
      const int64_t i = first + TokenAt(width, place);
      const float* row = reinterpret_cast<const float*>(reinterpret_cast<const char*>(x) + i * x_row_bytes);
      for (int64_t l = 0; l < k; ++l) {
        block[l * width + place] = i < m ? ToByte(row[l] * factor, zero_point) : uint8_t{0};
      }
    }
  });
}

void MultiplyQuantizedScalar(const QuantizedSpmmArgs& args, int64_t panel_begin, int64_t panel_end) {
  const BlockSparseView& w = args.w;
  const int64_t end = std::min(panel_end * kPanelOutputs, w.n);
  ForEachBlock(args.m, [&](int64_t first, int64_t width) {
    const uint8_t* x = args.x + first * w.k;
    for (int64_t output = panel_begin * kPanelOutputs; output < end; ++output) {
      int32_t totals[kTokenBlock] = {};  // by place
      const int64_t group = output / kGroupOutputs;
      for (int64_t quad = w.starts[group]; quad < w.starts[group + 1]; ++quad) {
        const int8_t* weights = w.Values(quad) + output % kGroupOutputs * kQuadInputs;
        for (int64_t l = 0; l < kQuadInputs; ++l) {
          const uint8_t* row = x + w.Index(quad, l) * width;
          for (int64_t i = 0; i < width; ++i) totals[i] += (row[i] - args.x_zero_point) * weights[l];
        }
      }
      const float scale = args.x_scale * args.scales[output];
      const float bias = args.bias == nullptr ? 0.0f : args.bias[output];
      for (int64_t place = 0; place < width; ++place) {
        const int64_t i = TokenAt(width, place);
        if (first + i >= args.m) continue;
        const float total = static_cast<float>(totals[place]);
        if (args.y_sums != nullptr) {
          args.y_sums[first * w.n + output * width + i] = totals[place];
          continue;
        }
        if (args.y != nullptr) {
          float* row = reinterpret_cast<float*>(reinterpret_cast<char*>(args.y) + (first + i) * args.y_row_bytes);
          row[output] = total * scale + bias;
          continue;
        }
        const float factor = 1.0f / args.y_scale;
        const uint8_t q = ToByte(total * (scale * factor) + bias * factor, args.y_zero_point);
        args.y_blocks[first * w.n + output * width + place] = args.table == nullptr ? q : args.table[q];
      }
    }
  });
}

namespace {

constexpr QuantizedSpmmKernel kKernels[] = {
#define ORTOLAN_KERNEL(set, name) {#name, feature_set::set, &QuantizeTokens##name, &MultiplyQuantized##name},
#include "vnni_spmm/quantized_kernels.inc"
#undef ORTOLAN_KERNEL
};

}  // namespace

std::span<const QuantizedSpmmKernel> QuantizedSpmmKernels() { return kKernels; }

const QuantizedSpmmKernel& SelectQuantizedSpmm(Features features) {
  for (const QuantizedSpmmKernel& kernel : kKernels) {
    if (features.Has(kernel.needs)) return kernel;
  }
  return kKernels[std::size(kKernels) - 1];
}

}  // namespace ortolan
