# Toolchain for aarch64 Linux: Debian's cross compiler. Without PYTHON_MODULE_EXTENSION, pybind11 takes the host's.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(PYTHON_MODULE_EXTENSION .cpython-311-aarch64-linux-gnu.so)
