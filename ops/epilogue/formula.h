// Which activation some element-wise operators compute together. Exporters write one activation in many ways: GELU as
// x (1 + erf(x / sqrt 2)) 0.5, as (x 0.5) (1 + erf(...)), and with a factor of sqrt 0.5. These orders are not listed.
// The nodes behind a value are worked out as polynomials in x, erf(u), tanh(u) and sigmoid(u), and an activation is
// told by its coefficients: every order of factors and terms is found, and nothing else.
//
// The execution provider asks, and graph_passes/find/epilogue.py by way of ortolan._native: one rule for both.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "epilogue/epilogue.h"

namespace ortolan {

// A node of ONNX's own domain with one output. Values are numbered by whoever asks; an input that it does not know is
// -1.
struct FormulaNode {
  std::string type;
  std::vector<int64_t> inputs;
  int64_t output = -1;
};

struct FormulaValue {
  std::optional<double> constant;  // of a constant of one number
  bool is_seen = false;            // by others than the nodes: it stays whatever is taken
};

struct FoundFormula {
  Activation activation = Activation::kNone;
  std::vector<int64_t> nodes;  // in an order in which they can run, the one that makes the result last
};

// Grows a region from the value x until one value is all that leaves it and that value is an activation of x. The
// nodes: at least all that a formula may have, from those that read x on. Numbers that name no value are an error of
// the caller.
FoundFormula FindFormula(int64_t x, const std::vector<FormulaNode>& nodes, const std::vector<FormulaValue>& values);

// The nodes of the longest way to write an activation, and some to spare.
inline constexpr size_t kMostFormulaNodes = 24;

}  // namespace ortolan
