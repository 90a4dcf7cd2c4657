// Windows over the rows of X: the rows of the matrix product that computes a 1-D convolution.
//
// X is [sequences, frames, channels]. Window i of a sequence holds `size` frames, from i * stride - pads_begin on. They
// are contiguous in X, and neighbouring windows overlap. So kernels pack windows from X itself, with a row stride of
// stride * channels. Blocks of rows that contain padding, or windows of two sequences, are copied first.
#pragma once

#include <algorithm>
#include <cstdint>

namespace ortolan {

struct Windows {
  int64_t size = 1;
  int64_t stride = 1;
  int64_t pads_begin = 0;  // frames of zeros
  int64_t pads_end = 0;

  // Limit of each member: no sum or product with the frames of a tensor overflows.
  static constexpr int64_t kMost = int64_t{1} << 20;

  // True if the windows are the rows of X.
  bool AreRows() const { return size == 1 && stride == 1 && pads_begin == 0 && pads_end == 0; }

  // Return the number of windows in a sequence, at least 1; 0 if the sequence is too short for one.
  int64_t Count(int64_t frames) const {
    const int64_t rest = frames + pads_begin + pads_end - size;
    return rest < 0 ? 0 : rest / stride + 1;
  }

  // Return the first frame of window i.
  int64_t Begin(int64_t i) const { return i * stride - pads_begin; }

  // Return whether rows first … last of the product are equally spaced in X, without padding. count: Count(frames).
  bool AreInside(int64_t first, int64_t last, int64_t count, int64_t frames) const {
    return first / count == last / count && Begin(first % count) >= 0 && Begin(last % count) + size <= frames;
  }

  // Return the address of row i of the product, which must be inside of its sequence.
  const float* Row(const float* x, int64_t i, int64_t count, int64_t frames, int64_t channels) const {
    return x + (i / count * frames + Begin(i % count)) * channels;
  }

  // Copy row i of the product, with zeros for the frames outside of its sequence.
  void CopyRow(const float* x, int64_t i, int64_t count, int64_t frames, int64_t channels, float* row) const {
    const int64_t begin = Begin(i % count);
    const int64_t first = std::clamp<int64_t>(-begin, 0, size), end = std::clamp<int64_t>(frames - begin, first, size);
    std::fill_n(row, first * channels, 0.0f);
    const float* const from = x + (i / count * frames + begin + first) * channels;
    std::copy_n(from, (end - first) * channels, row + first * channels);
    std::fill_n(row + end * channels, (size - end) * channels, 0.0f);
  }
};

}  // namespace ortolan
