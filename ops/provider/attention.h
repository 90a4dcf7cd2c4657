// Attention as the provider claims it: one step, alone or together with its query, key and value layers. The pattern
// rules are in match/attention.h.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "match/attention.h"
#include "provider/layer.h"
#include "provider/ort_graph.h"

namespace ortolan::provider {

struct Attention : match::Attention {
  // Biases of the query, key and value layers, or of the inputs if the step has no layers; empty without a bias.
  std::array<std::vector<float>, 3> biases;

  // Return the values that are read at run time, except the inputs that layers of the step compute.
  std::vector<Value> Reads(bool has_layers) const;
  // Return a text such as "attention of 9 heads of 64 over a cache of 3, with rotary embedding".
  std::string Described() const;
};

// Read the constants of an attention. Throws UnfitError, with the reason, if the provider cannot compute it.
Attention ReadAttention(const Graph& graph, const match::Attention& found);

// Attention that GetCapability has found. Compile sees only the nodes of one group, but the rules need shapes that are
// computed before it, so Compile takes the attention from here.
class SavedAttentions {
 public:
  // Throws UnfitError if another branch has the same nodes, by name, but other constants.
  void Save(const std::shared_ptr<const OrtModelGraph>& model, const match::Attention& attention);
  // Return the attention that the nodes of a group compute.
  std::vector<match::Attention> In(const Graph& group) const;

 private:
  struct Saved {
    std::shared_ptr<const OrtModelGraph> model;  // owns the values
    match::Attention attention;
    std::string nodes;  // types of all nodes and names of their inputs and outputs
  };
  // By the name of the output. Branches of an If may have values of the same names.
  std::unordered_map<std::string, std::vector<Saved>> by_output_;
};

}  // namespace ortolan::provider
