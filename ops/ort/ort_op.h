// The common base of all ONNX Runtime adapters; only this file uses ONNX Runtime's custom-op interface. An operator
// defines
//
//     class FooKernel { explicit FooKernel(const OrtKernelInfo&); void Compute(Ort::KernelContext&, Host&); };
//     struct FooOp : OrtOp<FooOp, FooKernel> {
//       GetName, GetInputTypeCount, GetInputType, …, static void InferShape(OrtShapeInferContext*)
//     };
//
// and reports errors by throwing OpError (or anything derived from std::exception). No exception crosses the C
// boundary.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#define ORT_API_MANUAL_INIT
#include <onnxruntime_cxx_api.h>
#undef ORT_API_MANUAL_INIT

#include "host/host.h"
#include "host/op_error.h"

namespace ortolan {

inline constexpr const char* kDomain = "ai.ortolan";

// The last sentence of errors about nodes that no pass of this version writes.
inline constexpr const char* kOptimizeAgain = "Optimize the original model again.";

inline OrtStatus* ToStatus(const std::exception& error) {
  if (const auto* ort = dynamic_cast<const Ort::Exception*>(&error)) {
    return Ort::GetApi().CreateStatus(ort->GetOrtErrorCode(), ort->what());
  }
  const bool users = dynamic_cast<const OpError*>(&error) != nullptr;
  return Ort::GetApi().CreateStatus(users ? ORT_INVALID_ARGUMENT : ORT_FAIL, error.what());
}

template <typename Function>
OrtStatus* Guarded(Function&& function) noexcept {
  try {
    function();
    return nullptr;
  } catch (const std::exception& error) {
    return ToStatus(error);
  } catch (...) {
    return Ort::GetApi().CreateStatus(ORT_FAIL, "unknown error in an ai.ortolan operator");
  }
}

// ONNX Runtime's arena allocator, requested by the first call that needs it and released by the destructor. While it is
// held, the arena stays alive.
class KernelMemory {
 public:
  KernelMemory() = default;
  ~KernelMemory();
  KernelMemory(const KernelMemory&) = delete;
  KernelMemory& operator=(const KernelMemory&) = delete;
  // Safe to call from several threads.
  OrtAllocator* Allocator(const Ort::KernelContext& context);

 private:
  std::atomic<OrtAllocator*> allocator_{nullptr};
};

// The host of plans during a call: ONNX Runtime's intra-op threads and its arena.
class OrtHost : public Host {
 public:
  OrtHost(const Ort::KernelContext& context, KernelMemory& memory) : context_(context), memory_(memory) {}

 private:
  void RunTasks(int64_t count, Task* task, const void* user) override;
  void* Allocate(size_t bytes) override;
  void Free(void* data) noexcept override;

  const Ort::KernelContext& context_;
  KernelMemory& memory_;
};

// The kernel as ONNX Runtime calls it: exceptions become statuses.
template <typename Kernel>
struct StatusKernel : Kernel {
  using Kernel::Kernel;
  OrtStatus* ComputeV2(OrtKernelContext* raw) {
    return Guarded([&] {
      Ort::KernelContext context(raw);
      OrtHost host(context, memory_);
      this->Compute(context, host);
    });
  }

 private:
  KernelMemory memory_;
};

template <typename Op, typename Kernel>
struct OrtOp : Ort::CustomOpBase<Op, StatusKernel<Kernel>, /*WithStatus=*/true> {
  OrtOp() {
    // ONNX Runtime's C++ wrapper for shape inference is not used: it gets dimensions wrong (1.17 writes 1 for each).
    OrtCustomOp::InferOutputShapeFn = [](const OrtCustomOp*, OrtShapeInferContext* context) -> OrtStatus* {
      return Guarded([&] { Op::InferShape(context); });
    };
  }

