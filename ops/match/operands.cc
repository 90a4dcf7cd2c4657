#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <utility>

#include "attention/attention.h"
#include "match/decomposed.h"

namespace ortolan::match {
namespace {

constexpr std::string_view kSplitViews[] = {"Reshape", "Transpose", "Unsqueeze", "Squeeze", "Expand",
                                            "Flatten", "Slice",     "Gather",    "Split"};
constexpr size_t kMostShapeNodes = 200;

// Axes of batch, heads, rows and head width in a 4-D value; of batch, rows and the width of all heads in a 3-D value.
// In the order of Layout.
const std::vector<size_t> kAxes[] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {0, 1, 2, 3}, {0, 2, 1, 3}, {0, 1, 3, 2}};
const std::vector<size_t>& AxesOf(Layout layout) { return kAxes[static_cast<size_t>(layout)]; }

bool MovesHeads(const Node& node) { return node.IsStandard("Reshape") || node.IsStandard("Transpose"); }

// Check the rank and type of an operand, and return its shape.
DimShape BaseShape(const Dimensions& dims, Value value, const char* meaning, size_t rank) {
  std::optional<DimShape> shape = dims.ShapeOf(value);
  Expect(shape && shape->size() == rank, ReasonCode::kOperandRank, meaning, Quoted(value),
         shape ? std::to_string(shape->size()) : "unknown", rank);
  const ElementType type = dims.TypeOf(value);
  Expect(IsFloatType(type), ReasonCode::kOperandType, meaning, Quoted(value), NameOf(type));
  return std::move(*shape);
}

// Return the input of a Reshape from [batch, heads, …] to [batch x heads, …]; the value itself otherwise.
Value BeforeMerge(const Dimensions& dims, Value value) {
  const Node* const node = MakerOf(dims.graph(), value, "Reshape");
  if (node == nullptr) return value;
  const std::optional<DimShape> before = dims.ShapeOf(node->Input(0)), after = dims.ShapeOf(value);
  const bool fits = before && after && before->size() == 4 && after->size() == 3 && (*before)[2] == (*after)[1] &&
                    (*before)[3] == (*after)[2];
  return fits ? node->Input(0) : value;
}

// Return whether a node is a Slice that keeps the first columns of a mask, one for each key.
bool TruncatesKeys(const Dimensions& dims, const Node& node, const Attention& found) {
  const std::optional<size_t> rank = dims.Rank(node.Input(0));
  if (!node.IsStandard("Slice") || !rank || found.products.empty()) return false;
  const std::optional<DimShape> scores = dims.ShapeOf(found.products[0]->Output(0));
  const auto is = [&](size_t input, const Dim& dim) {
    const std::optional<Elements> elements = dims.ElementsOf(node.Input(input));
    return elements && elements->size() == 1 && elements->front() == Element(dim);
  };
  return scores && !scores->empty() && is(1, 0) && is(2, scores->back()) && (!node.Has(4) || is(4, 1)) &&
         (is(3, -1) || is(3, static_cast<int64_t>(*rank) - 1));
}

// Follow the output forward until the heads are merged; `shape` is the shape of [batch, heads, rows, head width]. If
// the heads are not merged alone, as in a Reshape to [batch x rows, width], return the value before that.
Context Merged(const Dimensions& dims, Value value, const DimShape& shape, NodeSet& nodes) {
  constexpr size_t kSwap[] = {0, 2, 1, 3};
  NodeSet found, until_apart;
  Value apart = nullptr;
  TensorView view(shape);
  const auto swapped = TensorView(shape).Permute(kSwap).Sources();
  const auto merged = TensorView(shape).Permute(kSwap).Merge(2).Sources();
  if (dims.Rank(value) == 3u) view.Merge(0);
  try {
    while (view.rank() != 3 || view.Sources() != merged) {
      if (view.rank() == 4 && view.Sources() == swapped) {
        apart = value;
        until_apart = found;
      }
      const Node* node = nullptr;
      size_t users = 0;
      for (const Graph::Use& use : dims.graph().Uses(value)) {
        if (use.index >= 0 && use.node->IsStandard("Shape")) continue;
        node = use.index == 0 ? use.node : nullptr;
        ++users;
      }
      Expect(users == 1 && node != nullptr && (MovesHeads(*node) || dims.ChangesNothing(*node)) &&
                 found.size() < kMostSteps,
             ReasonCode::kHeadsNotMerged, Quoted(value));
      if (!view.Apply(*node, dims)) Refuse(ReasonCode::kOutputView, Described(*node));
      found.insert(node);
      value = node->Output(0);
    }
  } catch (const RefusedError&) {
    if (apart == nullptr) throw;
    nodes.merge(until_apart);
    return {apart, Layout::kApart};
  }
  nodes.merge(found);
  return {value, Layout::kByRows};
}

}  // namespace

