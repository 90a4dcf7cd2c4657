// Damage cached program files at random, and write one file from many threads.
//
// A read must return exactly the stored bytes, or nothing. Built with sanitizers, together with
// ops/opencl/program_cache.cc; ORTOLAN_CACHE names an empty folder.
#include "opencl/program_cache.h"

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <thread>
#include <vector>

namespace ortolan::opencl {
namespace {

constexpr int kDamages = 5000;
constexpr int kWriters = 4;
constexpr int kWrites = 200;

void Expect(bool is_true, const char* what, int round) {
  if (is_true) return;
  std::fprintf(stderr, "round %d: %s\n", round, what);
  std::exit(1);
}

std::filesystem::path OnlyFile() {
  const std::filesystem::directory_iterator files(std::filesystem::path(std::getenv("ORTOLAN_CACHE")) / "opencl");
  const std::vector<std::filesystem::directory_entry> found(begin(files), end(files));
  Expect(found.size() == 1, "not one file", -1);
  return found.front().path();
}

void Write(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

// Change, remove, insert or truncate bytes at random.
std::string Damaged(std::string bytes, std::mt19937& random) {
  const auto below = [&](size_t most) { return random() % most; };
  for (size_t changes = 1 + below(3); changes > 0; --changes) {
    const size_t at = below(bytes.size() + 1);
    const size_t count = below(40);
    switch (below(4)) {
      case 0:
        if (at < bytes.size()) bytes[at] = static_cast<char>(bytes[at] ^ (1 << below(8)));
        break;
      case 1:
        bytes.erase(at, count);
        break;
      case 2:
        bytes.insert(at, count, static_cast<char>(below(256)));
        break;
      default:
        bytes.resize(at);
    }
  }
  return bytes;
}

void TestDamages() {
  std::mt19937 random(1);
  const std::string key = "a device\nof a driver\n", contents = std::string(300, '\0') + "a program";
  WriteCached(key, contents);
  const std::filesystem::path path = OnlyFile();
  std::ifstream file(path, std::ios::binary);
  const std::string good{std::istreambuf_iterator<char>(file), {}};
  for (int round = 0; round < kDamages; ++round) {
    const std::string bad = Damaged(good, random);
    if (bad == good) continue;
    Write(path, bad);
    Expect(!ReadCached(key), "a damaged file was taken", round);
  }
  WriteCached(key, contents);
  Expect(ReadCached(key) == contents, "not what was stored", kDamages);
  Write(path, good);
  Expect(!ReadCached("another device"), "the program of another key", kDamages);
}

// Each thread writes contents of a different length, and reads contents that any thread may have written.
void TestWriters() {
  const std::string key = "a device\nof a driver\n";
  std::vector<std::thread> writers;
  for (int writer = 0; writer < kWriters; ++writer) {
    writers.emplace_back([writer, &key] {
      const std::string own(100000 + 1000 * static_cast<size_t>(writer), static_cast<char>('a' + writer));
      for (int round = 0; round < kWrites; ++round) {
        WriteCached(key, own);
        const std::optional<std::string> read = ReadCached(key);
        Expect(read && read->find_first_not_of(read->front()) == std::string::npos, "a mixture", round);
        Expect(read->size() == 100000 + 1000 * static_cast<size_t>(read->front() - 'a'), "a part", round);
      }
    });
  }
  for (std::thread& writer : writers) writer.join();
  OnlyFile();
}

}  // namespace
}  // namespace ortolan::opencl

int main() {
  ortolan::opencl::TestDamages();
  ortolan::opencl::TestWriters();
}
