#include "isa/features.h"

#include <cstdlib>

#include "isa/built.h"
#include "isa/kernel_table.h"

namespace ortolan {
namespace {

constexpr NamedFeatureSet kSets[] = {
#define ORTOLAN_FEATURE_SET(name, bits) {#name, feature_set::name},
#include "isa/feature_sets.inc"
#undef ORTOLAN_FEATURE_SET
};

struct Choice {
  Features features;
  std::string problem;
};

std::string Listed(const std::vector<std::string>& names) {
  std::string list;
  for (const std::string& name : names) list += (list.empty() ? "" : ", ") + name;
  return list;
}

Choice Choose() {
  const Features detected = DetectedFeatures();
  const char* wanted = std::getenv("ORTOLAN_ISA");
  if (wanted == nullptr || *wanted == '\0') return {detected, {}};
  for (const NamedFeatureSet& set : kSets) {
    if (std::string_view(wanted) == set.name && detected.Has(set.features)) return {detected & set.features, {}};
  }
  return {detected,
          "ORTOLAN_ISA is '" + std::string(wanted) + "', expected one that this CPU has: " + Listed(NamesOf(detected))};
}

const Choice& ChosenOnce() {
  static const Choice choice = Choose();
  return choice;
}

}  // namespace

std::span<const NamedFeatureSet> FeatureSets() { return kSets; }

Features BuiltFeatures() {
  uint32_t bits = 0;
#define ORTOLAN_BUILT(name, its_bits) bits |= (its_bits);
#define ORTOLAN_FEATURE_SET(name, its_bits) ORTOLAN_SECOND(ORTOLAN_WITHOUT_##name, ORTOLAN_BUILT)(name, (its_bits))
#include "isa/feature_sets.inc"
#undef ORTOLAN_FEATURE_SET
#undef ORTOLAN_BUILT
  return {bits};
}

std::vector<std::string> NamesOf(Features features) {
  std::vector<std::string> names;
  for (const NamedFeatureSet& set : kSets) {
    if (features.Has(set.features)) names.emplace_back(set.name);
  }
  return names;
}

Features ActiveFeatures() { return ChosenOnce().features; }

const std::string& IsaProblem() { return ChosenOnce().problem; }

}  // namespace ortolan
