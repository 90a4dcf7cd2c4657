// Another device than the CPU that multiplies with a weight, as a linear plan sees it.
#pragma once

#include <cstdint>

namespace ortolan {

// All of P = X W + bias. The numbers are those of the CPU's kernels, so whoever computes a call, its bits are
// the same, but for results below 2^-126, which a device may round to zero.
struct DeviceCall {
  int64_t m = 0;
  const void* x = nullptr;      // m rows, each packed as a block of its own by the weight's kernel for one row
  const float* bias = nullptr;  // [w->n], or null
  float* product = nullptr;     // [m][w->n]
};

class MatMulDevice {
 public:
  virtual ~MatMulDevice() = default;
  // Whether the next call of m rows is for the device. Calls may come at the same time, here and below.
  virtual bool Takes(int64_t m) = 0;
  // Computes the product; false where it cannot, and then product holds anything.
  virtual bool Multiply(const DeviceCall& call) = 0;
  // What a whole call of m rows took on one of the sides.
  virtual void Took(int64_t m, bool on_device, double seconds) = 0;
};

}  // namespace ortolan