bool HasOthers(const Graph& graph, Value value) { return graph.Uses(value).size() > 1 || graph.IsOutput(value); }

bool SameNumber(const Dimensions& dims, const Dim& one, const Dim& other) {
  const auto is_known = [&](const Dim& dim) { return dim.IsNumber() || dims.symbols().IsName(dim); };
  if (one == other) return true;
  return !(is_known(one) && is_known(other)) && !one.Is(1) && !other.Is(1);
}

Chain ThroughViews(const Dimensions& dims, Value value, std::span<const std::string_view> views, bool alone) {
  Chain chain{{}, 1, value};
  while (chain.value != nullptr && chain.nodes.size() < kMostSteps) {
    const Node* const node = dims.graph().Maker(chain.value);
    if (node == nullptr || !node->IsStandard() || (alone && HasOthers(dims.graph(), chain.value))) break;
    size_t index = 0;
    if (node->type() == "Mul" || node->type() == "Div") {
      const bool divides = node->type() == "Div";
      index = dims.Scalar(node->Input(0)) ? 1 : 0;
      const std::optional<double> number = dims.Scalar(node->Input(1 - index));
      if (!number || *number == 0 || (divides && index == 1)) break;
      chain.scale = divides ? chain.scale / *number : chain.scale * *number;
    } else if (std::find(views.begin(), views.end(), node->type()) == views.end() && !dims.ChangesNothing(*node)) {
      break;
    }
    chain.nodes.push_back(node);
    chain.value = node->Input(index);
  }
  return chain;
}

Operand SplitOperand(const Dimensions& dims, Value value, const char* meaning, NodeSet& nodes, bool transposed) {
  const Chain chain = ThroughViews(dims, value, kSplitViews);
  const DimShape shape = BaseShape(dims, chain.value, meaning, 3);
  TensorView view(shape);
  for (auto node = chain.nodes.rbegin(); node != chain.nodes.rend(); ++node) {
    const bool is_known =
        MovesHeads(**node) || (*node)->type() == "Mul" || (*node)->type() == "Div" || dims.ChangesNothing(**node);
    if (!is_known || (MovesHeads(**node) && !view.Apply(**node, dims))) {
      Refuse(ReasonCode::kOperandView, Described(**node), meaning);
    }
  }
  view.SplitSequences();
  const bool is_split = view.rank() == 4;
  const std::optional<int64_t> heads = is_split ? view.Size(1) : std::nullopt;
  const std::optional<int64_t> head_dim = is_split ? view.Size(transposed ? 2 : 3) : std::nullopt;
  Expect(heads && head_dim, ReasonCode::kHeadsUnknown, meaning);
  const std::array<size_t, 4> axes = transposed ? std::array<size_t, 4>{0, 2, 3, 1} : std::array<size_t, 4>{0, 2, 1, 3};
  TensorView split(shape);
  Expect(split.SplitHeads(*heads, *head_dim) && split.Permute(axes).Sources() == view.Sources(), ReasonCode::kNotSplit,
         meaning, Quoted(chain.value));
  nodes.insert(chain.nodes.begin(), chain.nodes.end());
  return {chain.value, shape[0], shape[1], *heads, *head_dim, chain.scale};
}

Operand HeadsOperand(const Dimensions& dims, Value value, const char* meaning, NodeSet& nodes, bool transposed,
                     bool single) {
  Chain chain = ThroughViews(dims, value, {}, true);
  const bool merged = !single && dims.Rank(chain.value) == 3u;  // batch and heads are one axis of the MatMul
  size_t rank = single || merged ? 3 : 4;
  Layout layout = rank == 3 ? (transposed ? Layout::kColumns : Layout::kByRows)
                            : (transposed ? Layout::kByColumns : Layout::kByHeads);
  const Node* const node = MakerOf(dims.graph(), chain.value, "Transpose");
  const std::optional<std::vector<size_t>> perm =
      node != nullptr && dims.Rank(chain.value) == rank ? Permutation(*node, rank) : std::nullopt;
  if (perm && !HasOthers(dims.graph(), chain.value)) {
    std::vector<size_t> before;
    for (const size_t axis : AxesOf(layout)) before.push_back((*perm)[axis]);
    const auto known = std::find(std::begin(kAxes), std::end(kAxes), before);
    if (known != std::end(kAxes)) {
      layout = static_cast<Layout>(known - std::begin(kAxes));
      chain.nodes.push_back(node);
      chain.value = node->Input(0);
    }
  }
  if (merged && layout == Layout::kByRows) {
    layout = Layout::kByHeads;
    const Value before = BeforeMerge(dims, chain.value);
    const std::span<const Graph::Use> uses = dims.graph().Uses(chain.value);
    const auto is_shape = [](const Graph::Use& use) { return use.index == 0 && use.node->IsStandard("Shape"); };
    if (before != chain.value && !dims.graph().IsOutput(chain.value) &&
        std::count_if(uses.begin(), uses.end(), is_shape) + 1 == std::ssize(uses)) {
      chain.nodes.push_back(dims.graph().Maker(chain.value));
    }
    chain.value = before;
  }
  const DimShape shape = BaseShape(dims, chain.value, meaning, single ? 3 : 4);
  const std::vector<size_t>& axes = AxesOf(layout);
  Operand found{chain.value, shape[axes[0]], shape[axes[axes.size() - 2]], 1, 0, chain.scale, layout};
  const std::optional<int64_t> heads = single ? 1 : shape[axes[1]].Number(), head_dim = shape[axes.back()].Number();
  Expect(heads && head_dim, ReasonCode::kHeadsUnknown, meaning);
  found.heads = *heads;
  found.head_dim = *head_dim;
  nodes.insert(chain.nodes.begin(), chain.nodes.end());
  return found;
}

