// ortolan._testing: the kernels of LutPostOp.
#include "lut_post_op/lut_post_op.h"

#include "testing.h"

namespace ortolan {
namespace {

// x: u8, i8, u16 or i16 of any shape. table: u8, i8, u16, i16 or float32, [256] or [65536].
py::array LutPostOp(const py::array& x, const py::array& table, const KernelName& name) {
  const auto is_one_of = [](const py::array& array, const std::string& kinds, py::ssize_t most) {
    return kinds.find(array.dtype().kind()) != std::string::npos && array.itemsize() <= most;
  };
  const bool is_float = table.dtype().kind() == 'f' && table.itemsize() == 4;
  Require(is_one_of(x, "iu", 2) && (is_one_of(table, "iu", 2) || is_float),
          "x must be an 8- or 16-bit integer array, table an 8- or 16-bit integer or float32 array");
  Require(table.ndim() == 1 && table.size() == LutEntries(x.itemsize()), "table has ", table.size(),
          " entries, expected [", LutEntries(x.itemsize()), "]");
  LutFn* const run = KernelByName(LutKernels(), name).For(x.itemsize(), table.itemsize());
  const py::array source = py::array::ensure(x, py::array::c_style);
  const py::array entries = py::array::ensure(table, py::array::c_style);
  py::array y(table.dtype(), std::vector<py::ssize_t>(x.shape(), x.shape() + x.ndim()));
  const LutArgs args{source.data(), entries.data(), y.mutable_data(), x.size()};
  py::gil_scoped_release release;
  run(args);
  return y;
}

}  // namespace

void BindLutPostOp(py::module_& module) {
  DefineKernelList(module, "lut_post_op", &LutKernels);
  module.def("lut_post_op", &LutPostOp, py::arg("x").noconvert(), py::arg("table").noconvert(),
             py::arg("kernel") = py::none());
}

}  // namespace ortolan
