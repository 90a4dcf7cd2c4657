# Sets ORTOLAN_ORT_INCLUDE_DIR, the folder of onnxruntime_cxx_api.h. The onnxruntime wheel has no headers, so they come
# from the first of: ORT_INCLUDE_DIR; the system; the amd-quark wheel, which contains those of 1.17.0 (downloaded with
# pip, checked and unpacked, but not installed).
# Old headers are preferred: an operator built with them runs on every newer ONNX Runtime, but not on an older one.

set(ORTOLAN_QUARK_VERSION 0.6.0)
set(ORTOLAN_QUARK_SHA256 10686c8bd1ad8ece56cb6fd408e5f97ff00809321aede1a29a86699a41c1e500)

function(ortolan_find_ort_headers)
  set(names onnxruntime_cxx_api.h)
  set(suffixes onnxruntime onnxruntime/core/session core/session include)
  if(ORT_INCLUDE_DIR)
    find_path(found ${names} PATHS ${ORT_INCLUDE_DIR} PATH_SUFFIXES ${suffixes} NO_DEFAULT_PATH NO_CACHE)
    if(NOT found)
      message(FATAL_ERROR "ORT_INCLUDE_DIR is ${ORT_INCLUDE_DIR}, but has no ${names}")
    endif()
  endif()
  if(NOT found)
    find_path(found ${names} PATH_SUFFIXES ${suffixes} NO_CACHE)
  endif()
  set(folder ${CMAKE_BINARY_DIR}/ort_headers)
  set(quark_headers ${folder}/quark/onnx/operators/custom_ops/include/onnxruntime-1.17.0)
  if(NOT found)
    find_path(found ${names} PATHS ${quark_headers} PATH_SUFFIXES ${suffixes} NO_DEFAULT_PATH NO_CACHE)
  endif()
  if(NOT found)
    find_package(Python REQUIRED COMPONENTS Interpreter)
    set(wheel ${CMAKE_BINARY_DIR}/amd_quark-${ORTOLAN_QUARK_VERSION}-py3-none-any.whl)
    execute_process(
      COMMAND ${Python_EXECUTABLE} -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all:
              amd-quark==${ORTOLAN_QUARK_VERSION} -d ${CMAKE_BINARY_DIR}
      ERROR_VARIABLE pip_error)
    if(EXISTS ${wheel})
      file(SHA256 ${wheel} sha256)
      if(NOT sha256 STREQUAL ORTOLAN_QUARK_SHA256)
        message(FATAL_ERROR "${wheel} has sha256 ${sha256}, expected ${ORTOLAN_QUARK_SHA256}")
      endif()
      file(ARCHIVE_EXTRACT INPUT ${wheel} DESTINATION ${folder})
      find_path(found ${names} PATHS ${quark_headers} PATH_SUFFIXES ${suffixes} NO_DEFAULT_PATH NO_CACHE)
    else()
      message(STATUS "pip could not fetch amd-quark ${ORTOLAN_QUARK_VERSION}: ${pip_error}")
    endif()
  endif()
  if(NOT found)
    message(FATAL_ERROR "ONNX Runtime's C++ headers were not found and could not be fetched. Install libonnxruntime-dev, "
                        "or unpack an ONNX Runtime release (1.17 or later) and set -DORT_INCLUDE_DIR=<its include>.")
  endif()
  message(STATUS "ONNX Runtime headers: ${found}")
  set(ORTOLAN_ORT_INCLUDE_DIR ${found} PARENT_SCOPE)
endfunction()

ortolan_find_ort_headers()
