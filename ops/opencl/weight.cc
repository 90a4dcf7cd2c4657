#include "opencl/weight.h"

#include <unistd.h>

#include <algorithm>
#include <limits>
#include <mutex>

#include "formats/bitmap_int4.h"
#include "formats/scales.h"
#include "host/error_text.h"

namespace ortolan::opencl {
namespace {

// These constants match kernels.cl.
constexpr size_t kSlices = 16;
constexpr size_t kTileColumns = 64;
constexpr size_t kRowBlocks = 4;
constexpr size_t kTileRows = 32;
constexpr size_t kWorkGroup = 256;
enum Argument : uint32_t {
  kWeights,
  kWeightsAt,
  kScales,
  kScalesAt,
  kOffsets,
  kOffsetsAt,
  kInputs,
  kXAt,
  kHasBias,
  kY,
  kM,
  kN,
  kPairs,
  kGroups,
  kRowWords,
};

// Number of rows of x from which tiles are faster, despite their use of local memory.
constexpr int64_t kManyRows = 8;
// Limit on the size of x, and of y, on the device at once.
constexpr int64_t kMostScratchBytes = int64_t{64} << 20;
// Alignment that kernels need for a shared tensor.
constexpr uintptr_t kAlignment = 64;
constexpr int64_t kPairInputs = 8;

template <typename T>
void SetArgument(const ClApi& api, Kernel kernel, Argument index, const T& value) {
  Check(api.clSetKernelArg(kernel, index, sizeof(value), &value), "clSetKernelArg");
}

size_t Chunks(int64_t count, size_t chunk) { return (static_cast<size_t>(count) + chunk - 1) / chunk; }

}  // namespace

Weight::Weight(Device& device, const OrtolanOpenClWeight& weight) : device_(device), of_(weight) {
  if (device.info().most_work_group < kWorkGroup) {
    throw ClError(ErrorText("work groups of ", device_.info().name, " have at most ", device.info().most_work_group,
                            " items, expected ", kWorkGroup));
  }
  // Kernels index a panel's words of weights, and scales, with 32 bits.
  if (Pairs() * kPanelColumns > std::numeric_limits<int32_t>::max() ||
      Panels() * Groups() * kPanelColumns > std::numeric_limits<int32_t>::max()) {
    throw ClError(ErrorText("a weight of ", of_.k, " x ", of_.n, " is too large for the kernels"));
  }
  const std::lock_guard<std::mutex> lock(device_.mutex());
  try {
    Open();
  } catch (...) {
    Close();
    throw;
  }
}

Weight::~Weight() {
  const std::lock_guard<std::mutex> lock(device_.mutex());
  Close();
}

void Weight::Open() {
  const int64_t rows = Panels() * Groups() * kPanelColumns;
  weights_ = Share(of_.weights, Panels() * Pairs() * kPanelColumns * 4);
  scales_ = Share(of_.scales, rows * of_.scale_bytes);
  // Kernels need a buffer even for an argument they do not read.
  offsets_ = of_.zero_points != nullptr ? Share(of_.zero_points, rows)
             : of_.minimums != nullptr  ? Share(of_.minimums, rows * of_.scale_bytes)
                                        : Share(of_.scales, rows * of_.scale_bytes);
  const Program program = device_.ProgramWith(Options());
  Status status = 0;
  few_rows_ = device_.api().clCreateKernel(program, "FewRows", &status);
  Check(status, "clCreateKernel");
  many_rows_ = device_.api().clCreateKernel(program, "ManyRows", &status);
  Check(status, "clCreateKernel");
  SetConstants(few_rows_);
  SetConstants(many_rows_);
}

void Weight::Close() {
  for (const Kernel kernel : {few_rows_, many_rows_}) {
    if (kernel != nullptr) device_.api().clReleaseKernel(kernel);
  }
  for (const DeviceTensor& tensor : {weights_, scales_, offsets_}) {
    if (tensor.memory != nullptr) device_.api().clReleaseMemObject(tensor.memory);
  }
}

// If host and device share memory, share the pages that contain the tensor, because drivers share whole pages; other
// data in them is not read. Copy the tensor if it is not aligned for the kernels.
DeviceTensor Weight::Share(const uint8_t* data, int64_t bytes) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(data);
  DeviceTensor tensor;
  size_t size = static_cast<size_t>(bytes);
  uint64_t flags = kReadOnly | kCopyHostPointer;
  if (device_.info().shares_memory && address % kAlignment == 0) {
    const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    tensor.at = address % page;
    size = (tensor.at + size + page - 1) / page * page;
    flags = kReadOnly | kUseHostPointer;
  }
  Status status = 0;
  tensor.memory =
      device_.api().clCreateBuffer(device_.context(), flags, size, const_cast<uint8_t*>(data) - tensor.at, &status);
  Check(status, "clCreateBuffer");
  return tensor;
}

