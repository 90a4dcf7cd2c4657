# Toolchain for Linux with glibc 2.28 or later, or macOS: the clang, C++ library and symbol lists of zig (PyPI's ziglang).
# -DORTOLAN_ZIG=its program -DORTOLAN_ZIG_CPU=x86_64 or aarch64 -DORTOLAN_ZIG_SYSTEM=linux-gnu.2.28, macos.12.0, ….
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES ORTOLAN_ZIG ORTOLAN_ZIG_CPU ORTOLAN_ZIG_SYSTEM)
set(CMAKE_SYSTEM_NAME Linux)
if(ORTOLAN_ZIG_SYSTEM MATCHES "macos")
  set(CMAKE_SYSTEM_NAME Darwin)
endif()
set(CMAKE_SYSTEM_PROCESSOR ${ORTOLAN_ZIG_CPU})
set(CMAKE_CXX_COMPILER ${ORTOLAN_ZIG} c++ -target ${ORTOLAN_ZIG_CPU}-${ORTOLAN_ZIG_SYSTEM})
set(CMAKE_AR ${ORTOLAN_ZIG})
set(CMAKE_CXX_ARCHIVE_CREATE "<CMAKE_AR> ar qc <TARGET> <OBJECTS>")
set(CMAKE_CXX_ARCHIVE_FINISH "<CMAKE_AR> ranlib <TARGET>")
# Link-time optimization is off for the Python modules too, because zig would build its C++ library again for it.
set(CMAKE_INTERPROCEDURAL_OPTIMIZATION OFF)
# The linker strips, since the host's strip cannot read other architectures.
set(CMAKE_STRIP "" CACHE FILEPATH "" FORCE)
set(CMAKE_SHARED_LINKER_FLAGS_INIT -s)
set(CMAKE_MODULE_LINKER_FLAGS_INIT -s)
