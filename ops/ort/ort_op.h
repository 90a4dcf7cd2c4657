// What every room's ORT adapter shares: the one place that knows how ORT's custom-op interface is used.
//
// A room writes
//     class FooKernel { explicit FooKernel(const OrtKernelInfo&); void Compute(Ort::KernelContext&, Host&); };
//     struct FooOp : OrtOp<FooOp, FooKernel> { GetName, GetInputTypeCount, GetInputType, …, static void
//     InferShape(OrtShapeInferContext*) };
// and reports errors by throwing OpError (or anything derived from std::exception): no exception crosses the C
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

// The end of what is said of a node that no pass of this version writes.
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

// ORT's arena, asked for by the first call that needs it. What GetAllocator hands out holds the arena alive, and is
// released at the end of the scope.
class KernelMemory {
 public:
  KernelMemory() = default;
  ~KernelMemory();
  KernelMemory(const KernelMemory&) = delete;
  KernelMemory& operator=(const KernelMemory&) = delete;
  // Calls may come at the same time.
  OrtAllocator* Allocator(const Ort::KernelContext& context);

 private:
  std::atomic<OrtAllocator*> allocator_{nullptr};
};

// The host of plans while a kernel computes: ORT's intra-op threads, and its own arena.
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

// The kernel as ORT calls it: its exceptions become statuses.
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
    // ORT's C++ wrapper for shape inference mistakes dimensions (1.17 writes 1 for every one), so it is not used.
    OrtCustomOp::InferOutputShapeFn = [](const OrtCustomOp*, OrtShapeInferContext* context) -> OrtStatus* {
      return Guarded([&] { Op::InferShape(context); });
    };
  }

  OrtStatus* CreateKernelV2(const OrtApi&, const OrtKernelInfo* info, void** kernel) const {
    return Guarded([&] { *kernel = new StatusKernel<Kernel>(*info); });
  }
};

// ---- kernel creation ------------------------------------------------------------------------------------------------

// "SparseAMXMatMul node 'encoder/…/MatMul'": the beginning of every error text.
std::string DescribeNode(const OrtKernelInfo& info, const char* op_type);

// A constant input as it lies in memory: for external data that is the mapped file itself.
struct ConstantTensor {
  std::string name;
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  std::vector<int64_t> shape;
  const void* data = nullptr;
  int64_t count = 0;  // elements
};

// Whether the node has this input. Optional ones may be left out, at the end or with an empty name.
bool HasInput(const OrtKernelInfo& info, size_t index);

// An input if it is a constant, else a tensor of undefined type.
ConstantTensor ConstantOrNone(const OrtKernelInfo& info, size_t index);

// Whether the input is a constant.
bool IsConstant(const OrtKernelInfo& info, size_t index);

// Throws OpError if the input is absent, no constant, or of none of these element types.
ConstantTensor ConstantInput(const OrtKernelInfo& info, size_t index, const char* meaning,
                             std::initializer_list<ONNXTensorElementDataType> types, const std::string& node);

// Throws OpError that names the tensor if its shape is another. axes: " (rows, columns)", for the text.
void CheckShape(const ConstantTensor& tensor, const char* meaning, const std::vector<int64_t>& expected,
                const std::string& node, const char* axes = "");

// Throws OpError, which names the tensors, if there is a problem: what a format's Validate function says of them.
void CheckWeight(std::initializer_list<const ConstantTensor*> tensors, const std::string& problem,
                 const std::string& node);

// The number that a tensor of one element, at any address, holds.
template <typename T>
T ScalarIn(const ConstantTensor& tensor) {
  T value;
  std::memcpy(&value, tensor.data, sizeof(value));
  return value;
}

// The elements of a constant tensor where a T may lie: in the tensor or, if a model file has it at another address, in
// a copy.
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
  // None if the input, of elements T, is left out or computed at run time.
  AlignedConstant(const OrtKernelInfo& info, size_t index) : AlignedConstant(ConstantOrNone(info, index)) {}
  const T* data() const { return data_; }  // null if there is none
  // Those of the input in a call, constant or computed.
  const T* In(const Ort::ConstValue& input) const { return data_ == nullptr ? input.GetTensorData<T>() : data_; }

 private:
  std::unique_ptr<T[]> copy_;
  const T* data_ = nullptr;
};

// Whether the input is a constant number or vector of one element, a 0 of float, float16, u8 or i8: what stands for
// "nothing" in a sum. (Of more dimensions it would still give the sum its own.)
bool IsConstantZero(const OrtKernelInfo& info, size_t index);

// Whether the input is a constant without elements: what stands for one that is left out.
bool IsEmptyConstant(const OrtKernelInfo& info, size_t index);

// Throws OpError if the attribute is missing.
int64_t IntAttribute(const OrtKernelInfo& info, const char* name, const std::string& node);

// The same with a value for an attribute that is missing.
int64_t IntAttributeOr(const OrtKernelInfo& info, const char* name, int64_t missing);
float FloatAttributeOr(const OrtKernelInfo& info, const char* name, float missing);

// Throws OpError unless the attribute format_version is the one that the room's kernels read. (ORT does not tell a
// kernel the version of the domain that a model imports.)
void CheckFormatVersion(const OrtKernelInfo& info, int64_t expected, const std::string& node);

// ---- shape inference ------------------------------------------------------------------------------------------------

// Output 0 gets the shape of input 0 with its last dimension replaced by an attribute; false if that is missing or 0.
// Leaves the output open where a dimension of the input has neither value nor name: a -1 passed on would be taken as a
// literal.
bool InferLastDimension(OrtShapeInferContext* context, const char* attribute);

// Output 0 gets the shape of input 0, or is left open as above, and the element type of another input.
void InferSameShape(OrtShapeInferContext* context, size_t type_from);
// Output 0 gets the shape of input 0, its last dimension replaced; left open as by InferLastDimension.
void CopyShape(OrtShapeInferContext* context, int64_t last);

// The last dimension of an input, or -1 if it is not known.
int64_t LastDimension(const OrtShapeInferContext* context, size_t index);

// The integer attribute of the node, or what stands for a missing one.
int64_t ShapeAttributeOr(const OrtShapeInferContext* context, const char* name, int64_t missing);

// Whether the node has more than `count` inputs, perhaps with an empty name.
bool HasMoreInputs(const OrtShapeInferContext* context, size_t count);

// The rank of an input; 0 if it is not known, or the input is missing.
size_t Rank(const OrtShapeInferContext* context, size_t index);

// Whether the input is known to have the shape [1].
bool HasOneElement(const OrtShapeInferContext* context, size_t index);

}  // namespace ortolan
