// The rules of match::Dimensions for single nodes. They throw RefusedError if an attribute has a wrong type.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "match/dimensions.h"

namespace ortolan::match {

inline constexpr size_t kMostAxes = 64;  // limit for ranks in an untrusted model

using MaybeDim = std::optional<Dim>;
using MaybeShape = std::optional<DimShape>;
using MaybeElements = std::optional<Elements>;

// A node with the results of earlier rules.
struct Visit {
  const Dimensions& dims;
  Symbols& symbols;
  const Node& node;
  std::vector<std::unique_ptr<Dimensions>> branches = {};  // the branches of an If that may run
  MaybeElements elements = {};                             // of the first output
};

MaybeShape InferShape(const Visit& visit, size_t output);               // dimension_shapes.cc
MaybeElements InferElements(const Dimensions& dims, const Node& node);  // dimension_elements.cc
ElementType InferType(const Visit& visit, size_t output);               // dimension_elements.cc

// Return an element of a constant; unknown unless it is int64, int32, a float or a boolean.
Element ElementAt(const Constant& tensor, int64_t index);
// Return the value of all elements if ConstantOfShape, then any Unsqueeze, made them; nullopt otherwise.
std::optional<Element> FilledWith(const Dimensions& dims, Value value);
// Return the elements of a list of integers, which old opsets give as an attribute.
MaybeElements ListOf(const Dimensions& dims, const Node& node, const char* attribute, size_t input);

// The elements that a Slice takes from a list of `size` elements.
struct Cut {
  int64_t begin = 0, count = 0;
};
Cut CutOf(int64_t begin, int64_t end, int64_t step, int64_t size);

}  // namespace ortolan::match
