#include "match/dim.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <numeric>

namespace ortolan::match {
namespace {

constexpr size_t kMostTerms = 64;  // limit for the terms of a sum in an untrusted model

using Terms = std::vector<std::pair<uint32_t, int64_t>>;

std::optional<int64_t> Multiply(int64_t a, int64_t b) {
  int64_t product;
  return __builtin_mul_overflow(a, b, &product) ? std::nullopt : std::optional(product);
}

// Return a + sign * b, or nullopt if a factor of a symbol would be negative, or the number next to a symbol.
std::optional<Dim> Combine(const Dim& a, const Dim& b, int64_t sign) {
  Terms terms;
  auto own = a.terms().begin(), other = b.terms().begin();
  while (own != a.terms().end() || other != b.terms().end()) {
    const bool first = other == b.terms().end() || (own != a.terms().end() && own->first <= other->first);
    const bool second = own == a.terms().end() || (other != b.terms().end() && other->first <= own->first);
    const uint32_t symbol = first ? own->first : other->first;
    int64_t times = first ? own++->second : 0;
    if (second && __builtin_add_overflow(times, sign * other++->second, &times)) return std::nullopt;
    if (times < 0) return std::nullopt;
    if (times > 0) terms.emplace_back(symbol, times);
  }
  int64_t number;
  const bool overflow = sign > 0 ? __builtin_add_overflow(a.number(), b.number(), &number)
                                 : __builtin_sub_overflow(a.number(), b.number(), &number);
  if (overflow || terms.size() > kMostTerms || (number < 0 && !terms.empty())) return std::nullopt;
  return Dim(number, std::move(terms));
}

// A product of dimensions: an integer times dimensions whose factors have no common divisor.
struct Factors {
  int64_t number = 1;
  std::vector<Dim> symbols;
};

std::optional<Factors> FactorsOf(std::span<const Dim> dims) {
  Factors factors;
  for (const Dim& dim : dims) {
    const int64_t times = dim.IsNumber() ? dim.number() : dim.Times();
    const auto number = Multiply(factors.number, times);
    if (!number || times < 0) return std::nullopt;
    factors.number = *number;
    if (!dim.IsNumber()) factors.symbols.push_back(*Quotient(dim, times));
  }
  return factors;
}

}  // namespace

std::optional<uint32_t> Dim::Symbol() const {
  return number_ == 0 && terms_.size() == 1 && terms_[0].second == 1 ? std::optional(terms_[0].first) : std::nullopt;
}

int64_t Dim::Times() const {
  if (number_ == INT64_MIN) return 1;  // its absolute value overflows
  int64_t divisor = std::abs(number_);
  for (const auto& [symbol, times] : terms_) divisor = std::gcd(divisor, times);
  return divisor;
}

std::optional<Dim> Plus(const Dim& a, const Dim& b) { return Combine(a, b, 1); }

std::optional<Dim> Minus(const Dim& a, const Dim& b) { return Combine(a, b, -1); }

std::optional<Dim> Product(const Dim& a, const Dim& b) {
  if (!a.IsNumber() && b.IsNumber()) return Product(b, a);
  if (!a.IsNumber() || (!b.IsNumber() && a.number() < 1)) return std::nullopt;
  const auto number = Multiply(a.number(), b.number());
  if (!number) return std::nullopt;
  Terms terms = b.terms();
  for (auto& [symbol, times] : terms) {
    const auto product = Multiply(times, a.number());
    if (!product) return std::nullopt;
    times = *product;
  }
  return Dim(*number, std::move(terms));
}

std::optional<Dim> Quotient(const Dim& a, int64_t b) {
  if (b < 1 || a.number() % b != 0) return std::nullopt;
  Terms terms = a.terms();
  for (auto& [symbol, times] : terms) {
    if (times % b != 0) return std::nullopt;
    times /= b;
  }
  return Dim(a.number() / b, std::move(terms));
}

std::optional<Dim> Quotient(std::span<const Dim> dims, std::span<const Dim> by) {
  auto all = FactorsOf(dims), divisor = FactorsOf(by);
  if (!all || !divisor || divisor->number == 0 || all->number % divisor->number != 0) return std::nullopt;
  for (const Dim& symbol : divisor->symbols) {
    const auto same = std::ranges::find(all->symbols, symbol);
    if (same == all->symbols.end()) return std::nullopt;
    all->symbols.erase(same);
  }
  const int64_t number = all->number / divisor->number;
  if (all->symbols.size() > 1) return std::nullopt;
  return all->symbols.empty() ? Dim(number) : Product(number, all->symbols[0]);
}

std::optional<Dim> Symbols::Named(const std::string& name) {
  if (name.empty()) return std::nullopt;
  // Parts of a sum are words; another name is one symbol.
  std::vector<std::string> parts(1);
  for (const char c : name) c == '+' ? parts.emplace_back() : parts.back() += c;
  bool is_sum = parts.size() > 1;
  for (std::string& part : parts) {
    const size_t begin = part.find_first_not_of(" \t"), end = part.find_last_not_of(" \t");
    part = begin == std::string::npos ? "" : part.substr(begin, end - begin + 1);
    is_sum = is_sum && !part.empty() && std::ranges::all_of(part, [](unsigned char c) {
               return c >= 0x80 || std::isalnum(c) || c == '_';  // bytes above 0x7f: letters in UTF-8
             });
  }
  if (!is_sum) parts = {name};
  std::optional<Dim> sum = 0;
  for (const std::string& part : parts) {
    int64_t number = 0;
    const bool digits = part.size() <= 18 && (is_sum || part.front() != '0') &&
                        std::ranges::all_of(part, [](char c) { return '0' <= c && c <= '9'; });
    if (digits) std::from_chars(part.data(), part.data() + part.size(), number);
    const auto [found, is_new] =
        digits ? std::pair(by_name_.end(), false) : by_name_.try_emplace(part, static_cast<uint32_t>(symbols_.size()));
    if (is_new) symbols_.push_back({part});
    if (sum) sum = Plus(*sum, digits ? Dim(number) : Dim::OfSymbol(found->second));
  }
  return sum;
}

Dim Symbols::Unknown(const ValueInfo* value, size_t axis) {
  const auto [found, is_new] = by_axis_.try_emplace({value, axis}, static_cast<uint32_t>(symbols_.size()));
  if (is_new) symbols_.push_back({"", value, axis});
  return Dim::OfSymbol(found->second);
}

bool Symbols::IsName(const Dim& dim) const {
  const auto symbol = dim.Symbol();
  return symbol && !symbols_[*symbol].name.empty();
}

std::string Symbols::Text(const Dim& dim) const {
  std::string text;
  for (const auto& [symbol, times] : dim.terms()) {
    if (!text.empty()) text += " + ";
    if (times != 1) text += std::to_string(times) + " * ";
    text += symbols_[symbol].name.empty() ? "?" : symbols_[symbol].name;
  }
  if (dim.IsNumber()) return std::to_string(dim.number());
  return dim.number() == 0 ? text : text + " + " + std::to_string(dim.number());
}

std::string Symbols::Text(std::span<const Dim> shape) const {
  std::string text;
  for (const Dim& dim : shape) text += (text.empty() ? "" : ", ") + Text(dim);
  return "[" + text + "]";
}

Element Element::Real(double real) {
  Element element;
  element.kind_ = Kind::kReal;
  element.real_ = real;
  return element;
}

Element Element::Bool(bool flag) {
  Element element;
  element.kind_ = Kind::kBool;
  element.flag_ = flag;
  return element;
}

std::optional<double> Element::AsNumber() const {
  if (IsReal()) return real_;
  const auto integer = AsInt();
  return integer ? std::optional(static_cast<double>(*integer)) : std::nullopt;
}

}  // namespace ortolan::match
