#include "provider/kept_times.h"

#include <charconv>
#include <cmath>
#include <fstream>
#include <iterator>
#include <utility>

#include "isa/features.h"
#include "isa/tuning.h"

namespace ortolan::provider {
namespace {

constexpr std::string_view kHeader = "ortolan layer times 1";
constexpr double kBlocks = 0.5;  // kLeastZeroBlocks of matmul/block_int8_weight.h

// Remove the text up to `end` from `rest`, and return it without `end`.
std::string_view Take(std::string_view& rest, char end) {
  const size_t size = rest.find(end);
  const std::string_view taken = rest.substr(0, size);
  rest.remove_prefix(size == std::string_view::npos ? rest.size() : size + 1);
  return taken;
}

template <typename Number>
std::optional<Number> NumberOf(std::string_view text) {
  Number number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

// Read a date such as 2026-11-27.
std::optional<std::chrono::sys_days> DateOf(std::string_view text) {
  const std::optional<int> year = NumberOf<int>(Take(text, '-'));
  const std::optional<unsigned> month = NumberOf<unsigned>(Take(text, '-')), day = NumberOf<unsigned>(text);
  if (!year || !month || !day || *year < 0 || *year > 9999) return std::nullopt;
  const std::chrono::year_month_day date{std::chrono::year(*year), std::chrono::month(*month), std::chrono::day(*day)};
  if (!date.ok()) return std::nullopt;
  return std::chrono::sys_days(date);
}

// Append a text to the description of this machine, with single spaces.
void Append(std::string_view text, std::string& machine) {
  if (!machine.empty()) machine += ";";
  while (!text.empty()) {
    const std::string_view word = Take(text, ' ');
    if (!word.empty()) machine.append(machine.empty() ? "" : " ").append(word);
  }
}

// The same text as `machine` in src/ortolan/times_file.py.
std::string ThisMachine(const std::string& host_version) {
  std::string machine;
  Append(CpuName(), machine);
  Append(ActiveTuning().microarchitecture, machine);
  Append(NamesOf(ActiveFeatures()).back(), machine);
  Append("onnxruntime " + host_version, machine);
  Append("ortolan " ORTOLAN_VERSION, machine);
  return machine;
}

std::string ContentOf(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text(static_cast<size_t>(kMostBytes) + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(file.gcount() > kMostBytes ? 0 : static_cast<size_t>(file.gcount()));
  return text;
}

}  // namespace

KeptTimes::KeptTimes(const std::string& path, const std::string& host_version) {
  const std::string text = path.empty() ? "" : ContentOf(path);
  if (text.empty()) return;
  Read(text, ThisMachine(host_version), std::chrono::floor<std::chrono::days>(std::chrono::system_clock::now()));
}

void KeptTimes::Read(std::string_view text, std::string_view machine, std::chrono::sys_days today) {
  if (Take(text, '\n') != kHeader) return;
  while (!text.empty()) {
    std::string_view line = Take(text, '\n');
    const std::optional<std::chrono::sys_days> date = DateOf(Take(line, '\t'));
    if (!date || *date > today || today - *date > std::chrono::days(kMostDays)) continue;
    if (Take(line, '\t') != machine) continue;
    Take(line, '\t');  // threads: ONNX Runtime does not tell how many a session has
    std::string_view sizes = Take(line, '\t');
    const std::optional<int64_t> rows = NumberOf<int64_t>(Take(sizes, 'x')), k = NumberOf<int64_t>(Take(sizes, 'x')),
                                 n = NumberOf<int64_t>(sizes);
    const std::string_view type = Take(line, '\t');
    Take(line, '\t');  // zeros
    const std::optional<double> zero_blocks = NumberOf<double>(Take(line, '\t'));
    Take(line, '\t');  // other properties
    if (!rows || !k || !n || !zero_blocks || (type != "FLOAT" && type != "FLOAT16")) continue;
    Line found{*k, *n, type == "FLOAT16", *zero_blocks >= kBlocks, {}};
    while (!line.empty()) {
      std::string_view time = Take(line, '\t');
      const std::string_view name = Take(time, '=');
      const std::optional<double> ms = NumberOf<double>(time);
      if (ms && std::isfinite(*ms) && *ms > 0) found.ms.emplace_back(name, *ms);
    }
    lines_.push_back(std::move(found));
  }
}

std::optional<double> KeptTimes::Gain(const TimedLayer& layer) const {
  double logs = 0.0;
  int count = 0;
  for (const Line& line : lines_) {
    if (line.k != layer.k || line.n != layer.n || line.is_half != layer.is_half ||
        line.has_blocks != layer.has_blocks) {
      continue;
    }
    const auto log_of = [&](std::string_view name) {
      for (const auto& [known, ms] : line.ms) {
        if (known == name) return std::log(ms);
      }
      return std::nan("");
    };
    const double log = log_of(layer.host) - log_of(layer.ours);
    if (std::isnan(log)) continue;
    logs += log;
    ++count;
  }
  if (count == 0) return std::nullopt;
  return std::exp(logs / count);
}

}  // namespace ortolan::provider
