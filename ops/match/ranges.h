// Quantization of activations to fixed 8-bit ranges (QDQ pairs), and whether such a range clips negative values.
//
// ONNX Runtime's quantizer omits a Relu or Clip whose effect a range has. So a range that begins at 0 may be removed
// together with its pair only if the quantized value is never negative.
#pragma once

#include <optional>
#include <vector>

#include "match/graph.h"

namespace ortolan::match {

struct Bounds {
  float least = 0;
  float most = 0;
};

// The code q represents the value scale (q - zero_point).
struct FixedRange {
  float scale = 0;  // above 0
  int zero_point = 0;
  ElementType type = ElementType::kUndefined;    // of q: int8 or uint8
  ElementType floats = ElementType::kUndefined;  // of the scale

  bool operator==(const FixedRange&) const = default;
  bool BeginsAtZero() const { return zero_point == (type == ElementType::kInt8 ? -128 : 0); }
  // Return the values that a range that begins at 0 can represent.
  Bounds FromZero() const;
  // Return whether kernels support the range: the type and the scale.
  bool IsSupported() const;
};

// Return whether the attributes of a QuantizeLinear or DequantizeLinear have their defaults.
bool IsPlain(const Node& node);
// Read a range from the scale and zero point inputs of a node; nullopt unless it is an 8-bit range with a constant
// positive scale. kind: type of the codes if there is no zero point.
std::optional<FixedRange> RangeAt(const Graph& graph, const Node& node, size_t scale, size_t zero_point,
                                  ElementType kind);

// Return the node that computes a value, or its elements before operators that only move them; null for other values.
const Node* MakerOfElements(const Graph& graph, Value value);

// The fixed range of a layer's input that a DequantizeLinear computes.
struct InputRange {
  FixedRange range;
  // The QuantizeLinear directly before the DequantizeLinear, with the same range, or null. A layer that rounds its
  // input to the range can read its float input.
  const Node* quantize = nullptr;
};
// Return nullopt if the range is not fixed, or if kernels do not support it.
std::optional<InputRange> FindInputRange(const Graph& graph, Value x);

// Codes with a fixed range, and their consumers.
struct QdqPair {
  const Node* maker = nullptr;      // computes the codes: a QuantizeLinear or a layer with 8-bit output
  Value floats = nullptr;           // input of the QuantizeLinear; null if a layer computes the codes
  std::vector<const Node*> moves;   // move the codes without changing them
  std::vector<const Node*> ends;    // DequantizeLinear nodes of the same range
  std::vector<const Node*> layers;  // layers that read the codes
  FixedRange range;
};

// Return the pair that begins at a node; nullopt if the node does not quantize to 8 bits, or quantizes a weight. Throws
// RefusedError if the range is not fixed, or other nodes read the codes.
std::optional<QdqPair> FindQdqPair(const Graph& graph, const Node& maker);

// Return whether no element of the value is negative, or the value is a mask: computed element by element from integers
// and constants. A mask may be negative, but no Relu was omitted there.
bool IsNeverNegative(const Graph& graph, Value value);

}  // namespace ortolan::match
