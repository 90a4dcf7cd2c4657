# For aarch64 Linux, by Debian's cross compiler. PYTHON_MODULE_EXTENSION: pybind11 would take this machine's.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(PYTHON_MODULE_EXTENSION .cpython-311-aarch64-linux-gnu.so)
