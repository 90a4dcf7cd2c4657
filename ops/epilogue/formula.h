// Recognizes the activation that a group of element-wise operators computes. Exporters write the same activation in
// many ways: GELU as x (1 + erf(x / sqrt 2)) 0.5, as (x 0.5) (1 + erf(...)), or with a factor of sqrt 0.5. So the nodes
// are evaluated as polynomials in x, erf(u), tanh(u) and sigmoid(u), whose coefficients identify the activation in any
// order of factors and terms.
//
// Used by ops/match/epilogue.cc.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "epilogue/epilogue.h"

namespace ortolan {

// A node of the ONNX domain with one output. The caller numbers the values; -1 is any other input.
struct FormulaNode {
  std::string type;
  std::vector<int64_t> inputs;
  int64_t output = -1;
};

struct FormulaValue {
  std::optional<double> constant;  // the value of a scalar constant
  bool is_seen = false;            // has consumers outside the nodes, so it must be kept
};

struct FoundFormula {
  Activation activation = Activation::kNone;
  std::vector<int64_t> nodes;  // in topological order; the last one computes the result
};

// Grows a region of nodes from value x until a single value leaves it and that value is an activation of x. nodes: the
// consumers of x first, then at least all nodes that the formula may contain. Value numbers must be valid indices.
FoundFormula FindFormula(int64_t x, const std::vector<FormulaNode>& nodes, const std::vector<FormulaValue>& values);

// More nodes than any known way to write an activation.
inline constexpr size_t kMostFormulaNodes = 24;

}  // namespace ortolan
