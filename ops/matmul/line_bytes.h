// Memory for packed weights.
#pragma once

#include <cstdint>
#include <memory>
#include <new>

namespace ortolan {

// Memory aligned to a cache line.
class LineBytes {
 public:
  LineBytes() = default;
  explicit LineBytes(int64_t bytes)
      : bytes_(bytes), data_(static_cast<uint8_t*>(::operator new(static_cast<size_t>(bytes), kLine))) {}
  uint8_t* data() const { return data_.get(); }
  int64_t size() const { return bytes_; }

 private:
  static constexpr std::align_val_t kLine{64};
  struct Free {
    void operator()(uint8_t* data) const { ::operator delete(data, kLine); }
  };
  int64_t bytes_ = 0;
  std::unique_ptr<uint8_t, Free> data_;
};

}  // namespace ortolan
