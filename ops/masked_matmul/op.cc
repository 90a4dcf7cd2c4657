// ORT adapter of MaskedMatMul.
//
//     Y = A' B'        (masked_matmul.h: what A' and B' are)
//
//     A float [..., m, k], B float, bf16 or int8 [..., k, n], b_scale float [groups, n], a_mask bool, b_mask bool
//     -> Y float [..., m, n], leading dimensions broadcast as in MatMul
//     attributes format_version, a_threshold, b_threshold, group_size, b_finite
//
// A mask broadcasts to its matrix, and true means: keep. B of bf16 or int8 is an initializer [k, n] without mask and
// threshold; b_scale, an initializer, belongs to int8: row i / group_size of it scales row i of B, group_size 0 means
// that there is one row for all. All inputs from b_scale on are optional; what stands for a missing one is b_scale
// [[1]] and a mask of one true. (An ONNX function cannot ask whether an input is there.)
//
// b_finite 1 promises that a B which is computed holds neither Inf nor NaN, so that few rows of A need not read all of
// it. Of an initializer it is found out when the kernel is made.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <thread>

#include "isa/kernel_table.h"
#include "masked_matmul/block_product.h"
#include "masked_matmul/masked_matmul.h"
#include "masked_matmul/number_product.h"
#include "masked_matmul/panel_product.h"
#include "ort/aligned.h"
#include "ort/ort_op.h"
#include "ort/rooms.h"

