// ortolan._native: kernels of LutPostOp.
#include "bindings.h"
#include "lut_post_op/lut_post_op.h"

namespace ortolan {
namespace {

// x u8, i8, u16 or i16 of any shape, table [256] or [65536] of u8, i8, u16, i16 or float32.
py::array LutPostOp(const py::array& x, const py::array& table, const std::optional<std::string>& kernel_name) {
  const auto is_one_of = [](const py::array& array, const std::string& kinds, py::ssize_t most) {
    return kinds.find(array.dtype().kind()) != std::string::npos && array.itemsize() <= most;
  };
  const bool is_float = table.dtype().kind() == 'f' && table.itemsize() == 4;
  if (!is_one_of(x, "iu", 2) || !(is_one_of(table, "iu", 2) || is_float)) {
    throw std::invalid_argument("x must be of 8 or 16 bits, table also float32");
  }
  if (table.ndim() != 1 || table.size() != LutEntries(x.itemsize())) {
    throw std::invalid_argument(
        ErrorText("table has ", table.size(), " entries, expected [", LutEntries(x.itemsize()), "]"));
  }
  const LutKernel* kernel = SelectLut(ActiveFeatures(), x.itemsize(), table.itemsize());
  if (kernel_name) {
    kernel = &KernelByName(LutKernels(), *kernel, kernel_name);
    if (kernel->index_bytes != x.itemsize() || kernel->entry_bytes != table.itemsize()) {
      throw std::invalid_argument(ErrorText("kernel ", *kernel_name, " is for other sizes of x and table"));
    }
  }
  const py::array source = py::array::ensure(x, py::array::c_style);
  const py::array entries = py::array::ensure(table, py::array::c_style);
  py::array y(table.dtype(), std::vector<py::ssize_t>(x.shape(), x.shape() + x.ndim()));
  const LutArgs args{source.data(), entries.data(), y.mutable_data(), x.size()};
  py::gil_scoped_release release;
  kernel->run(args);
  return y;
}

py::list LutKernelList() {
  py::list rows = KernelList(LutKernels());
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i]["index_bytes"] = LutKernels()[i].index_bytes;
    rows[i]["entry_bytes"] = LutKernels()[i].entry_bytes;
  }
  return rows;
}

}  // namespace

void BindLutPostOp(py::module_& module) {
  module.def("lut_post_op_kernels", &LutKernelList, "The rows of the room's kernel table, best first.");
  module.def("lut_post_op", &LutPostOp, py::arg("x").noconvert(), py::arg("table").noconvert(),
             py::arg("kernel") = py::none(), "table[bits of x] on one thread, by the named kernel or the best one.");
}

}  // namespace ortolan
