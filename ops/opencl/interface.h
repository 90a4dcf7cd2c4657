// The interface of libortolan_opencl.so, which libortolan_ops.so opens at run time. It is a C interface, so the two
// libraries need not share a C++ standard library.
//
// Weights and x are those of matmul/group_weight.h: 4-bit weights in groups (formats/int4_group.h), and rows of x
// quantized on the CPU. Products have the bits of the CPU's kernels, except that a device without denormals flushes
// such results to zero.
#pragma once

#include <cstdint>

extern "C" {

enum { kOrtolanOpenClVersion = 1, kOrtolanOpenClErrorBytes = 2048 };

// A validated weight. Its data must outlive objects made from it.
struct OrtolanOpenClWeight {
  int64_t k;
  int64_t n;
  int64_t group;
  const uint8_t* weights;
  const uint8_t* scales;
  int64_t scale_bytes;         // 2: float16, 4: float32; for minimums too
  const uint8_t* zero_points;  // or null
  int64_t zero_point_steps;    // 1, or 16 for fractional zero points
  const uint8_t* minimums;     // or null
  int64_t row_bytes;           // of a packed row of x, a multiple of 4
};

struct OrtolanOpenClCall {
  int64_t m;
  // m rows, each packed as its own block (matmul/weights/group.h):
  //
  //     q i8 [padded k], scales f32 [groups], minus_sums i32 [groups], scaled_sums f32 [groups] if weights need them
  const void* x;
  const float* bias;  // [n], or null
  float* y;           // [m][n]
};

// A null-terminated error message.
struct OrtolanOpenClError {
  char text[kOrtolanOpenClErrorBytes];
};

struct OrtolanOpenCl {
  int64_t version;
  // Write one line per device, the used one first, and a null terminator, truncated to `bytes`. Returns the number of
  // devices; if it is 0, the text gives the reason.
  int64_t (*list)(char* text, int64_t bytes);
  // Create a weight on the device. Returns null and the error on failure.
  void* (*open)(const OrtolanOpenClWeight* weight, OrtolanOpenClError* error);
  void (*close)(void* weight);
  // Compute y = x W + bias. Returns 0, or 1 and the error, which leaves y undefined. May be called by several threads.
  int32_t (*multiply)(void* weight, const OrtolanOpenClCall* call, OrtolanOpenClError* error);
};

// The only symbol of the library. Returns null for an unknown version.
const OrtolanOpenCl* OrtolanGetOpenCl(int64_t version);

}  // extern "C"
