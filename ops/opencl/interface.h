// What libortolan_opencl.so offers to libortolan_ops.so, which opens it at run time: a C interface, so that neither
// needs the other's standard library.
//
// Weights and x are those of matmul/group_weight.h: 4-bit weights in groups (formats/int4_group.h), and rows of x
// quantized on the CPU. The products have the bits of the CPU's kernels, but for results that a device without denormal
// numbers flushes to zero.
#pragma once

#include <cstdint>

extern "C" {

enum { kOrtolanOpenClVersion = 1, kOrtolanOpenClErrorBytes = 2048 };

// A validated weight. What it points to outlives what is made of it.
struct OrtolanOpenClWeight {
  int64_t k;
  int64_t n;
  int64_t group;
  const uint8_t* weights;
  const uint8_t* scales;
  int64_t scale_bytes;         // 2: float16, 4: float32; of minimums too
  const uint8_t* zero_points;  // or null
  int64_t zero_point_steps;    // 1, or 16: fractions
  const uint8_t* minimums;     // or null
  int64_t row_bytes;           // of a packed row of x, a multiple of 4
};

struct OrtolanOpenClCall {
  int64_t m;
  // m rows, each packed as a block of its own (matmul/weights/group.h):
  //     q i8 [padded k], scales f32 [groups], minus_sums i32 [groups], scaled_sums f32 [groups] where weights take them
  const void* x;
  const float* bias;  // [n], or null
  float* y;           // [m][n]
};

// What went wrong, ended by a zero.
struct OrtolanOpenClError {
  char text[kOrtolanOpenClErrorBytes];
};

struct OrtolanOpenCl {
  int64_t version;
  // Writes a line for each device, the one that is used first, and a zero; of what does not fit as much as does.
  // Returns the number of devices; none: the text says why.
  int64_t (*list)(char* text, int64_t bytes);
  // A weight on the device, or null and the error.
  void* (*open)(const OrtolanOpenClWeight* weight, OrtolanOpenClError* error);
  void (*close)(void* weight);
  // y = x W + bias. Returns 0, or 1 and the error: then y holds anything. Calls may come at the same time.
  int32_t (*multiply)(void* weight, const OrtolanOpenClCall* call, OrtolanOpenClError* error);
};

// The only symbol of the library. Null where it does not have this version.
const OrtolanOpenCl* OrtolanGetOpenCl(int64_t version);

}  // extern "C"
