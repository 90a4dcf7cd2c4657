#include "provider/claims_log.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "match/attention.h"

namespace ortolan::provider {
namespace {

// Return the text as a JSON string. Bytes that are not valid UTF-8 are kept.
std::string Quoted(const std::string& text) {
  std::string quoted = "\"";
  for (const char letter : text) {
    if (static_cast<unsigned char>(letter) < 0x20) {
      char escape[7];
      std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned>(letter));
      quoted += escape;
      continue;
    }
    if (letter == '"' || letter == '\\') quoted += '\\';
    quoted += letter;
  }
  return quoted + '"';
}

}  // namespace

ClaimsLog::ClaimsLog(const HostApi& host, const OrtLogger* logger, std::string file)
    : host_(host), logger_(logger), file_(std::move(file)) {
  if (!file_.empty()) Append("");
}

void ClaimsLog::Takes(const Node& node, const std::string& what) const {
  Log(ORT_LOGGING_LEVEL_INFO, ErrorText("Ortolan takes ", node.Described(), ": ", what));
  Write(node, true, what, "");
}

void ClaimsLog::Leaves(const Node& node, const std::string& reason) const {
  Log(ORT_LOGGING_LEVEL_INFO, ErrorText("Ortolan leaves ", node.Described(), ": ", reason));
  Write(node, false, "", reason);
}

void ClaimsLog::Finds(const Graph& graph) const {
  if (file_.empty()) return;
  for (const std::string& text : match::AttentionTexts(match::Dimensions(graph))) {
    Append(ErrorText("{\"attention\": ", Quoted(text), "}\n"));
  }
}

void ClaimsLog::Log(OrtLoggingLevel level, const std::string& text) const {
  Check(*host_.ort, host_.ort->Logger_LogMessage(logger_, level, text.c_str(), ORT_FILE, __LINE__, "Ortolan"));
}

void ClaimsLog::Write(const Node& node, bool taken, const std::string& what, const std::string& reason) const {
  if (file_.empty()) return;
  Append(ErrorText("{\"node\": ", Quoted(node.name()), ", \"op\": ", Quoted(node.type()), ", \"taken\": ",
                   taken ? "true" : "false", ", \"what\": ", Quoted(what), ", \"reason\": ", Quoted(reason), "}\n"));
}

// The file is opened for each write, so that it is complete even if the process ends without closing the session.
void ClaimsLog::Append(const std::string& text) const {
  std::FILE* const file = std::fopen(file_.c_str(), "a");
  bool written = file != nullptr && std::fwrite(text.data(), 1, text.size(), file) == text.size();
  int problem = errno;
  if (file != nullptr && std::fclose(file) != 0) {
    if (written) problem = errno;
    written = false;
  }
  if (written) return;
  throw OpError(ErrorText("Ortolan's provider option ", kClaimsFile, " is '", file_, "', which cannot be written: ",
                          std::strerror(problem), ". Name a file in an existing folder."));
}

}  // namespace ortolan::provider