Operand WholeOperand(const Dimensions& dims, Value value, const char* meaning, int64_t heads) {
  const DimShape shape = BaseShape(dims, value, meaning, 3);
  const std::optional<int64_t> width = shape[2].Number();
  Expect(width && heads > 0 && *width % heads == 0, ReasonCode::kOperandWidth, meaning, Quoted(value), heads);
  return {value, shape[0], shape[1], heads, *width / heads};
}

Context MergedHeads(const Dimensions& dims, Value value, const Operand& query, NodeSet& nodes) {
  const DimShape shape = {query.batch, query.heads, query.rows, query.head_dim};
  const std::optional<DimShape> known = dims.ShapeOf(value);
  // Adding a mask can change the symbolic number of rows: then the shape of the value may show that heads are merged.
  const bool again =
      known && known != shape && known->size() == 4 && (*known)[1] == shape[1] && (*known)[3] == shape[3];
  NodeSet found;
  try {
    const Context context = Merged(dims, value, shape, found);
    if (!again || context.layout == Layout::kByRows) {
      nodes.merge(found);
      return context;
    }
  } catch (const RefusedError&) {
    if (!again) throw;
  }
  return Merged(dims, value, *known, nodes);
}

void CheckMask(const Dimensions& dims, const Mask& mask, const DimShape& scores, Executor executor) {
  const bool for_provider = executor == Executor::kProvider;
  std::optional<DimShape> shape = dims.ShapeOf(mask.value);
  if (shape && mask.heads != 0) {
    shape->insert(shape->begin() + (shape->empty() ? 0 : 1), Dim(mask.heads));
    shape->front() = scores[0];
  }
  if (shape && mask.windows && shape->size() > 1) {
    shape->erase(shape->begin());
    shape->front() = scores[0];
  }
  Expect(shape && shape->size() <= scores.size(), ReasonCode::kMaskShape, Quoted(mask.value),
         shape ? dims.symbols().Text(*shape) : "unknown");
  for (size_t i = 1; i <= shape->size(); ++i) {
    // Different symbolic dimensions are accepted, because the model itself adds the mask to the scores.
    const std::optional<int64_t> size = (*shape)[shape->size() - i].Number();
    const Dim& wanted = scores[scores.size() - i];
    Expect(!size || *size == 1 || wanted.Is(*size) || (for_provider && !wanted.IsNumber()), ReasonCode::kMaskSize,
           Quoted(mask.value), size.value_or(0));
  }
  const ElementType type = dims.TypeOf(mask.value);
  const bool is_float = type == ElementType::kFloat || (for_provider && type == ElementType::kFloat16);
  Expect(mask.fill ? type == ElementType::kBool : is_float, ReasonCode::kMaskType, Quoted(mask.value), NameOf(type));
}

