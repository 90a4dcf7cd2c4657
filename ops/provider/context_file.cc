#include "provider/context_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <system_error>
#include <utility>

#include "matmul/line_bytes.h"

namespace ortolan::provider {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr char kMagic[8] = {'O', 'R', 'T', 'O', 'L', 'A', 'N', '\n'};

struct Header {
  char magic[8];
  int64_t format;
  int64_t file_bytes;
  int64_t record_bytes;
  uint64_t id;
  char made_by[24];  // version of Ortolan that wrote the file, zero-padded
};
static_assert(sizeof(Header) == kContextLine);

int64_t Padded(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }

int64_t SizeOf(std::span<const uint8_t> bytes) { return static_cast<int64_t>(bytes.size()); }

void Append(std::vector<uint8_t>& bytes, const void* data, size_t size) {
  const size_t end = bytes.size();
  bytes.resize(end + size);
  if (size != 0) std::memcpy(bytes.data() + end, data, size);
}

void AppendInt(std::vector<uint8_t>& bytes, int64_t number) { Append(bytes, &number, sizeof(number)); }

void AppendText(std::vector<uint8_t>& bytes, const std::string& text) {
  AppendInt(bytes, static_cast<int64_t>(text.size()));
  Append(bytes, text.data(), text.size());
  bytes.resize(static_cast<size_t>(Padded(SizeOf(bytes), 8)));
}

// FNV-1a over 8-byte words: tells files apart, but does not protect against manipulation.
uint64_t Mixed(uint64_t hash, std::span<const uint8_t> bytes) {
  constexpr uint64_t kPrime = 1099511628211u;
  for (size_t i = 0; i < bytes.size(); i += 8) {
    uint64_t word = 0;
    std::memcpy(&word, bytes.data() + i, std::min<size_t>(8, bytes.size() - i));
    hash = (hash ^ word) * kPrime;
    hash ^= hash >> 32;
  }
  return hash;
}

std::string Why(int error) { return std::generic_category().message(error); }

[[noreturn]] void FailToWrite(const std::string& path, int error) {
  throw OpError(ErrorText("'", path, "' cannot be written: ", Why(error),
                          ". Set ep.context_file_path to a path in a writable folder"));
}

class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor() {
    if (number_ >= 0) close(number_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return number_; }
  // Returns whether close succeeded.
  bool Close() { return close(std::exchange(number_, -1)) == 0; }

 private:
  int number_;
};

void WriteAll(int file, std::span<const uint8_t> bytes, const std::string& path) {
  while (!bytes.empty()) {
    const ssize_t count = write(file, bytes.data(), std::min<size_t>(bytes.size(), size_t{1} << 30));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) FailToWrite(path, errno);
    bytes = bytes.subspan(static_cast<size_t>(count));
  }
}

class MappedFile : public ContextFile {
 public:
  MappedFile(std::span<const uint8_t> bytes, const std::string& path) : ContextFile(bytes, path), bytes_(bytes) {}
  ~MappedFile() override { munmap(const_cast<uint8_t*>(bytes_.data()), bytes_.size()); }

 private:
  std::span<const uint8_t> bytes_;
};

class TakenFile : public ContextFile {
 public:
  TakenFile(LineBytes bytes, const std::string& what)
      : ContextFile({bytes.data(), static_cast<size_t>(bytes.size())}, what), bytes_(std::move(bytes)) {}

 private:
  LineBytes bytes_;
};

}  // namespace

void ContextWriter::BeginGroup(const std::string& name) { groups_.push_back({name, {}}); }

void ContextWriter::Int(int64_t number) { AppendInt(groups_.back().record, number); }

void ContextWriter::Float(float number) { Int(std::bit_cast<int32_t>(number)); }

void ContextWriter::String(const std::string& text) { AppendText(groups_.back().record, text); }

void ContextWriter::Section(std::span<const uint8_t> bytes) {
  Int(section_bytes_);
  Int(SizeOf(bytes));
  sections_.push_back(bytes);
  section_bytes_ += Padded(SizeOf(bytes), kContextLine);
  sections_hash_ = Mixed(sections_hash_, bytes);
}

std::vector<uint8_t> ContextWriter::Records() const {
  std::vector<uint8_t> records;
  AppendInt(records, static_cast<int64_t>(groups_.size()));
  for (const Group& group : groups_) {
    AppendText(records, group.name);
    AppendInt(records, SizeOf(group.record));
    Append(records, group.record.data(), group.record.size());
  }
  return records;
}

