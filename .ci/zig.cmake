# For Linux with glibc 2.28 and later, or macOS, by the clang, the C++ library and the symbol lists of zig (ziglang on PyPI):
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
# Not even of the Python modules: for it zig would build its C++ library once more.
set(CMAKE_INTERPROCEDURAL_OPTIMIZATION OFF)
# The linker strips: this machine's strip knows no other CPU.
set(CMAKE_STRIP "" CACHE FILEPATH "" FORCE)
set(CMAKE_SHARED_LINKER_FLAGS_INIT -s)
set(CMAKE_MODULE_LINKER_FLAGS_INIT -s)
