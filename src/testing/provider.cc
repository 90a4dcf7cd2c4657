#include "provider/embedded.h"
#include "testing.h"

namespace ortolan {

void BindProvider(py::module_& module) {
  module.def("check_embedded", [](const std::vector<int64_t>& files) { provider::CheckEmbedded(files); });
}

}  // namespace ortolan