uint64_t ContextWriter::Id() const { return Mixed(14695981039346656037u ^ sections_hash_, Records()); }

int64_t ContextWriter::Size() const { return kContextLine + Padded(SizeOf(Records()), kContextLine) + section_bytes_; }

template <typename Put>
void ContextWriter::ForEachPiece(const Put& put) const {
  std::vector<uint8_t> records = Records();
  Header header{};
  std::ranges::copy(kMagic, header.magic);
  header.format = kContextFormat;
  header.record_bytes = SizeOf(records);
  header.id = Id();
  std::snprintf(header.made_by, sizeof(header.made_by), "%s", ORTOLAN_VERSION);
  records.resize(static_cast<size_t>(Padded(SizeOf(records), kContextLine)));
  header.file_bytes = Size();
  put({reinterpret_cast<const uint8_t*>(&header), sizeof(header)});
  put(records);
  static constexpr uint8_t kZeros[kContextLine] = {};
  for (const std::span<const uint8_t> section : sections_) {
    put(section);
    put(std::span(kZeros, static_cast<size_t>(Padded(SizeOf(section), kContextLine) - SizeOf(section))));
  }
}

void ContextWriter::Save(const std::string& path) const {
  static std::atomic<int> count{0};
  const std::string unfinished = ErrorText(path, ".", getpid(), "-", count++, ".tmp");
  Descriptor file(open(unfinished.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (file.get() < 0) FailToWrite(path, errno);
  try {
    ForEachPiece([&](std::span<const uint8_t> piece) { WriteAll(file.get(), piece, path); });
    if (!file.Close() || std::rename(unfinished.c_str(), path.c_str()) != 0) FailToWrite(path, errno);
  } catch (...) {
    unlink(unfinished.c_str());
    throw;
  }
}

std::vector<uint8_t> ContextWriter::Bytes() const {
  std::vector<uint8_t> bytes;
  ForEachPiece([&](std::span<const uint8_t> piece) { Append(bytes, piece.data(), piece.size()); });
  return bytes;
}

std::span<const uint8_t> ContextReader::Take(int64_t count) {
  if (count < 0 || count > SizeOf(record_)) {
    throw OpError(ErrorText("truncated record: ", count, " bytes needed, ", SizeOf(record_), " left"));
  }
  const std::span<const uint8_t> taken = record_.first(static_cast<size_t>(count));
  record_ = record_.subspan(static_cast<size_t>(count));
  return taken;
}

int64_t ContextReader::Int() {
  int64_t number = 0;
  std::memcpy(&number, Take(sizeof(number)).data(), sizeof(number));
  return number;
}

bool ContextReader::Flag() {
  const int64_t number = Int();
  if (number != 0 && number != 1) throw OpError(ErrorText("a flag is ", number, ", expected 0 or 1"));
  return number == 1;
}

float ContextReader::Float() { return std::bit_cast<float>(static_cast<int32_t>(Int())); }

std::string ContextReader::String() {
  const int64_t size = Int();
  const std::span<const uint8_t> bytes = Take(size);
  Take(std::min(SizeOf(record_), Padded(size, 8) - size));
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::span<const uint8_t> ContextReader::Section(int64_t item_bytes) {
  const int64_t first = Int(), size = Int(), most = SizeOf(sections_);
  const bool fits = first >= 0 && first <= most && size >= 0 && size <= most - first;
  if (!fits || first % kContextLine != 0 || size % item_bytes != 0) {
    throw OpError(ErrorText("a section of ", item_bytes, "-byte elements has ", size, " bytes at offset ", first,
                            ", but the file has ", most));
  }
  return sections_.subspan(static_cast<size_t>(first), static_cast<size_t>(size));
}

void ContextReader::End() const {
  if (!record_.empty()) throw OpError(ErrorText("a record has ", record_.size(), " bytes after its end"));
}

void WriteTensor(ContextWriter& writer, const FloatTensor& tensor) {
  writer.Int(static_cast<int64_t>(tensor.shape.size()));
  for (const int64_t size : tensor.shape) writer.Int(size);
  writer.Array(tensor.values);
}

FloatTensor ReadTensor(ContextReader& reader, const char* what) {
  FloatTensor tensor;
  const int64_t axes = reader.Int();
  if (axes < 0) throw OpError(ErrorText("there are ", axes, " axes of ", what));
  int64_t count = 1;
  bool fits = true;
  for (int64_t i = 0; i < axes; ++i) {  // a rank that is too large fails at the end of the record
    tensor.shape.push_back(reader.Int());
    fits = fits && tensor.shape.back() > 0 && !__builtin_mul_overflow(count, tensor.shape.back(), &count);
  }
  tensor.values = reader.Array<float>();
  if (!fits || count != static_cast<int64_t>(tensor.values.size())) {
    throw OpError(ErrorText(what, " of shape ", ShapeText(tensor.shape), " has ", tensor.values.size(), " numbers"));
  }
  return tensor;
}

ContextFile::ContextFile(std::span<const uint8_t> bytes, const std::string& what) {
  try {
    ReadHeader(bytes, what);
  } catch (const OpError& error) {
    throw OpError(ErrorText("'", what, "' cannot be used: ", error.what()));
  }
}

void ContextFile::ReadHeader(std::span<const uint8_t> bytes, const std::string& what) {
  Header header{};
  if (bytes.size() < sizeof(header)) throw OpError(ErrorText("it holds ", bytes.size(), " bytes, fewer than a header"));
  std::memcpy(&header, bytes.data(), sizeof(header));
  if (!std::ranges::equal(kMagic, header.magic)) {
    throw OpError("it does not begin with the header of a compiled model's file");
  }
  // The version comes from an untrusted file and is printed, so replace unusual characters.
  std::string made_by(header.made_by, strnlen(header.made_by, sizeof(header.made_by)));
  std::replace_if(made_by.begin(), made_by.end(), [](char c) { return c < '+' || c > 'z'; }, '?');
  described_ = ErrorText("'", what, "', written by Ortolan ", made_by);
  if (header.format != kContextFormat) {
    throw OpError(ErrorText("it has format ", header.format, " (by Ortolan ", made_by, "), expected ", kContextFormat,
                            " (Ortolan ", ORTOLAN_VERSION, ")"));
  }
  if (header.file_bytes != SizeOf(bytes)) {
    throw OpError(ErrorText("it holds ", bytes.size(), " bytes, expected ", header.file_bytes));
  }
  bytes = bytes.subspan(sizeof(header));
  const int64_t record_bytes = header.record_bytes;
  if (record_bytes < 0 || record_bytes > SizeOf(bytes) || Padded(record_bytes, kContextLine) > SizeOf(bytes)) {
    throw OpError(ErrorText("its records take ", record_bytes, " of ", bytes.size(), " bytes"));
  }
  id_ = header.id;
  records_ = bytes.first(static_cast<size_t>(record_bytes));
  sections_ = bytes.subspan(static_cast<size_t>(Padded(record_bytes, kContextLine)));
}

ContextReader ContextFile::Group(const std::string& name) const {
  ContextReader all(records_, sections_);
  const int64_t count = all.Int();
  for (int64_t i = 0; i < count; ++i) {
    const std::string found = all.String();
    const ContextReader record = all.Part();
    if (found == name) return record;
  }
  throw OpError(ErrorText("it holds ", count, " groups, but not '", name, "'"));
}

std::shared_ptr<const ContextFile> ContextFile::Map(const std::string& path) {
  const auto fail = [&](const std::string& reason) {
    throw OpError(ErrorText("'", path, "' cannot be read: ", reason));
  };
  // O_NONBLOCK: opening a FIFO would otherwise block.
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.get() < 0) fail(Why(errno));
  struct stat status{};
  if (fstat(file.get(), &status) != 0) fail(Why(errno));
  if (!S_ISREG(status.st_mode)) fail("it is no file");
  if (status.st_size == 0) fail("it is empty");
  const size_t size = static_cast<size_t>(status.st_size);
  void* const data = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (data == MAP_FAILED) fail(Why(errno));
  try {
    return std::make_shared<const MappedFile>(std::span(static_cast<const uint8_t*>(data), size), path);
  } catch (...) {
    munmap(data, size);
    throw;
  }
}

std::shared_ptr<const ContextFile> ContextFile::Take(std::span<const uint8_t> bytes, const std::string& what) {
  LineBytes own(SizeOf(bytes));
  std::ranges::copy(bytes, own.data());
  return std::make_shared<const TakenFile>(std::move(own), what);
}

}  // namespace ortolan::provider
