#include "matmul/group_op.h"

namespace ortolan {

int64_t GroupOp::KQuantScaleBits(const OrtKernelInfo& info) {
  const int64_t bits = IntAttributeOr(info, "subgroup_scale_bits", 0);
  // An ONNX function cannot test whether a node has an attribute, so nodes of formats/subgroup.h may state theirs.
  return bits == 8 - IntAttributeOr(info, "bits", 4) ? 0 : bits;
}

GroupOp::GroupOp(const OrtKernelInfo& info, const char* op_type, int64_t format_version, LinearInputs inputs,
                 const GroupKind& kind, OpenDevice* open_device)
    : LinearOp(info, op_type, format_version, inputs) {
  const ConstantTensor weights = Constant(info, "weights");
  const ConstantTensor scales =
      Constant(info, "scales", {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16});
  ConstantTensor zero_points, minimums;
  if (IsThere(info, "zero_points")) zero_points = Constant(info, "zero_points");
  if (IsThere(info, "minimums")) minimums = Constant(info, "minimums", {scales.type});
  GroupView& view = w_.view;
  view.k = w_.k = IntAttribute(info, "k", node());
  view.n = w_.n = IntAttribute(info, "n", node());
  view.group = IntAttribute(info, "group_size", node());
  view.weights = static_cast<const uint8_t*>(weights.data);
  view.scales = static_cast<const uint8_t*>(scales.data);
  if (zero_points.count > 0) view.zero_point_steps = IntAttributeOr(info, "zero_point_steps", 1);
  view.scale_type = scales.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT ? ScaleType::kFloat32 : ScaleType::kFloat16;
  if (zero_points.count > 0) view.zero_points = static_cast<const uint8_t*>(zero_points.data);
  if (minimums.count > 0) view.minimums = static_cast<const uint8_t*>(minimums.data);
  ConstantTensor subgroup_scales, high_bits, subgroup_minimums;
  SubgroupView& subgroups = view.subgroups;
  subgroups.size = SubgroupSize(info);
  subgroups.bits = IntAttributeOr(info, "bits", 4);
  if (view.HasSubgroups()) {
    if (IsThere(info, "subgroup_scales")) subgroup_scales = Constant(info, "subgroup_scales");
    if (IsThere(info, "high_bits")) high_bits = Constant(info, "high_bits");
    subgroups.scale_bits = KQuantScaleBits(info);
    if (view.IsKQuant()) {
      subgroups.zero_point = IntAttributeOr(info, "subgroup_zero_point", 0);
      if (IsThere(info, "subgroup_minimums")) subgroup_minimums = Constant(info, "subgroup_minimums");
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
              ValidateGroups(kind.layout, {view.k,
                                           view.n,
                                           view.group,
                                           weights.count,
                                           scales.count,
                                           view.zero_points,
                                           zero_points.count,
                                           minimums.count,
                                           view.zero_point_steps,
                                           {subgroups.size, subgroups.bits, subgroup_scales.count, high_bits.count,
                                            subgroups.scale_bits, subgroups.zero_point, subgroup_minimums.count}}),
              node());
  // Devices multiply with groups only.
  if (open_device != nullptr && !view.HasSubgroups()) device_ = open_device(info, w_, node());
  LinearLayer layer = LayerOf(kind, w_);
  layer.device = device_.get();
  MakePlan(info, layer);
}

}  // namespace ortolan
