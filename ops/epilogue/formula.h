// Recognizes the activation that a group of element-wise operators computes. Exporters write the same activation in
// many ways: GELU as x (1 + erf(x / sqrt 2)) 0.5, as (x 0.5) (1 + erf(...)), or with a factor of sqrt 0.5. Instead of
// listing these orders, the nodes are evaluated as polynomials in x, erf(u), tanh(u) and sigmoid(u), and an activation
// is identified by its coefficients. So every order of factors and terms is found, and nothing else.
//
// Used by the execution provider and, through ortolan._native, by graph_passes/find/epilogue.py, so that both follow
// the same rule.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "epilogue/epilogue.h"

namespace ortolan {

// A node of the ONNX domain with one output. The caller numbers the values; -1 is an input that is not one of them.
struct FormulaNode {
  std::string type;
  std::vector<int64_t> inputs;
  int64_t output = -1;
};

struct FormulaValue {
  std::optional<double> constant;  // the value of a scalar constant
  bool is_seen = false;            // has other consumers than the nodes, so it must be kept
};

struct FoundFormula {
  Activation activation = Activation::kNone;
  std::vector<int64_t> nodes;  // in topological order; the last one produces the result
};

// Grows a region of nodes from value x until a single value leaves it and that value is an activation of x. nodes: all
// nodes that the formula may contain, at least; starting with the consumers of x. Value numbers must be valid indices.
FoundFormula FindFormula(int64_t x, const std::vector<FormulaNode>& nodes, const std::vector<FormulaValue>& values);

// More nodes than the longest way to write an activation has.
inline constexpr size_t kMostFormulaNodes = 24;

}  // namespace ortolan