namespace ortolan {
namespace {

constexpr const char* kOpType = "MaskedMatMul";
constexpr int64_t kFormatVersion = 1;

// Up to so many rows of A the time goes into reading B: the rows kernels are asked first.
constexpr int64_t kMostDecodeRows = 16;
// Up to so many rows a dense product by panels takes less time than one that packs B.
constexpr int64_t kMostPanelRows = 512;
// Many rows are copied without the inputs that none of them uses if these are so few.
constexpr double kWorthListing = 0.9;
// Numbers to copy or mask in one piece of work.
constexpr int64_t kChunkFloats = int64_t{1} << 16;
// Columns of y that a thread takes at least: it reads so many numbers of a row of B in one go.
constexpr int64_t kLeastColumns = 4096;

enum Input : size_t { kA, kB, kBScale, kAMask, kBMask, kInputCount };

using Shape = std::vector<int64_t>;

int64_t Count(const Shape& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

// Memory that lives as long as a call.
class Memory {
 public:
  explicit Memory(const Ort::KernelContext& context) : context_(context) {}
  char* operator()(size_t bytes) {
    blocks_.push_back(std::make_unique<Scratch>(context_, bytes + kScratchAlignment));
    return AlignedAddress(blocks_.back()->data());
  }
  // data, or a copy: a file may place a tensor at any address.
  const void* AtElements(const void* data, int64_t count, size_t element) {
    if (reinterpret_cast<uintptr_t>(data) % element == 0) return data;
    return std::memcpy((*this)(static_cast<size_t>(count) * element), data, static_cast<size_t>(count) * element);
  }
  float* Floats(int64_t count) { return reinterpret_cast<float*>((*this)(static_cast<size_t>(count) * sizeof(float))); }

 private:
  const Ort::KernelContext& context_;
  std::vector<std::unique_ptr<Scratch>> blocks_;
};

FloatRows Matrix(const float* data, int64_t rows, int64_t columns) {
  return {data, columns * static_cast<int64_t>(sizeof(float)), rows, columns};
}

// Steps from one index of a shape to the next in a tensor that is broadcast to it; 0 where it is the same.
Shape BroadcastSteps(const Shape& from, const Shape& to) {
  Shape steps(to.size(), 0);
  int64_t step = 1;
  for (size_t i = 0; i < from.size(); ++i) {
    const size_t at = from.size() - 1 - i;
    if (from[at] != 1) steps[to.size() - 1 - i] = step;
    step *= from[at];
  }
  return steps;
}

int64_t OffsetOf(int64_t index, const Shape& shape, const Shape& steps) {
  int64_t offset = 0;
  for (size_t i = shape.size(); i-- > 0;) {
    offset += index % shape[i] * steps[i];
    index /= shape[i];
  }
  return offset;
}

class Kernel {
 public:
  explicit Kernel(const OrtKernelInfo& info) : node_(DescribeNode(info, kOpType)) {
    CheckFormatVersion(info, kFormatVersion, node_);
    a_threshold_ = Threshold(info, "a_threshold");
    b_threshold_ = Threshold(info, "b_threshold");
    group_ = IntAttributeOr(info, "group_size", 0);
    if (group_ < 0) throw OpError(ErrorText(node_, ": group_size is ", group_, ", expected 0 or more"));
    b_finite_ = IntAttributeOr(info, "b_finite", 0) != 0;
    ReadWeight(info);
    const char* names[] = {"T"};
    const ONNXTensorElementDataType types[] = {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT};
    dense_ = Ort::Op::Create(&info, "MatMul", "", 13, names, types, 1, nullptr, 0, 2, 1);
  }

  void Compute(Ort::KernelContext& context) {
    Memory memory(context);
    const Ort::ConstValue a = context.GetInput(kA);
    const Ort::ConstValue b = context.GetInput(kB);
    const Shape a_shape = a.GetTensorTypeAndShapeInfo().GetShape();
    const Shape b_shape = b.GetTensorTypeAndShapeInfo().GetShape();
    const ONNXTensorElementDataType b_type = b.GetTensorTypeAndShapeInfo().GetElementType();
    if (b_type != weight_type_ &&
        !(weight_type_ == ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED && b_type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT)) {
      throw OpError(ErrorText(node_, ": B is computed at run time and not float, expected float or an initializer"));
    }
    const Shape y_shape = OutputShape(a_shape, b_shape);
    Product product;
    product.m = a_shape[a_shape.size() - 2];
    product.k = a_shape.back();
    product.n = b_shape.back();
    if (product.k > std::numeric_limits<int32_t>::max()) {
      throw OpError(ErrorText(node_, ": A has shape ", ShapeText(a_shape), ", its last dimension is too long"));
    }
    float* y = context.GetOutput(0, y_shape).GetTensorMutableData<float>();
    if (Count(y_shape) == 0) return;
    if (product.k == 0) {
      std::fill_n(y, Count(y_shape), 0.0f);
      return;
    }
    const float* a_data = Masked(context, memory, a, kAMask, "a_mask", "A", a_threshold_);
    if (b_type != ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT) {
      CheckNoMask(context, kBMask);
      product.m = Count(a_shape) / product.k;
      const size_t element = b_type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8 ? 1 : sizeof(uint16_t);
      const void* b_data = memory.AtElements(b.GetTensorRawData(), Count(b_shape), element);
      MultiplyPacked(context, memory, product, a_data, b_data, y);
      return;
    }
    const float* b_data = Masked(context, memory, b, kBMask, "b_mask", "B", b_threshold_);
    if (b_shape.size() == 2) {
      product.m = Count(a_shape) / product.k;
      MultiplyFloat(context, memory, product, a_data, b_data, y);
      return;
    }
    const auto leading = [](const Shape& shape) { return Shape(shape.begin(), shape.end() - 2); };
    const Shape batch = leading(y_shape);
    const Shape a_steps = BroadcastSteps(leading(a_shape), batch);
    const Shape b_steps = BroadcastSteps(leading(b_shape), batch);
    for (int64_t i = 0; i < Count(batch); ++i) {
      Memory of_product(context);
      MultiplyFloat(context, of_product, product, a_data + OffsetOf(i, batch, a_steps) * product.m * product.k,
                    b_data + OffsetOf(i, batch, b_steps) * product.k * product.n, y + i * product.m * product.n);
    }
  }

 private:
  struct Product {
    int64_t m = 0, k = 0, n = 0;
  };

  float Threshold(const OrtKernelInfo& info, const char* name) const {
    const float threshold = FloatAttributeOr(info, name, 0.0f);
    if (!(threshold >= 0.0f && threshold <= std::numeric_limits<float>::max())) {
      throw OpError(ErrorText(node_, ": ", name, " is ", threshold, ", expected a finite number from 0 on"));
    }
    return threshold;
  }

  // What is known of B before the first call.
  void ReadWeight(const OrtKernelInfo& info) {
    int is_constant = 0;
    const Ort::ConstKernelInfo kernel_info(&info);
    static_cast<void>(kernel_info.GetTensorConstantInput(kB, &is_constant));
    if (is_constant == 0) {
      if (group_ != 0) throw OpError(ErrorText(node_, ": group_size is ", group_, ", expected 0: B is no initializer"));
      return;
    }
    const ConstantTensor b = ConstantInput(info, kB, "B",
                                           {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16,
                                            ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8},
                                           node_);
    weight_type_ = b.type;
    const bool is_float = b.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
    if (!is_float && b_threshold_ != 0.0f) {
      throw OpError(ErrorText(node_, ": b_threshold is ", b_threshold_, ", expected 0: B '", b.name, "' is no float"));
    }
    if (b.shape.size() != 2) {
      if (is_float) return;
      throw OpError(ErrorText(node_, ": B '", b.name, "' has shape ", ShapeText(b.shape), ", expected [k, n]"));
    }
    const int64_t k = b.shape[0];
    const int64_t n = b.shape[1];
    if (b.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8) return ReadScales(info, k, n);
    if (group_ != 0) throw OpError(ErrorText(node_, ": group_size is ", group_, ", expected 0: B is not int8"));
    if (n == 0) return;
    std::vector<uint64_t> mask(static_cast<size_t>(MaskWords(n)));
    // A row at a time, copied: a file may place a tensor at any address.
    std::vector<float> floats(static_cast<size_t>(is_float ? n : 0));
    std::vector<uint16_t> bits(static_cast<size_t>(is_float ? 0 : n));
    for (int64_t i = 0; i < k; ++i) {
      bool finite = true;
      if (is_float) {
        const size_t bytes = floats.size() * sizeof(float);
        std::memcpy(floats.data(), static_cast<const char*>(b.data) + static_cast<size_t>(i) * bytes, bytes);
        finite =
            SelectKernel(MaskedMatMulKernels(), ActiveFeatures()).scan_rows(Matrix(floats.data(), 1, n), mask.data());
      } else {
        const size_t bytes = bits.size() * sizeof(uint16_t);
        std::memcpy(bits.data(), static_cast<const char*>(b.data) + static_cast<size_t>(i) * bytes, bytes);
        finite = std::none_of(bits.begin(), bits.end(), [](uint16_t one) { return (one & 0x7f80) == 0x7f80; });
      }
      if (finite) continue;
      always_.resize(static_cast<size_t>(k));
      always_[static_cast<size_t>(i)] = 1;
    }
    b_finite_ = true;  // but for the rows that are never skipped
  }

  void ReadScales(const OrtKernelInfo& info, int64_t k, int64_t n) {
    const ConstantTensor scales = ConstantInput(info, kBScale, "b_scale", {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT}, node_);
    const Shape expected{group_ == 0 ? 1 : k / group_ + (k % group_ != 0 ? 1 : 0), n};
    if (scales.shape != expected) {
      throw OpError(ErrorText(node_, ": b_scale '", scales.name, "' has shape ", ShapeText(scales.shape), ", expected ",
                              ShapeText(expected), " (groups, n)"));
    }
    scales_.resize(static_cast<size_t>(scales.count));  // copied: a file may place them at an odd address
    std::copy_n(static_cast<const char*>(scales.data), scales.count * sizeof(float),
                reinterpret_cast<char*>(scales_.data()));
    if (!std::all_of(scales_.begin(), scales_.end(), [](float scale) { return std::isfinite(scale); })) {
      throw OpError(ErrorText(node_, ": b_scale '", scales.name, "' holds Inf or NaN, expected finite numbers"));
    }
  }

  Shape OutputShape(const Shape& a, const Shape& b) const {
    const auto refuse = [&](const char* expected) {
      throw OpError(ErrorText(node_, ": A has shape ", ShapeText(a), " and B ", ShapeText(b), ", expected ", expected));
    };
    if (a.size() < 2 || b.size() < 2) refuse("two dimensions or more of each");
    if (a.back() != b[b.size() - 2]) refuse("[..., m, k] and [..., k, n]");
    const size_t rank = std::max(a.size(), b.size());
    Shape y(rank, 1);
    for (size_t i = 0; i + 2 < rank; ++i) {
      const auto at = [&](const Shape& shape) { return i + shape.size() < rank ? 1 : shape[i + shape.size() - rank]; };
      if (at(a) != at(b) && at(a) != 1 && at(b) != 1) refuse("leading dimensions that broadcast");
      y[i] = at(a) == 1 ? at(b) : at(a);
    }
    y[rank - 2] = a[a.size() - 2];
    y[rank - 1] = b.back();
    return y;
  }

  // ---- masks --------------------------------------------------------------------------------------------------------

  static std::optional<Ort::ConstValue> OptionalInput(const Ort::KernelContext& context, size_t index) {
    if (context.GetInputCount() <= index) return std::nullopt;
    const Ort::ConstValue value = context.GetInput(index);
    if (!value) return std::nullopt;
    return value;
  }

  static bool IsOneTrue(const Ort::ConstValue& mask) {
    return mask.GetTensorTypeAndShapeInfo().GetElementCount() == 1 && *mask.GetTensorData<bool>();
  }

  void CheckNoMask(const Ort::KernelContext& context, size_t index) const {
    const std::optional<Ort::ConstValue> mask = OptionalInput(context, index);
    if (mask && !IsOneTrue(*mask)) throw OpError(ErrorText(node_, ": b_mask is there, but B is no float"));
  }

  // The matrices with zeros for what is masked or small: x itself, or a copy.
  const float* Masked(const Ort::KernelContext& context, Memory& memory, const Ort::ConstValue& x, size_t index,
                      const char* mask_name, const char* x_name, float threshold) const {
    const Shape shape = x.GetTensorTypeAndShapeInfo().GetShape();
    const auto* from = static_cast<const float*>(memory.AtElements(x.GetTensorRawData(), Count(shape), sizeof(float)));
    std::optional<Ort::ConstValue> mask = OptionalInput(context, index);
    Shape mask_shape;
    if (mask) {
      mask_shape = mask->GetTensorTypeAndShapeInfo().GetShape();
      bool fits = mask_shape.size() <= shape.size();
      for (size_t i = 0; fits && i < mask_shape.size(); ++i) {
        const int64_t found = mask_shape[mask_shape.size() - 1 - i];
        fits = found == 1 || found == shape[shape.size() - 1 - i];
      }
      if (!fits) {
        throw OpError(ErrorText(node_, ": ", mask_name, " has shape ", ShapeText(mask_shape),
                                ", expected one that broadcasts to that of ", x_name, ", ", ShapeText(shape)));
      }
      if (IsOneTrue(*mask)) mask.reset();
    }
    if (!mask && threshold == 0.0f) return from;

    const int64_t columns = shape.back();
    const int64_t rows = Count(shape) / columns;
    const Shape steps = mask ? BroadcastSteps(mask_shape, shape) : Shape();
    const bool* keep = mask ? mask->GetTensorData<bool>() : nullptr;
    float* to = memory.Floats(rows * columns);
    const int64_t chunk = std::max<int64_t>(1, kChunkFloats / columns);
    ParallelFor(context, (rows + chunk - 1) / chunk, [&](int64_t unit) {
      for (int64_t i = unit * chunk; i < std::min(rows, (unit + 1) * chunk); ++i) {
        const float* x_row = from + i * columns;
        float* row = to + i * columns;
        for (int64_t j = 0; j < columns; ++j) row[j] = std::fabs(x_row[j]) <= threshold ? 0.0f : x_row[j];
        if (keep == nullptr) continue;
        const bool* of_row = keep + OffsetOf(i * columns, shape, steps);
        const int64_t step = steps.back();
        for (int64_t j = 0; j < columns; ++j) row[j] = of_row[j * step] ? row[j] : 0.0f;
      }
    });
    return to;
  }

  // ---- products -----------------------------------------------------------------------------------------------------

  void MultiplyFloat(const Ort::KernelContext& context, Memory& memory, const Product& product, const float* a,
                     const float* b, float* y) {
    const auto [m, k, n] = product;
    const MaskedMatMulKernel& kernel = SelectKernel(MaskedMatMulKernels(), ActiveFeatures());
    if (m <= kMostDecodeRows) {
      return b_finite_ ? MultiplyListed(context, memory, product, a, b, kernel.multiply_rows[0], y)
                       : MultiplyDense(context, product, a, b, y);
    }
    const FloatRows a_rows = Matrix(a, m, k);
    const FloatRows b_rows = Matrix(b, k, n);
    uint64_t* words =
        reinterpret_cast<uint64_t*>(memory(static_cast<size_t>(2 * MaskWords(k) + BlockPanels(n)) * sizeof(uint64_t)));
    const Pattern sample = SamplePattern(kernel, a_rows, b_rows, words, words + 2 * MaskWords(k));
    const Way expected = CheapestWay(sample, m, k, n);
    if (expected == Way::kDense) return MultiplyFull(context, memory, product, a, b, y);
    const bool look_at_a = expected != Way::kBlocks || sample.active_inputs < kWorthListing;
    const auto parallel = [&](int64_t count, const auto& body) { ParallelFor(context, count, body); };
    const Pattern pattern = FindPattern(kernel, a_rows, b_rows, look_at_a, parallel, memory);
    switch (const Way way = CheapestWay(pattern, m, k, n)) {
      case Way::kDense:
        return MultiplyFull(context, memory, product, a, b, y);
      case Way::kCompact:
        return MultiplyCompact(context, memory, product, pattern.active, a, b, y);
      case Way::kNumbers:
        return MultiplyByNumbers(kernel, a_rows, b_rows, y, n * static_cast<int64_t>(sizeof(float)), parallel, memory);
      default:
        if (!MultiplyBlocks(kernel, way, pattern, a_rows, b_rows, y, n * static_cast<int64_t>(sizeof(float)), parallel,
                            memory)) {
          MultiplyFull(context, memory, product, a, b, y);
        }
    }
  }

  // B of bf16 or int8: few rows as they are, many by unpacking what they use.
  void MultiplyPacked(const Ort::KernelContext& context, Memory& memory, const Product& product, const float* a,
                      const void* b, float* y) {
    const auto [m, k, n] = product;
    const MaskedMatMulKernel& kernel = SelectKernel(MaskedMatMulKernels(), ActiveFeatures());
    const bool is_int8 = weight_type_ == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8;
    if (m <= kMostDecodeRows) {
      return MultiplyListed(context, memory, product, a, b, is_int8 ? kernel.multiply_rows[2] : kernel.multiply_rows[1],
                            y);
    }
    PackInputsFn* pack = is_int8 ? kernel.pack_inputs[2] : kernel.pack_inputs[1];
    if (kernel.needs == feature_set::scalar) return MultiplyUnpacked(context, memory, product, a, b, pack, y);
    MultiplyPanels(context, memory, product, a, b, pack, true, y);
  }

  // Where panel kernels have no vectors: ONNX Runtime's MatMul on a panel's columns of B after another, as floats.
  void MultiplyUnpacked(const Ort::KernelContext& context, Memory& memory, const Product& product, const float* a,
                        const void* b, PackInputsFn* pack, float* y) {
    const auto [m, k, n] = product;
    const RowsArgs args = AllInputs(memory, product, a, b, y);
    float* panel = memory.Floats(k * kNumberColumns);
    float* sums = memory.Floats(m * kNumberColumns);
    std::fill_n(panel, k * kNumberColumns, 0.0f);
    for (int64_t column = 0; column < n; column += kNumberColumns) {
      const int64_t columns = std::min(kNumberColumns, n - column);
      ParallelFor(context, (k + kMaskBits - 1) / kMaskBits, [&](int64_t pass) {
        pack(args, pass * kMaskBits, column, columns, panel + pass * kMaskBits * kNumberColumns);
      });
      MultiplyDense(context, {m, k, kNumberColumns}, a, panel, sums);
      for (int64_t i = 0; i < m; ++i) std::copy_n(sums + i * kNumberColumns, columns, y + i * n + column);
    }
  }

  // Nothing to skip: ONNX Runtime's MatMul, which packs B in each call, unless A has too few rows for that.
  void MultiplyFull(const Ort::KernelContext& context, Memory& memory, const Product& product, const float* a,
                    const float* b, float* y) {
    if (product.m > kMostPanelRows || !ActiveFeatures().Has(feature_set::avx512))
      return MultiplyDense(context, product, a, b, y);
    MultiplyPanels(context, memory, product, a, b, SelectKernel(MaskedMatMulKernels(), ActiveFeatures()).pack_inputs[0],
                   false, y);
  }

  // Reads B once and unpacks it as it is needed. may_skip: what of B is not finite is known.
  void MultiplyPanels(const Ort::KernelContext& context, Memory& memory, const Product& product, const float* a,
                      const void* b, PackInputsFn* pack, bool may_skip, float* y) const {
    const auto [m, k, n] = product;
    const MaskedMatMulKernel& kernel = SelectKernel(MaskedMatMulKernels(), ActiveFeatures());
    const int64_t words = MaskWords(k);
    uint64_t* used = reinterpret_cast<uint64_t*>(memory(static_cast<size_t>(words) * sizeof(uint64_t)));
    if (may_skip) kernel.scan_rows(Matrix(a, m, k), used);
    RowsArgs args;
    if (may_skip &&
        static_cast<double>(block_product::CountBits(used, words)) < kWorthListing * static_cast<double>(k)) {
      args = ListInputs(memory, product, a, b, y);
    } else {
      args = AllInputs(memory, product, a, b, y);
    }
    const auto parallel = [&](int64_t count, const auto& body) { ParallelFor(context, count, body); };
    MultiplyByPanels(kernel, pack, args, parallel, memory);
  }

  const uint8_t* Always() const { return always_.empty() ? nullptr : always_.data(); }

  void SetScales(RowsArgs& args, int64_t k) const {
    if (scales_.empty()) return;
    args.scales = scales_.data();
    args.group = group_ == 0 ? k : group_;
  }

  RowsArgs AllInputs(Memory& memory, const Product& product, const float* a, const void* b, float* y) const {
    const auto [m, k, n] = product;
    RowsArgs args{m, a, k, nullptr, k, b, n};
    args.y = y;
    SetScales(args, k);
    int32_t* inputs = reinterpret_cast<int32_t*>(memory(static_cast<size_t>(k) * sizeof(int32_t)));
    std::iota(inputs, inputs + k, 0);
    args.inputs = inputs;
    return args;
  }

  // The inputs that A uses, and B as it is.
  RowsArgs ListInputs(Memory& memory, const Product& product, const float* a, const void* b, float* y) const {
    const auto [m, k, n] = product;
    RowsArgs args;
    args.m = m;
    args.n = n;
    args.b = b;
    args.y = y;
    args.a_row = k + kBlockColumns;
    float* used_a = memory.Floats(m * args.a_row);
    int32_t* inputs = reinterpret_cast<int32_t*>(memory(static_cast<size_t>(args.a_row) * sizeof(int32_t)));
    args.count = SelectKernel(MaskedMatMulKernels(), ActiveFeatures())
                     .list_inputs(Matrix(a, m, k), Always(), inputs, used_a, args.a_row);
    args.a = used_a;
    args.inputs = inputs;
    SetScales(args, k);
    return args;
  }

  // Reads only the rows of B that A uses.
  void MultiplyListed(const Ort::KernelContext& context, Memory& memory, const Product& product, const float* a,
                      const void* b, MultiplyRowsFn* multiply, float* y) const {
    const auto [m, k, n] = product;
    const RowsArgs args = ListInputs(memory, product, a, b, y);
    float* sums = nullptr;
    if (!scales_.empty()) sums = memory.Floats(m * n);
    // Asked once: glibc opens a file to answer.
    static const auto most_pieces = std::max<int64_t>(1, std::thread::hardware_concurrency());
    const int64_t pieces = std::clamp<int64_t>(n / kLeastColumns, 1, most_pieces);
    const int64_t columns = ((n + pieces - 1) / pieces + kBlockColumns - 1) / kBlockColumns * kBlockColumns;
    ParallelFor(context, (n + columns - 1) / columns, [&](int64_t piece) {
      RowsArgs of_piece = args;
      of_piece.sums = sums == nullptr ? nullptr : sums + piece * columns * m;
      multiply(of_piece, piece * columns, std::min(n, (piece + 1) * columns));
    });
  }

  // The dense product of the inputs that A and B both use.
  void MultiplyCompact(const Ort::KernelContext& context, Memory& memory, const Product& product,
                       const uint64_t* active, const float* a, const float* b, float* y) {
    const auto [m, k, n] = product;
    std::vector<int64_t> inputs;
    for (int64_t l = 0; l < k; ++l) {
      if (((active[l / kMaskBits] >> (l % kMaskBits)) & 1) != 0) inputs.push_back(l);
    }
    const int64_t count = static_cast<int64_t>(inputs.size());
    if (count == 0) {
      std::fill_n(y, m * n, 0.0f);
      return;
    }
    float* used_a = memory.Floats(m * count);
    float* used_b = memory.Floats(count * n);
    const int64_t a_chunk = std::max<int64_t>(1, kChunkFloats / count);
    ParallelFor(context, (m + a_chunk - 1) / a_chunk, [&](int64_t unit) {
      for (int64_t i = unit * a_chunk; i < std::min(m, (unit + 1) * a_chunk); ++i) {
        for (int64_t q = 0; q < count; ++q) used_a[i * count + q] = a[i * k + inputs[q]];
      }
    });
    const int64_t b_chunk = std::max<int64_t>(1, kChunkFloats / n);
    ParallelFor(context, (count + b_chunk - 1) / b_chunk, [&](int64_t unit) {
      for (int64_t q = unit * b_chunk; q < std::min(count, (unit + 1) * b_chunk); ++q) {
        std::copy_n(b + inputs[q] * n, n, used_b + q * n);
      }
    });
    MultiplyDense(context, {m, count, n}, used_a, used_b, y);
  }

  // ONNX Runtime's own MatMul.
  void MultiplyDense(const Ort::KernelContext& context, const Product& product, const float* a, const float* b,
                     float* y) {
    const auto [m, k, n] = product;
    const Ort::MemoryInfo cpu = Ort::MemoryInfo::CreateCpu(OrtDeviceAllocator, OrtMemTypeCPU);
    const auto tensor = [&](const float* data, int64_t rows, int64_t columns) {
      const int64_t shape[] = {rows, columns};
      return Ort::Value::CreateTensor<float>(cpu, const_cast<float*>(data), static_cast<size_t>(rows * columns), shape,
                                             2);
    };
    const Ort::Value given[] = {tensor(a, m, k), tensor(b, k, n)};
    Ort::Value answer = tensor(y, m, n);
    dense_.Invoke(context.GetOrtKernelContext(), given, 2, &answer, 1);
  }

  std::string node_;
  float a_threshold_ = 0.0f;
  float b_threshold_ = 0.0f;
  int64_t group_ = 0;
  bool b_finite_ = false;
  ONNXTensorElementDataType weight_type_ = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;  // of B, if it is an initializer
  std::vector<uint8_t> always_;  // a byte for each row of B that is not finite, or nothing
  std::vector<float> scales_;
  Ort::Op dense_{nullptr};
};

struct Op : OrtOp<Op, Kernel> {
  const char* GetName() const { return kOpType; }
  size_t GetInputTypeCount() const { return kInputCount; }
  size_t GetOutputTypeCount() const { return 1; }
  ONNXTensorElementDataType GetInputType(size_t index) const {
    switch (index) {
      case kB:
        return ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;  // one of several: the kernel looks
      case kAMask:
      case kBMask:
        return ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL;
      default:
        return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
    }
  }
  ONNXTensorElementDataType GetOutputType(size_t) const { return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; }
  OrtCustomOpInputOutputCharacteristic GetInputCharacteristic(size_t index) const {
    return index >= kBScale ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
  }
  static void InferShape(OrtShapeInferContext* context) {
    const int64_t n = LastDimension(context, kB);
    if (Rank(context, kB) == 2 && n > 0) CopyShape(context, n);
  }
};

}  // namespace

const OrtCustomOp* MaskedMatMulOp() {
  static const Op op;
  return &op;
}

}  // namespace ortolan
