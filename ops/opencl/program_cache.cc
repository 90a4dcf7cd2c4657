#include "opencl/program_cache.h"

#include <unistd.h>

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace ortolan::opencl {
namespace {

// 64-bit FNV-1a: detects damage, but is no protection against someone who can write the user's files.
uint64_t Hash(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char letter : text) hash = (hash ^ static_cast<unsigned char>(letter)) * 0x100000001b3;
  return hash;
}

std::string Hex(uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof(text), "%016" PRIx64, value);
  return text;
}

// Return an empty path if the user has no such folder.
std::filesystem::path Folder() {
  const auto set = [](const char* name) {
    const char* const value = std::getenv(name);
    return std::filesystem::path(value == nullptr ? "" : value);
  };
  if (const auto chosen = set("ORTOLAN_CACHE"); !chosen.empty()) return chosen / "opencl";
  if (const auto cache = set("XDG_CACHE_HOME"); !cache.empty()) return cache / "ortolan" / "opencl";
  if (const auto home = set("HOME"); !home.empty()) return home / ".cache" / "ortolan" / "opencl";
  return {};
}

// A file consists of the hash of all that follows, the length of the key, the key and the contents.
std::string Head(const std::string& key) { return std::to_string(key.size()) + "\n" + key; }

}  // namespace

std::optional<std::string> ReadCached(const std::string& key) {
  const std::filesystem::path folder = Folder();
  if (folder.empty()) return std::nullopt;
  std::ifstream file(folder / (Hex(Hash(key)) + ".bin"), std::ios::binary);
  if (!file) return std::nullopt;
  std::ostringstream read;
  read << file.rdbuf();
  const std::string all = read.str();
  const std::string head = Head(key);
  if (all.size() <= 16 + head.size()) return std::nullopt;
  const std::string body = all.substr(16);
  if (all.compare(0, 16, Hex(Hash(body))) != 0 || body.compare(0, head.size(), head) != 0) return std::nullopt;
  return body.substr(head.size());
}

void WriteCached(const std::string& key, const std::string& contents) {
  const std::filesystem::path folder = Folder();
  std::error_code error;
  if (folder.empty() || (std::filesystem::create_directories(folder, error), error)) return;
  const std::filesystem::path path = folder / (Hex(Hash(key)) + ".bin");
  std::string part = path.string() + ".XXXXXX";
  const int made = mkstemp(part.data());  // a unique name across processes and threads
  if (made < 0) return;
  close(made);
  const std::string body = Head(key) + contents;
  std::ofstream file(part, std::ios::binary | std::ios::trunc);
  file << Hex(Hash(body)) << body;
  file.close();
  if (file) std::filesystem::rename(part, path, error);
  if (!file || error) std::filesystem::remove(part, error);
}

}  // namespace ortolan::opencl
