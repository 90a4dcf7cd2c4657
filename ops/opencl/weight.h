// A weight on the device, and products with it.
#pragma once

#include <cstdint>
#include <string>

#include "opencl/device.h"
#include "opencl/interface.h"

namespace ortolan::opencl {

// A host tensor as kernels see it: it starts at byte `at` of the memory object.
struct DeviceTensor {
  Memory memory = nullptr;
  uint64_t at = 0;
};

class Weight {
 public:
  // Throws ClError.
  Weight(Device& device, const OrtolanOpenClWeight& weight);
  ~Weight();
  Weight(const Weight&) = delete;
  Weight& operator=(const Weight&) = delete;

  // Throws ClError, which leaves y undefined.
  void Multiply(const OrtolanOpenClCall& call);

 private:
  void Open();
  void Close();
  DeviceTensor Share(const uint8_t* data, int64_t bytes);
  void SetConstants(Kernel kernel) const;
  void MultiplyRows(const OrtolanOpenClCall& call);

  int64_t Panels() const;
  int64_t Groups() const;
  int64_t Pairs() const;
  std::string Options() const;

  Device& device_;
  OrtolanOpenClWeight of_;
  DeviceTensor weights_, scales_, offsets_;
  Kernel few_rows_ = nullptr;
  Kernel many_rows_ = nullptr;
};

}  // namespace ortolan::opencl