void CheckUses(const Dimensions& dims, NodeSet& nodes, Attention& found, Executor executor) {
  const Graph& graph = dims.graph();
  struct Waiting {
    Value value, inside;  // the value inside the set from which `value` is computed
    const Node* user;     // its consumer outside the set; null if value is inside
  };
  std::vector<Waiting> waiting;
  for (const Node* const node : nodes) {
    if (node == graph.Maker(found.output)) continue;
    for (const Value value : node->outputs()) {
      if (value != nullptr) waiting.push_back({value, value, nullptr});
    }
  }
  // The reason is about the same value in any order of the nodes.
  std::sort(waiting.begin(), waiting.end(),
            [](const Waiting& a, const Waiting& b) { return a.value->name > b.value->name; });
  NodeSet dead;
  while (!waiting.empty()) {
    const auto [value, inside, user] = waiting.back();
    waiting.pop_back();
    if (value == nullptr) continue;
    const bool is_kept = found.cache && (value == found.cache->present_key || value == found.cache->present_value);
    Expect(!graph.IsOutput(value) || is_kept, ReasonCode::kInsideIsOutput, Quoted(inside));
    for (const Graph::Use& use : graph.Uses(value)) {
      if (nodes.count(use.node) != 0 || dead.count(use.node) != 0) continue;
      const Node* const first = user == nullptr ? use.node : user;
      if (use.index < 0 || dead.size() >= kMostShapeNodes) {
        Refuse(ReasonCode::kInsideIsUsed, Quoted(inside), Described(*first));
      }
      dead.insert(use.node);
      for (const Value made : use.node->outputs()) waiting.push_back({made, inside, first});
    }
  }
  nodes.merge(dead);
  found.nodes = InGraphOrder(nodes);
  const auto is_inside = [&](Value value) {
    const Node* const maker = value == nullptr ? nullptr : graph.Maker(value);
    return maker != nullptr && nodes.count(maker) != 0;
  };
  for (Mask& mask : found.masks) {
    while (executor == Executor::kProvider && is_inside(mask.value) && mask.heads == 0 && !mask.windows) {
      const Node& node = *graph.Maker(mask.value);
      // Broadcasting has the effect of an Expand to the shape of the scores.
      if (!node.IsStandard("Expand") && !IsWholeSlice(dims, node)) {
        if (!TruncatesKeys(dims, node, found)) break;
        mask.truncated = true;
      }
      mask.value = node.Input(0);
    }
  }
  const auto is_mask_inside = [&](const Mask& mask) { return is_inside(mask.value); };
  Expect(std::none_of(found.inputs.begin(), found.inputs.end(), is_inside) &&
             std::none_of(found.masks.begin(), found.masks.end(), is_mask_inside) && !is_inside(found.zero_rows) &&
             !(found.cache && is_inside(found.cache->lengths)),
         ReasonCode::kMaskInside);
}

Value BeforeExpand(const Dimensions& dims, Value value) {
  for (int step = 0; step < kMostSteps; ++step) {
    const Node* const node = dims.graph().Maker(value);
    if (node == nullptr || !node->Has(0) || !(node->IsStandard("Expand") || dims.ChangesNothing(*node))) break;
    value = node->Input(0);
  }
  return value;
}

bool IsWholeSlice(const Dimensions& dims, const Node& node) {
  const std::optional<Elements> steps = dims.ElementsOf(node.Input(4));
  const bool is_forward = !node.Has(4) || (steps && std::all_of(steps->begin(), steps->end(),
                                                                [](const Element& step) { return step.AsInt() == 1; }));
  const std::optional<DimShape> shape = dims.ShapeOf(node.Output(0));
  return node.IsStandard("Slice") && is_forward && shape && shape == dims.ShapeOf(node.Input(0));
}

std::vector<float> SinksOf(const Dimensions& dims, Value value, int64_t heads) {
  const Graph& graph = dims.graph();
  const Value given = value;
  value = BeforeExpand(dims, value);
  const bool is_moved = value != given;
  // Behind the Expand, the heads are the second axis.
  const std::optional<DimShape> shape = dims.ShapeOf(value);
  bool fits = shape && (is_moved ? shape->size() == 4 && (*shape)[0].Is(1) && (*shape)[1].Is(heads) &&
                                       (*shape)[2].Is(1) && (*shape)[3].Is(1)
                                 : shape->size() == 1);
  for (int step = 0; step < kMostSteps && is_moved; ++step) {
    const Node* const node = graph.Maker(value);
    if (node == nullptr ||
        !(node->IsStandard("Reshape") || node->IsStandard("Unsqueeze") || node->IsStandard("Cast"))) {
      break;
    }
    value = node->Input(0);
  }
  const std::optional<Constant> constant = graph.ConstantOf(value);
  fits = fits && constant && IsFloatType(constant->type) && constant->Count() == heads;
  Expect(fits, ReasonCode::kSinks, Quoted(given), heads);
  const std::vector<float> sinks = constant->Floats();
  Expect(std::all_of(sinks.begin(), sinks.end(), [](float sink) { return std::isfinite(sink); }), ReasonCode::kSinks,
         Quoted(given), heads);
  return sinks;
}

double ScaleAttribute(const Node& node) { return node.Float("scale", 0); }

double CheckedSoftcap(double softcap) {
  if (IsSoftcap(softcap)) return softcap;
  Refuse(ReasonCode::kSoftcap, softcap, double{kLeastSoftcap}, double{kMostSoftcap});
}

std::vector<const Node*> InGraphOrder(const NodeSet& nodes) {
  std::vector<const Node*> sorted(nodes.begin(), nodes.end());
  std::sort(sorted.begin(), sorted.end(), [](const Node* a, const Node* b) { return a->index() < b->index(); });
  return sorted;
}

}  // namespace ortolan::match
