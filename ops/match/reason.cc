#include "match/reason.h"

#include <charconv>
#include <cmath>

namespace ortolan::match {
namespace {

constexpr const char* kTexts[] = {
#define ORTOLAN_REASON(code, text) text,
#include "match/reason.inc"
#undef ORTOLAN_REASON
};

}  // namespace

std::string internal::OperandText(double number) {
  if (std::isinf(number)) return number < 0 ? "-inf" : "inf";
  char text[32];
  const auto end = std::to_chars(text, text + sizeof(text), number);
  return {text, end.ptr};
}

std::string Reason::Text() const {
  const std::string text = kTexts[static_cast<size_t>(code)];
  std::string made;
  size_t operand = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text.compare(i, 2, "{}") == 0 && operand < operands.size()) {
      made += operands[operand++];
      ++i;
    } else {
      made += text[i];
    }
  }
  return made;
}

}  // namespace ortolan::match