void Weight::SetConstants(Kernel kernel) const {
  const ClApi& api = device_.api();
  SetArgument(api, kernel, kWeights, weights_.memory);
  SetArgument(api, kernel, kWeightsAt, weights_.at);
  SetArgument(api, kernel, kScales, scales_.memory);
  SetArgument(api, kernel, kScalesAt, scales_.at);
  SetArgument(api, kernel, kOffsets, offsets_.memory);
  SetArgument(api, kernel, kOffsetsAt, offsets_.at);
  SetArgument(api, kernel, kN, static_cast<int32_t>(of_.n));
  SetArgument(api, kernel, kPairs, static_cast<int32_t>(Pairs()));
  SetArgument(api, kernel, kGroups, static_cast<int32_t>(Groups()));
  SetArgument(api, kernel, kRowWords, static_cast<int32_t>(of_.row_bytes / 4));
}

void Weight::Multiply(const OrtolanOpenClCall& call) {
  const int64_t most_row_bytes = std::max(of_.row_bytes, 4 * of_.n);
  const int64_t most_rows = std::max<int64_t>(1, kMostScratchBytes / most_row_bytes);
  const std::lock_guard<std::mutex> lock(device_.mutex());
  for (int64_t row = 0; row < call.m; row += most_rows) {
    OrtolanOpenClCall part = call;
    part.m = std::min(most_rows, call.m - row);
    part.x = static_cast<const char*>(call.x) + row * of_.row_bytes;
    part.y = call.y + row * of_.n;
    try {
      MultiplyRows(part);
    } catch (...) {
      device_.api().clFinish(device_.queue());  // pending work reads x
      throw;
    }
  }
}

void Weight::MultiplyRows(const OrtolanOpenClCall& call) {
  const ClApi& api = device_.api();
  const Queue queue = device_.queue();
  const size_t bias_bytes = call.bias == nullptr ? 0 : static_cast<size_t>(of_.n) * 4;
  const size_t x_bytes = static_cast<size_t>(call.m * of_.row_bytes);
  const size_t y_bytes = static_cast<size_t>(call.m * of_.n) * 4;
  const Memory inputs = device_.inputs.OfBytes(api, device_.context(), bias_bytes + x_bytes);
  const Memory y = device_.outputs.OfBytes(api, device_.context(), y_bytes);
  if (call.bias != nullptr) {
    Check(api.clEnqueueWriteBuffer(queue, inputs, 0, 0, bias_bytes, call.bias, 0, nullptr, nullptr),
          "clEnqueueWriteBuffer");
  }
  Check(api.clEnqueueWriteBuffer(queue, inputs, 0, bias_bytes, x_bytes, call.x, 0, nullptr, nullptr),
        "clEnqueueWriteBuffer");
  const bool many = call.m >= kManyRows;
  const Kernel kernel = many ? many_rows_ : few_rows_;
  SetArgument(api, kernel, kInputs, inputs);
  SetArgument(api, kernel, kXAt, static_cast<int32_t>(bias_bytes / 4));
  SetArgument(api, kernel, kHasBias, static_cast<int32_t>(call.bias != nullptr));
  SetArgument(api, kernel, kY, y);
  SetArgument(api, kernel, kM, static_cast<int32_t>(call.m));
  const size_t panels = static_cast<size_t>(Panels());
  const size_t tiles = Chunks(of_.n, kTileColumns);
  const size_t few[2][3] = {{panels * kPanelColumns, kSlices, static_cast<size_t>(call.m)},
                            {kPanelColumns, kSlices, 1}};
  const size_t tiled[2][3] = {{tiles * kTileColumns, Chunks(call.m, kTileRows) * kRowBlocks, 1},
                              {kTileColumns, kRowBlocks, 1}};
  const auto& sizes = many ? tiled : few;
  Check(api.clEnqueueNDRangeKernel(queue, kernel, 3, nullptr, sizes[0], sizes[1], 0, nullptr, nullptr),
        "clEnqueueNDRangeKernel");
  Check(api.clEnqueueReadBuffer(queue, y, 1, 0, y_bytes, call.y, 0, nullptr, nullptr), "clEnqueueReadBuffer");
}

int64_t Weight::Panels() const { return BitmapPanels(of_.n); }
int64_t Weight::Groups() const { return ScaleRows(of_.k, of_.group); }
int64_t Weight::Pairs() const { return kInt4Bitmap.PaddedK(of_.k) / kPairInputs; }

std::string Weight::Options() const {
  const int offsets = of_.minimums != nullptr ? 3 : of_.zero_points == nullptr ? 0 : of_.zero_point_steps == 1 ? 1 : 2;
  return ErrorText("-DGROUP=", of_.group, " -DSCALE_F16=", of_.scale_bytes == 2 ? 1 : 0, " -DOFFSETS=", offsets);
}

}  // namespace ortolan::opencl
