// The file of a compiled model: the data of its groups, packed as kernels read it. README.md shows the layout. Free of
// ONNX Runtime.
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

inline constexpr int64_t kContextFormat = 4;
inline constexpr int64_t kContextLine = 64;

class ContextWriter {
 public:
  // What follows belongs to it.
  void BeginGroup(const std::string& name);
  void Int(int64_t number);
  void Flag(bool flag) { Int(flag ? 1 : 0); }
  void Float(float number);
  void String(const std::string& text);
  // They must be there until the file is written.
  template <typename T>
  void Array(std::span<const T> values) {
    Section({reinterpret_cast<const uint8_t*>(values.data()), values.size_bytes()});
  }

  // Says which groups these are: files of other ones have another id.
  uint64_t Id() const;
  // Under another name first, so that there is no half of a file. Throws OpError.
  void Save(const std::string& path) const;
  std::vector<uint8_t> Bytes() const;
  // Of the file.
  int64_t Size() const;

 private:
  struct Group {
    std::string name;
    std::vector<uint8_t> record;
  };
  void Section(std::span<const uint8_t> bytes);
  // Calls put(bytes) for all pieces of the file, in order.
  template <typename Put>
  void ForEachPiece(const Put& put) const;
  std::vector<uint8_t> Records() const;

  std::vector<Group> groups_;
  std::vector<std::span<const uint8_t>> sections_;
  int64_t section_bytes_ = 0;
  uint64_t sections_hash_ = 0;
};

// Of one group, in the order in which it was written. All functions throw OpError where the file says nothing sensible.
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
  // A record in it, which has its size in front.
  ContextReader Part() { return {Take(Int()), sections_}; }
  // The record ends here.
  void End() const;

 private:
  std::span<const uint8_t> Take(int64_t count);
  std::span<const uint8_t> Section(int64_t item_bytes);

  std::span<const uint8_t> record_, sections_;
};

// A tensor of a record.
struct FloatTensor {
  std::vector<int64_t> shape;
  std::span<const float> values;
};

void WriteTensor(ContextWriter& writer, const FloatTensor& tensor);
// Of at least one number. Throws OpError; `what` is said of it in errors.
FloatTensor ReadTensor(ContextReader& reader, const char* what);

class ContextFile {
 public:
  // Throws OpError, whose text names the file.
  static std::shared_ptr<const ContextFile> Map(const std::string& path);
  // Of a model that holds it; `what` is said of it in errors.
  static std::shared_ptr<const ContextFile> Take(std::span<const uint8_t> bytes, const std::string& what);
  virtual ~ContextFile() = default;

  uint64_t id() const { return id_; }
  // Throws OpError if there is no group of this name.
  ContextReader Group(const std::string& name) const;
  // "'model_ctx_ortolan.bin', written by Ortolan 1.0.0"
  const std::string& Described() const { return described_; }

 protected:
  // They stay where they are.
  ContextFile(std::span<const uint8_t> bytes, const std::string& what);

 private:
  void ReadHeader(std::span<const uint8_t> bytes, const std::string& what);

  uint64_t id_ = 0;
  std::string described_;
  std::span<const uint8_t> records_, sections_;
};

}  // namespace ortolan::provider
