#include "matmul/group_op.h"

namespace ortolan {

namespace {

int64_t ReadKQuantScaleBits(const OrtKernelInfo& info, const std::string& prefix) {
  const int64_t bits = IntAttributeOr(info, (prefix + "subgroup_scale_bits").c_str(), 0);
  // An ONNX function cannot test whether a node has an attribute, so nodes of formats/subgroup.h may state theirs.
  return bits == 8 - IntAttributeOr(info, (prefix + "bits").c_str(), 4) ? 0 : bits;
}

}  // namespace

int64_t GroupOp::KQuantScaleBits(const OrtKernelInfo& info) { return ReadKQuantScaleBits(info, ""); }

GroupWeight ReadGroupWeight(const OrtKernelInfo& info, LinearInputs inputs, const std::string& prefix,
                            const GroupKind& kind, int64_t k, int64_t n, const std::string& node) {
  const auto constant = [&](const char* part, std::initializer_list<ONNXTensorElementDataType> types) {
    const std::string name = prefix + part;
    return ConstantInput(info, IndexOf(inputs, name), name.c_str(), types, node);
  };
  const auto optional = [&](const char* part, std::initializer_list<ONNXTensorElementDataType> types) {
    const size_t index = IndexOf(inputs, prefix + part);
    return HasInput(info, index) && !IsConstantZero(info, index) ? constant(part, types) : ConstantTensor();
  };
  const auto attribute = [&](const char* part, int64_t missing) {
    return IntAttributeOr(info, (prefix + part).c_str(), missing);
  };
  constexpr ONNXTensorElementDataType kBytes = ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;
  const ConstantTensor weights = constant("weights", {inputs[IndexOf(inputs, prefix + "weights")].type});
  const ConstantTensor scales =
      constant("scales", {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16});
  const ConstantTensor zero_points = optional("zero_points", {kBytes});
  const ConstantTensor minimums = optional("minimums", {scales.type});
  GroupWeight w;
  GroupView& view = w.view;
  view.k = w.k = k;
  view.n = w.n = n;
  view.group = IntAttribute(info, (prefix + "group_size").c_str(), node);
  view.weights = static_cast<const uint8_t*>(weights.data);
  view.scales = static_cast<const uint8_t*>(scales.data);
  if (zero_points.count > 0) view.zero_point_steps = attribute("zero_point_steps", 1);
  view.scale_type = scales.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT ? ScaleType::kFloat32 : ScaleType::kFloat16;
  if (zero_points.count > 0) view.zero_points = static_cast<const uint8_t*>(zero_points.data);
  if (minimums.count > 0) view.minimums = static_cast<const uint8_t*>(minimums.data);
  ConstantTensor subgroup_scales, high_bits, subgroup_minimums;
  SubgroupView& subgroups = view.subgroups;
  subgroups.size = attribute("subgroup_size", 0);
  subgroups.bits = kind.layout.value_bits == 8 ? 4 : attribute("bits", 4);
  if (view.HasSubgroups()) {
    subgroup_scales = optional("subgroup_scales", {kBytes});
    high_bits = optional("high_bits", {kBytes});
    subgroups.scale_bits = ReadKQuantScaleBits(info, prefix);
    if (view.IsKQuant()) {
      subgroups.zero_point = attribute("subgroup_zero_point", 0);
      subgroup_minimums = optional("subgroup_minimums", {kBytes});
      // One element means the same as a missing input.
      for (ConstantTensor* tensor : {&subgroup_scales, &subgroup_minimums}) {
        if (tensor->count == 1) *tensor = {};
      }
    }
    subgroups.scales = static_cast<const uint8_t*>(subgroup_scales.data);
    subgroups.high_bits = static_cast<const uint8_t*>(high_bits.data);
    subgroups.minimums = static_cast<const uint8_t*>(subgroup_minimums.data);
  }
  CheckWeight({&weights, &scales, &zero_points, &minimums, &subgroup_scales, &high_bits, &subgroup_minimums},
              ValidateGroups(kind.layout, {k,
                                           n,
                                           view.group,
                                           weights.count,
                                           scales.count,
                                           view.zero_points,
                                           zero_points.count,
                                           minimums.count,
                                           view.zero_point_steps,
                                           {subgroups.size, subgroups.bits, subgroup_scales.count, high_bits.count,
                                            subgroups.scale_bits, subgroups.zero_point, subgroup_minimums.count}}),
              node);
  return w;
}

GroupOp::GroupOp(const OrtKernelInfo& info, const char* op_type, int64_t format_version, LinearInputs inputs,
                 const GroupKind& kind, OpenDevice* open_device)
    : LinearOp(info, op_type, format_version, inputs) {
  const int64_t k = IntAttribute(info, "k", node());
  w_ = ReadGroupWeight(info, inputs, "", kind, k, IntAttribute(info, "n", node()), node());
  // Devices multiply with groups only.
  if (open_device != nullptr && !w_.view.HasSubgroups()) device_ = open_device(info, w_, node());
  LinearLayer layer = LayerOf(kind, w_);
  layer.device = device_.get();
  MakePlan(info, layer);
}

}  // namespace ortolan