  OrtStatus* CreateKernelV2(const OrtApi&, const OrtKernelInfo* info, void** kernel) const {
    return Guarded([&] { *kernel = new StatusKernel<Kernel>(*info); });
  }
};

// ---- kernel creation ------------------------------------------------------------------------------------------------

// "SparseAMXMatMul node 'encoder/…/MatMul'": the start of every error message.
std::string DescribeNode(const OrtKernelInfo& info, const char* op_type);

// A constant input at its place in memory; with external data that is the mapped file.
struct ConstantTensor {
  std::string name;
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  std::vector<int64_t> shape;
  const void* data = nullptr;
  int64_t count = 0;  // elements
};

// Return whether the node has this input. Optional inputs may be left out, at the end or by an empty name.
bool HasInput(const OrtKernelInfo& info, size_t index);

// Return the input if it is constant, else a tensor of undefined type.
ConstantTensor ConstantOrNone(const OrtKernelInfo& info, size_t index);

// Return whether the input is constant.
bool IsConstant(const OrtKernelInfo& info, size_t index);

// Return a constant input. Throws OpError if it is missing, not constant, or of another element type.
ConstantTensor ConstantInput(const OrtKernelInfo& info, size_t index, const char* meaning,
                             std::initializer_list<ONNXTensorElementDataType> types, const std::string& node);

// Throw OpError, naming the tensor, if it has another shape. axes: for example " (rows, columns)", added to the
// message.
void CheckShape(const ConstantTensor& tensor, const char* meaning, const std::vector<int64_t>& expected,
                const std::string& node, const char* axes = "");

// Throw OpError, naming the tensors, if `problem` (the result of a format's Validate function) is not empty.
void CheckWeight(std::initializer_list<const ConstantTensor*> tensors, const std::string& problem,
                 const std::string& node);

// The value of a tensor of one element, at any address.
template <typename T>
T ScalarIn(const ConstantTensor& tensor) {
  T value;
  std::memcpy(&value, tensor.data, sizeof(value));
  return value;
}

// The elements of a constant tensor, aligned for T: the tensor's own memory, or a copy if a model file stores it
// unaligned.
template <typename T>
class AlignedConstant {
 public:
  AlignedConstant() = default;
  explicit AlignedConstant(const ConstantTensor& tensor) : data_(static_cast<const T*>(tensor.data)) {
    if (reinterpret_cast<uintptr_t>(tensor.data) % alignof(T) == 0) return;
    copy_.reset(new T[static_cast<size_t>(tensor.count)]);
    std::memcpy(copy_.get(), tensor.data, static_cast<size_t>(tensor.count) * sizeof(T));
    data_ = copy_.get();
  }
  // Reads an input with elements T. Empty if the input is missing or computed at run time.
  AlignedConstant(const OrtKernelInfo& info, size_t index) : AlignedConstant(ConstantOrNone(info, index)) {}
  const T* data() const { return data_; }  // null if empty
  // The elements of the input in a call, constant or computed.
  const T* In(const Ort::ConstValue& input) const { return data_ == nullptr ? input.GetTensorData<T>() : data_; }

 private:
  std::unique_ptr<T[]> copy_;
  const T* data_ = nullptr;
};

// Return whether the input is a constant scalar, or vector of one element, that is 0 (float, float16, u8 or i8): it
// replaces a missing summand. (A 0 with more dimensions would still change the shape of the sum.)
bool IsConstantZero(const OrtKernelInfo& info, size_t index);

// Return whether the input is a constant without elements, which replaces a missing input.
bool IsEmptyConstant(const OrtKernelInfo& info, size_t index);

// Throws OpError if the attribute is missing.
int64_t IntAttribute(const OrtKernelInfo& info, const char* name, const std::string& node);

// Return the attribute, or `missing` if the node lacks it.
int64_t IntAttributeOr(const OrtKernelInfo& info, const char* name, int64_t missing);
float FloatAttributeOr(const OrtKernelInfo& info, const char* name, float missing);

// Throw OpError unless the attribute format_version is the one this operator reads. (ONNX Runtime does not tell a
// kernel which version of the domain the model imports.)
void CheckFormatVersion(const OrtKernelInfo& info, int64_t expected, const std::string& node);

// ---- shape inference ------------------------------------------------------------------------------------------------

// Give output 0 the shape of input 0 with its last dimension replaced by an attribute; return false if that is missing
// or 0. The output's shape stays unknown if a dimension of the input has neither value nor name: passed on, its -1
// would be taken literally.
bool InferLastDimension(OrtShapeInferContext* context, const char* attribute);

// Give output 0 the shape of input 0, unknown under the same condition, and the element type of another input.
void InferSameShape(OrtShapeInferContext* context, size_t type_from);
// Give output 0 the shape of input 0 with another last dimension; unknown under the same condition.
void CopyShape(OrtShapeInferContext* context, int64_t last);

// Return the last dimension of an input, or -1 if it is unknown.
int64_t LastDimension(const OrtShapeInferContext* context, size_t index);

// Return the node's integer attribute, or `missing` if it has none.
int64_t ShapeAttributeOr(const OrtShapeInferContext* context, const char* name, int64_t missing);

// Return whether the node has more than `count` inputs, counting those with an empty name.
bool HasMoreInputs(const OrtShapeInferContext* context, size_t count);

// Return the rank of an input; 0 if it is unknown or the input is missing.
size_t Rank(const OrtShapeInferContext* context, size_t index);

// Return whether the input is known to have the shape [1].
bool HasOneElement(const OrtShapeInferContext* context, size_t index);

}  // namespace ortolan
