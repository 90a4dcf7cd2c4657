// Reads and writes the file of a compiled model. It has the data of all groups, with weights packed as kernels read
// them. README.md shows the layout. This code does not depend on ONNX Runtime.
//
// A file is untrusted: a reader checks each size and offset before it reads. Results point into the file's memory.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "host/op_error.h"

namespace ortolan::provider {

inline constexpr int64_t kContextFormat = 8;
inline constexpr int64_t kContextLine = 64;

class ContextWriter {
 public:
  // All following calls add to this group.
  void BeginGroup(const std::string& name);
  void Int(int64_t number);
  void Flag(bool flag) { Int(flag ? 1 : 0); }
  void Float(float number);
  void String(const std::string& text);
  // The values must stay valid until the file is written.
  template <typename T>
  void Array(std::span<const T> values) {
    Section({reinterpret_cast<const uint8_t*>(values.data()), values.size_bytes()});
  }

  // Return a hash of all groups, which tells the files of different models apart.
  uint64_t Id() const;
  // Write to a temporary name, then rename, so that a partial file is never visible. Throws OpError.
  void Save(const std::string& path) const;
  std::vector<uint8_t> Bytes() const;
  // Return the size of the file in bytes.
  int64_t Size() const;

 private:
  struct Group {
    std::string name;
    std::vector<uint8_t> record;
  };
  void Section(std::span<const uint8_t> bytes);
  // Call put(bytes) for each piece of the file, from the beginning to the end.
  template <typename Put>
  void ForEachPiece(const Put& put) const;
  std::vector<uint8_t> Records() const;

  std::vector<Group> groups_;
  std::vector<std::span<const uint8_t>> sections_;
  int64_t section_bytes_ = 0;
  uint64_t sections_hash_ = 0;
};

// Reads the record of one group, field by field in the order of writing. All functions throw OpError if the data is
// invalid.
class ContextReader {
 public:
  ContextReader(std::span<const uint8_t> record, std::span<const uint8_t> sections)
      : record_(record), sections_(sections) {}

  int64_t Int();
  bool Flag();
  float Float();
  std::string String();
  template <typename T>
  std::span<const T> Array() {
    const std::span<const uint8_t> bytes = Section(sizeof(T));
    return {reinterpret_cast<const T*>(bytes.data()), bytes.size() / sizeof(T)};
  }
  // Return a reader for a nested record, which is preceded by its size.
  ContextReader Part() { return {Take(Int()), sections_}; }
  // Throws OpError if the record has bytes left.
  void End() const;

 private:
  std::span<const uint8_t> Take(int64_t count);
  std::span<const uint8_t> Section(int64_t item_bytes);

  std::span<const uint8_t> record_, sections_;
};

// A tensor stored in a record.
struct FloatTensor {
  std::vector<int64_t> shape;
  std::span<const float> values;
};

void WriteTensor(ContextWriter& writer, const FloatTensor& tensor);
// Read a tensor with at least one element. Throws OpError, whose text begins with `what`.
FloatTensor ReadTensor(ContextReader& reader, const char* what);

class ContextFile {
 public:
  // Map a file into memory. Throws OpError, whose text names the file.
  static std::shared_ptr<const ContextFile> Map(const std::string& path);
  // Use the bytes of a file that a model embeds. `what` names the file in errors.
  static std::shared_ptr<const ContextFile> Take(std::span<const uint8_t> bytes, const std::string& what);
  virtual ~ContextFile() = default;

  uint64_t id() const { return id_; }
  // Throws OpError if there is no group of this name.
  ContextReader Group(const std::string& name) const;
  // Return a text such as "'model_ctx_ortolan.bin', written by Ortolan 1.0.0".
  const std::string& Described() const { return described_; }

 protected:
  // The bytes must stay valid at the same address.
  ContextFile(std::span<const uint8_t> bytes, const std::string& what);

 private:
  void ReadHeader(std::span<const uint8_t> bytes, const std::string& what);

  uint64_t id_ = 0;
  std::string described_;
  std::span<const uint8_t> records_, sections_;
};

}  // namespace ortolan::provider
