#include "masked_matmul/plan.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "host/broadcast.h"
#include "masked_matmul/products.h"

namespace ortolan {
namespace {

// If a product of many rows uses fewer inputs than this fraction, the unused inputs are removed first.
constexpr double kWorthListing = 0.9;
// Elements to copy or mask per work item.
constexpr int64_t kChunkFloats = int64_t{1} << 16;
// Fewest columns of y per work item, read sequentially from a row of B.
constexpr int64_t kLeastColumns = 4096;

FloatRows Matrix(const float* data, int64_t rows, int64_t columns) {
  return {data, columns * static_cast<int64_t>(sizeof(float)), rows, columns};
}

// Calls body(i) for all rows, with several rows a work item.
template <typename Body>
void ForEachRow(Host& host, int64_t rows, int64_t columns, const Body& body) {
  const int64_t chunk = std::max<int64_t>(1, kChunkFloats / columns);
  host.ParallelFor((rows + chunk - 1) / chunk, [&](int64_t unit) {
    for (int64_t i = unit * chunk; i < std::min(rows, (unit + 1) * chunk); ++i) body(i);
  });
}

}  // namespace

Way MaskedMatMulPlan::Run(const MaskedMatMulCall& call) const {
  const bool is_float = b_.element_type == ElementType::kFloat;
  if (call.size.m > kMostDecodeRows) return is_float ? RunMany(call) : RunPacked(call);
  if (!is_float || b_.finite) return RunRows(call);
  call.dense(call.size, call.a, static_cast<const float*>(call.b), call.y);
  return Way::kDense;
}

Way MaskedMatMulPlan::RunMany(const MaskedMatMulCall& call) const {
  const auto [m, k, n] = call.size;
  const FloatRows a = Matrix(call.a, m, k);
  const FloatRows b = Matrix(static_cast<const float*>(call.b), k, n);
  const Pattern sample = SamplePattern(*kernel_, a, b, call.memory);
  const Way expected = CheapestWay(costs_, sample, call.size);
  if (expected == Way::kDense) return RunFull(call);
  const bool look_at_a = expected != Way::kBlocks || sample.active_inputs < kWorthListing;
  const Pattern pattern = FindPattern(*kernel_, a, b, look_at_a, call.memory);
  const Way way = CheapestWay(costs_, pattern, call.size);
  switch (way) {
    case Way::kCompact:
      return RunCompact(call, pattern.active);
    case Way::kValues:
      MultiplyByValues(*kernel_, a, b, call.y, call.memory);
      return way;
    case Way::kBlocks:
    case Way::kTwoSided:
      return MultiplyBlocks(*kernel_, way, pattern, a, b, call.y, call.memory) ? way : RunFull(call);
    default:
      return RunFull(call);
  }
}

// Computes a product in which nothing can be skipped: by ONNX Runtime's MatMul, unless A has too few rows to amortize
// its packing of B in each call.
Way MaskedMatMulPlan::RunFull(const MaskedMatMulCall& call) const {
  if (call.size.m > costs_.most_panel_rows) {
    call.dense(call.size, call.a, static_cast<const float*>(call.b), call.y);
    return Way::kDense;
  }
  MultiplyByPanels(*kernel_, b_.element_type, AllInputs(call), call.memory);
  return Way::kPanels;
}

// Multiplies many rows of A with a bf16 or int8 B: reads B once and unpacks the rows that A uses.
Way MaskedMatMulPlan::RunPacked(const MaskedMatMulCall& call) const {
  if (!kernel_->dense_panels) return RunUnpacked(call);
  const auto [m, k, n] = call.size;
  const int64_t words = MaskWords(k);
  uint64_t* used = call.memory.New<uint64_t>(words);
  kernel_->scan_rows(Matrix(call.a, m, k), used);
  const bool few = static_cast<double>(CountBits(used, words)) < kWorthListing * static_cast<double>(k);
  MultiplyByPanels(*kernel_, b_.element_type, few ? UsedInputs(call) : AllInputs(call), call.memory);
  return Way::kPanels;
}

// Unpacks panels of B for ONNX Runtime's MatMul, on targets whose panel kernels are not vectorized.
Way MaskedMatMulPlan::RunUnpacked(const MaskedMatMulCall& call) const {
  const auto [m, k, n] = call.size;
  const RowsArgs args = AllInputs(call);
  float* panel = call.memory.New<float>(k * kDensePanelColumns);
  float* sums = call.memory.New<float>(m * kDensePanelColumns);
  std::fill_n(panel, k * kDensePanelColumns, 0.0f);
  for (int64_t column = 0; column < n; column += kDensePanelColumns) {
    const int64_t columns = std::min(kDensePanelColumns, n - column);
    call.memory.host().ParallelFor(MaskWords(k), [&](int64_t pass) {
      kernel_->pack_inputs[static_cast<int>(b_.element_type)](args, pass * kMaskBits, column, columns,
                                                              panel + pass * kMaskBits * kDensePanelColumns);
    });
    call.dense({m, k, kDensePanelColumns}, call.a, panel, sums);
    for (int64_t i = 0; i < m; ++i) std::copy_n(sums + i * kDensePanelColumns, columns, call.y + i * n + column);
  }
  return Way::kDense;
}

// Reads only the rows of B that A uses. The number of work items is a power of two, so that two or four threads share
// them evenly.
Way MaskedMatMulPlan::RunRows(const MaskedMatMulCall& call) const {
  const auto [m, k, n] = call.size;
  const RowsArgs args = UsedInputs(call);
  float* sums = b_.scales == nullptr ? nullptr : call.memory.New<float>(m * n);
  const uint64_t most = static_cast<uint64_t>(std::clamp<int64_t>(n / kLeastColumns, 1, kMostPieces));
  const int64_t pieces = static_cast<int64_t>(std::bit_floor(most));
  const int64_t columns = BlockPanels((n + pieces - 1) / pieces) * kBlockColumns;
  call.memory.host().ParallelFor((n + columns - 1) / columns, [&](int64_t piece) {
    RowsArgs of_piece = args;
    of_piece.sums = sums == nullptr ? nullptr : sums + piece * columns * m;
    kernel_->multiply_rows[static_cast<int>(b_.element_type)](of_piece, piece * columns,
                                                              std::min(n, (piece + 1) * columns));
  });
  return Way::kRows;
}

Way MaskedMatMulPlan::RunCompact(const MaskedMatMulCall& call, const uint64_t* active) const {
  const auto [m, k, n] = call.size;
  const float* a = call.a;
  const float* b = static_cast<const float*>(call.b);
  std::vector<int64_t> inputs;
  for (int64_t l = 0; l < k; ++l) {
    if (((active[l / kMaskBits] >> (l % kMaskBits)) & 1) != 0) inputs.push_back(l);
  }
  const int64_t count = static_cast<int64_t>(inputs.size());
  if (count == 0) {
    std::fill_n(call.y, m * n, 0.0f);
    return Way::kCompact;
  }
  float* used_a = call.memory.New<float>(m * count);
  float* used_b = call.memory.New<float>(count * n);
  Host& host = call.memory.host();
  ForEachRow(host, m, count, [&](int64_t i) {
    for (int64_t q = 0; q < count; ++q) used_a[i * count + q] = a[i * k + inputs[q]];
  });
  ForEachRow(host, count, n, [&](int64_t q) { std::copy_n(b + inputs[q] * n, n, used_b + q * n); });
  call.dense({m, count, n}, used_a, used_b, call.y);
  return Way::kCompact;
}

RowsArgs MaskedMatMulPlan::AllInputs(const MaskedMatMulCall& call) const {
  const auto [m, k, n] = call.size;
  RowsArgs args{m, call.a, k, nullptr, k, call.b, n};
  args.y = call.y;
  if (b_.scales != nullptr) {
    args.scales = b_.scales;
    args.group = b_.group == 0 ? k : b_.group;
  }
  return args;
}

RowsArgs MaskedMatMulPlan::UsedInputs(const MaskedMatMulCall& call) const {
  const auto [m, k, n] = call.size;
  RowsArgs args = AllInputs(call);
  args.a_row = k + kBlockColumns;
  float* used_a = call.memory.New<float>(m * args.a_row);
  int32_t* inputs = call.memory.New<int32_t>(args.a_row);
  args.count = kernel_->list_inputs(Matrix(call.a, m, k), b_.always.empty() ? nullptr : b_.always.data(), inputs,
                                    used_a, args.a_row);
  args.a = used_a;
  args.inputs = inputs;
  return args;
}

const float* MaskedCopy(CallMemory& memory, const float* x, const std::vector<int64_t>& shape, float threshold,
                        const uint8_t* keep, const std::vector<int64_t>& strides) {
  const int64_t columns = shape.back();
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < shape.size(); ++i) rows *= shape[i];
  float* to = memory.New<float>(rows * columns);
  ForEachRow(memory.host(), rows, columns, [&](int64_t i) {
    const float* x_row = x + i * columns;
    float* row = to + i * columns;
    for (int64_t j = 0; j < columns; ++j) row[j] = std::fabs(x_row[j]) <= threshold ? 0.0f : x_row[j];
    if (keep == nullptr) return;
    const uint8_t* of_row = keep + OffsetOf(i * columns, shape, strides);
    const int64_t stride = strides.back();
    for (int64_t j = 0; j < columns; ++j) row[j] = of_row[j * stride] != 0 ? row[j] : 0.0f;
  });
  return to;
}

}  // namespace ortolan
