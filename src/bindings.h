// What the bindings of the rooms share: arrays, checks of arguments, tables of kernels. Each room has one function, in
// bindings_<room>.cc, that adds its own to the module.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "isa/kernel_table.h"
#include "ort/error_text.h"

namespace py = pybind11;

namespace ortolan {

void BindSparseAMXMatMul(py::module_& module);
void BindW4A8MatMul(py::module_& module);
void BindVNNISpMM(py::module_& module);
void BindLutPostOp(py::module_& module);
void BindMaskedMatMul(py::module_& module);
void BindNoMADAttention(py::module_& module);
void BindDecodeAttention(py::module_& module);
void BindEpilogue(py::module_& module);

template <typename T>
using Array = py::array_t<T, py::array::c_style>;
template <typename T>
using CastArray = py::array_t<T, py::array::c_style | py::array::forcecast>;
template <typename T>
using StridedArray = py::array_t<T, py::array::forcecast>;

template <typename T>
Array<T> ToArray(const std::vector<T>& values, std::vector<py::ssize_t> shape) {
  Array<T> array(std::move(shape));
  std::copy(values.begin(), values.end(), array.mutable_data());
  return array;
}

template <typename Kernel>
const Kernel& KernelByName(std::span<const Kernel> kernels, const Kernel& best,
                           const std::optional<std::string>& name) {
  if (!name) return best;
  std::string known;
  for (const Kernel& kernel : kernels) {
    if (!known.empty()) known += ", ";
    known += kernel.name;
    if (*name != kernel.name) continue;
    if (!DetectedFeatures().Has(kernel.needs)) {
      throw std::invalid_argument(
          ErrorText("kernel ", *name, " needs ", FeatureSetName(kernel.needs), ", which this CPU has not"));
    }
    return kernel;
  }
  throw std::invalid_argument(ErrorText("no kernel is called '", *name, "', expected one of: ", known));
}

template <typename Kernel>
py::list KernelList(std::span<const Kernel> kernels) {
  py::list rows;
  for (const Kernel& kernel : kernels) {
    py::dict row;
    row["name"] = kernel.name;
    row["isa"] = FeatureSetName(kernel.needs);
    row["runs_here"] = DetectedFeatures().Has(kernel.needs);
    rows.append(row);
  }
  return rows;
}

inline void CheckActivations(const CastArray<float>& x, const std::optional<CastArray<float>>& bias, int64_t k,
                             int64_t n) {
  if (x.ndim() != 2 || x.shape(1) != k) {
    throw std::invalid_argument(ErrorText("x must be [m, ", k, "]"));
  }
  if (bias && (bias->ndim() != 1 || bias->shape(0) != n)) {
    throw std::invalid_argument(ErrorText("bias must be [", n, "]"));
  }
}

}  // namespace ortolan
