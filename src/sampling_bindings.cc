// ortolan._native: sampling of tokens.
#include <memory>
#include <optional>

#include "arrays.h"
#include "sampling.h"

namespace ortolan {
namespace {

using Masks = std::vector<std::optional<Array<uint32_t>>>;

std::shared_ptr<SamplingRow> MakeRow(double temperature, int64_t top_k, double top_p, double min_p,
                                     double repetition_penalty, double presence_penalty, double frequency_penalty,
                                     uint64_t seed, uint32_t choice, int64_t logprobs,
                                     const std::vector<int64_t>& prompt, const std::vector<int64_t>& bias_tokens,
                                     const std::vector<float>& bias_values) {
  Require(bias_tokens.size() == bias_values.size(), "bias_values has ", bias_values.size(), " elements, expected ",
          bias_tokens.size());
  std::vector<std::pair<int64_t, float>> bias;
  for (size_t i = 0; i < bias_tokens.size(); ++i) bias.emplace_back(bias_tokens[i], bias_values[i]);
  const SamplingOptions options{temperature,       top_k, top_p,  min_p,   repetition_penalty, presence_penalty,
                                frequency_penalty, seed,  choice, logprobs};
  return std::make_shared<SamplingRow>(options, prompt, std::move(bias));
}

py::object ToPython(const SampledToken& sampled, bool has_logprobs) {
  if (!sampled.problem.empty()) return py::str(sampled.problem);
  if (!has_logprobs) return py::int_(sampled.token);
  return py::make_tuple(sampled.token, sampled.logprob, sampled.best_tokens, sampled.best_logprobs);
}

py::list SampleRows(const Array<float>& logits, const std::vector<std::shared_ptr<SamplingRow>>& rows,
                    const Masks& masks) {
  Require(logits.ndim() == 2 && logits.shape(0) == static_cast<int64_t>(rows.size()), "logits have shape [",
          logits.ndim() == 0 ? 0 : logits.shape(0), ", …] and ", logits.ndim(), " dimensions, expected [", rows.size(),
          " rows, vocabulary]");
  const int64_t vocabulary = logits.shape(1);
  Require(vocabulary >= 1 && vocabulary <= kMostTokens, "the vocabulary has ", vocabulary, " tokens, expected 1 to ",
          kMostTokens);
  Require(masks.empty() || masks.size() == rows.size(), "masks has ", masks.size(), " elements, expected ", rows.size(),
          " or none");
  std::vector<TokenMask> views(rows.size());
  for (size_t i = 0; i < masks.size(); ++i) {
    if (masks[i]) views[i] = {masks[i]->data(), masks[i]->size()};
  }
  for (size_t i = 0; i < rows.size(); ++i) Require(rows[i] != nullptr, "row ", i, " is None, expected a SamplingRow");
  std::vector<SampledToken> sampled;
  sampled.reserve(rows.size());
  {
    const float* x = logits.data();
    py::gil_scoped_release release;
    SamplingScratch scratch;
    for (size_t i = 0; i < rows.size(); ++i) {
      sampled.push_back(SampleToken(*rows[i], x + static_cast<int64_t>(i) * vocabulary, vocabulary, views[i], scratch));
    }
  }
  py::list results;
  for (size_t i = 0; i < rows.size(); ++i) results.append(ToPython(sampled[i], rows[i]->options().logprobs >= 0));
  return results;
}

}  // namespace

void BindSampling(py::module_& module) {
  module.attr("MOST_SAMPLED_TOKENS") = kMostTokens;
  py::class_<SamplingRow, std::shared_ptr<SamplingRow>>(module, "SamplingRow",
                                                        "Options and history of one sequence: src/sampling.h.")
      .def(py::init(&MakeRow), py::kw_only(), py::arg("temperature") = 1.0, py::arg("top_k") = 0,
           py::arg("top_p") = 1.0, py::arg("min_p") = 0.0, py::arg("repetition_penalty") = 1.0,
           py::arg("presence_penalty") = 0.0, py::arg("frequency_penalty") = 0.0, py::arg("seed") = 0,
           py::arg("choice") = 0, py::arg("logprobs") = -1, py::arg("prompt") = std::vector<int64_t>(),
           py::arg("bias_tokens") = std::vector<int64_t>(), py::arg("bias_values") = std::vector<float>())
      .def("append", &SamplingRow::Append, py::arg("token"), "Add a token to the answer.")
      .def_property_readonly("generated", &SamplingRow::generated, "The number of tokens in the answer.");
  module.def("sample_rows", &SampleRows, py::arg("logits").noconvert(), py::arg("rows"), py::arg("masks") = Masks(),
             "Choose a token for each row of logits. For each row: a token, (token, logprob, best tokens, their "
             "logprobs) if the row asks for logprobs, or a text that describes what is wrong with the logits.");
}

}  // namespace ortolan
