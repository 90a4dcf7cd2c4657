#include "provider/claim_policy.h"

#include <iomanip>
#include <sstream>

#include "isa/tuning.h"
#include "provider/layer.h"

namespace ortolan::provider {
namespace {

// The names are those of graph_passes/auto/candidates.py and layer_times.py.
TimedLayer TimedAs(const Layer& layer) {
  TimedLayer timed;
  timed.k = layer.Inputs();
  timed.n = layer.Columns();
  if (const NBitsWeight* const w = std::get_if<NBitsWeight>(&layer.weight)) {
    if (w->bits == 4 && w->block_size == 32) timed.ours = "int4/32", timed.host = "ort int4/32";
    if (w->bits == 4 && w->block_size == 128) timed.ours = "int4", timed.host = "ort int4";
  } else if (const RoundedWeight* const rounded = std::get_if<RoundedWeight>(&layer.weight)) {
    timed.ours = rounded->precision == Precision::kBf16 ? "bf16" : "int8";
    timed.host = "original";
    timed.is_half = rounded->is_half;
  } else if (!layer.is_static) {
    timed.has_blocks = std::holds_alternative<BlockInt8Weight>(layer.weight);
    timed.ours = timed.has_blocks ? "int8 4x1" : "int8";
    timed.host = "ort int8";
  }
  return timed;
}

std::string WhyBelowLimits(const Layer& layer, const ClaimLimits& limits) {
  if (std::holds_alternative<NBitsWeight>(layer.weight)) return {};
  if (std::holds_alternative<RoundedWeight>(layer.weight)) {
    if (layer.Inputs() * layer.Columns() >= limits.float_weights) return {};
    return ErrorText("ONNX Runtime is faster for float layers with fewer than ", limits.float_weights, " weights");
  }
  if (limits.int8_zero_blocks <= 0) return {};
  const std::string reason = "without VNNI instructions ONNX Runtime's int8 layers are faster";
  // Layers with fixed ranges are never stored as blocks.
  if (limits.int8_zero_blocks > 1 || layer.is_static) return reason;
  const BlockInt8Weight* const blocks = std::get_if<BlockInt8Weight>(&layer.weight);
  if (blocks != nullptr && IsBlockSparse(*blocks, limits.int8_zero_blocks)) return {};
  return ErrorText(reason, ", unless ", 100 * limits.int8_zero_blocks, " % of the weights are in zero blocks of 4 x 1");
}

}  // namespace

std::string ClaimPolicy::WhyNotWorth(const Layer& layer) const {
  if (times_ == nullptr) return {};
  const std::optional<double> gain = times_->Gain(TimedAs(layer));
  if (!gain) return WhyBelowLimits(layer, ActiveTuning().claims);
  if (*gain >= 1) return {};
  std::ostringstream factor;
  factor << std::fixed << std::setprecision(2) << 1 / *gain;
  return ErrorText("ONNX Runtime was ", factor.str(), " times as fast for layers of ", layer.Inputs(), " x ",
                   layer.Columns(), " on this machine (ortolan times)");
}

std::string ClaimPolicy::WhyNotWorthCachedAttention() const {
  if (times_ == nullptr || ActiveTuning().claims.cached_attention) return {};
  return "without AVX2 ONNX Runtime's attention with a cache is faster";
}

}  // namespace ortolan::provider
