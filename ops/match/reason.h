// Why a pattern rule stops: a code and its operands, from which one text is made. Each text stands once, in reason.inc.
#pragma once

#include <exception>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace ortolan::match {

enum class ReasonCode {
#define ORTOLAN_REASON(code, text) code,
#include "match/reason.inc"
#undef ORTOLAN_REASON
};

struct Reason {
  ReasonCode code{};
  std::vector<std::string> operands;

  // Return the text of the code with its placeholders {} replaced by the operands in order.
  std::string Text() const;
  bool operator==(const Reason&) const = default;
};

namespace internal {
inline std::string OperandText(std::string text) { return text; }
inline std::string OperandText(const char* text) { return text; }
// Numbers are written in their shortest form, so that 0.5 is not 0.500000.
std::string OperandText(double number);
template <typename Integer>
  requires std::is_integral_v<Integer>
std::string OperandText(Integer number) {
  return std::to_string(number);
}
}  // namespace internal

// A rule does not fit a node. Rules throw it, searches catch it and record the reason.
class RefusedError : public std::exception {
 public:
  explicit RefusedError(Reason reason) : reason_(std::move(reason)), text_(reason_.Text()) {}
  const Reason& reason() const { return reason_; }
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  Reason reason_;
  std::string text_;
};

template <typename... Operands>
[[noreturn]] void Refuse(ReasonCode code, Operands&&... operands) {
  throw RefusedError({code, {internal::OperandText(std::forward<Operands>(operands))...}});
}

// Operands are evaluated even if `holds` is true: do not dereference null in them.
template <typename... Operands>
void Expect(bool holds, ReasonCode code, Operands&&... operands) {
  if (!holds) Refuse(code, std::forward<Operands>(operands)...);
}

}  // namespace ortolan::match
