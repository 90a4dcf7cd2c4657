// Arithmetic with symbolic dimensions, such as past + new tokens or batch x heads.
//
// A dimension is a sum: number + sum(times * symbol), with times > 0 and number >= 0. Equal sums are equal dimensions.
// Symbols are numbers of a Symbols table: a name that the model gives to a dimension of an input, or an unknown
// dimension, which equals only itself.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace ortolan::match {

struct ValueInfo;

class Dim {
 public:
  Dim(int64_t number = 0) : number_(number) {}  // NOLINT: an integer is a dimension
  static Dim OfSymbol(uint32_t symbol) { return Dim(0, {{symbol, 1}}); }
  // Terms must be sorted by symbol, with times > 0.
  Dim(int64_t number, std::vector<std::pair<uint32_t, int64_t>> terms) : number_(number), terms_(std::move(terms)) {}

  bool IsNumber() const { return terms_.empty(); }
  // Return the integer, or nullopt for a symbolic dimension.
  std::optional<int64_t> Number() const { return IsNumber() ? std::optional(number_) : std::nullopt; }
  bool Is(int64_t number) const { return IsNumber() && number_ == number; }
  int64_t number() const { return number_; }
  const std::vector<std::pair<uint32_t, int64_t>>& terms() const { return terms_; }
  // Return the symbol of a dimension that is exactly one symbol.
  std::optional<uint32_t> Symbol() const;
  // Return the greatest common divisor of the number and all factors; the dimension is this times Over(it).
  int64_t Times() const;
  bool operator==(const Dim&) const = default;
  auto operator<=>(const Dim&) const = default;

 private:
  int64_t number_ = 0;
  std::vector<std::pair<uint32_t, int64_t>> terms_;
};

using DimShape = std::vector<Dim>;

// All results are nullopt on overflow of int64.
std::optional<Dim> Plus(const Dim& a, const Dim& b);
// Return nullopt if a term of b is not in a, or the difference may be negative; two numbers may have any difference.
std::optional<Dim> Minus(const Dim& a, const Dim& b);
// Return nullopt unless one of them is a positive integer; two numbers may have any product.
std::optional<Dim> Product(const Dim& a, const Dim& b);
// Return a / b if b is a positive integer and the division is always exact.
std::optional<Dim> Quotient(const Dim& a, int64_t b);
// Return the dimension d for which product(by) * d = product(dims), or nullopt.
std::optional<Dim> Quotient(std::span<const Dim> dims, std::span<const Dim> by);

// The symbols of one Dimensions object.
class Symbols {
 public:
  // Return the dimension with an exporter's name: `a`, `16`, or a sum such as `a + b`; nullopt for an empty name.
  std::optional<Dim> Named(const std::string& name);
  // Return the unknown dimension of an axis of a value, always the same one for the same axis.
  Dim Unknown(const ValueInfo* value, size_t axis);

  struct Symbol {
    std::string name;                  // empty for an unknown dimension
    const ValueInfo* value = nullptr;  // of an unknown dimension
    size_t axis = 0;
  };
  const Symbol& operator[](uint32_t symbol) const { return symbols_[symbol]; }
  // Return whether the dimension is exactly one name of the model.
  bool IsName(const Dim& dim) const;
  // Return a text for reasons: an integer, "past + 4 * tokens"; unknown dimensions are "?".
  std::string Text(const Dim& dim) const;
  std::string Text(std::span<const Dim> shape) const;  // "[batch, 12, ?]"

 private:
  std::vector<Symbol> symbols_;
  std::map<std::string, uint32_t> by_name_;
  std::map<std::pair<const ValueInfo*, size_t>, uint32_t> by_axis_;
};

// An element of a small tensor: unknown, an integer or symbolic dimension, a float, or a boolean.
class Element {
 public:
  Element() = default;
  Element(Dim dim) : kind_(Kind::kDim), dim_(std::move(dim)) {}  // NOLINT: a dimension is an element
  static Element Real(double real);
  static Element Bool(bool flag);

  bool IsKnown() const { return kind_ != Kind::kUnknown; }
  const Dim* AsDim() const { return kind_ == Kind::kDim ? &dim_ : nullptr; }
  std::optional<int64_t> AsInt() const { return kind_ == Kind::kDim ? dim_.Number() : std::nullopt; }
  std::optional<bool> AsBool() const { return kind_ == Kind::kBool ? std::optional(flag_) : std::nullopt; }
  // Return an integer or float as a float.
  std::optional<double> AsNumber() const;
  bool IsReal() const { return kind_ == Kind::kReal; }
  bool operator==(const Element&) const = default;

 private:
  enum class Kind { kUnknown, kDim, kReal, kBool };
  Kind kind_ = Kind::kUnknown;
  Dim dim_;
  double real_ = 0;
  bool flag_ = false;
};

using Elements = std::vector<Element>;

}  // namespace ortolan::match
