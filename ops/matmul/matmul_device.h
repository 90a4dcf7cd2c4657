// The interface of a device other than the CPU that multiplies with a weight.
#pragma once

#include <cstdint>

namespace ortolan {

// A whole product P = X W + bias. The result has the bits of the CPU's kernels, except that a device may round results
// below 2^-126 to zero.
struct DeviceCall {
  int64_t m = 0;
  const void* x = nullptr;      // m rows, each packed as its own block by the weight's kernel for one row
  const float* bias = nullptr;  // [w->n], or null
  float* product = nullptr;     // [m][w->n]
};

class MatMulDevice {
 public:
  virtual ~MatMulDevice() = default;
  // Return whether the device should compute the next call of m rows. All functions may be called by several threads.
  virtual bool Takes(int64_t m) = 0;
  // Compute the product. Returns false if that failed; product is then undefined.
  virtual bool Multiply(const DeviceCall& call) = 0;
  // Report the duration of a whole call of m rows.
  virtual void Took(int64_t m, bool on_device, double seconds) = 0;
};

}  // namespace ortolan
