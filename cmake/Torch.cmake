# Finds torch without find_package(Torch): CUDA wheels need no CUDA toolkit, and the RPATH gets no
# unused MKL paths. The headers are SYSTEM includes. One precompiled header serves every torch
# target.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
execute_process(
  COMMAND ${Python_EXECUTABLE} -c
          "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
  OUTPUT_VARIABLE TORCH_DIR OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
file(STRINGS ${TORCH_DIR}/version.py version_line REGEX "^__version__ = ")
string(REGEX MATCH "[0-9]+\\.[0-9]+" TORCH_MINOR "${version_line}")
if(TORCH_MINOR VERSION_LESS 2.11 OR TORCH_MINOR VERSION_GREATER 2.15)
  message(FATAL_ERROR "Penstock builds against torch 2.11 to 2.15, found ${TORCH_MINOR} in ${TORCH_DIR}")
endif()
message(STATUS "torch ${TORCH_MINOR} in ${TORCH_DIR}")

add_library(penstock_torch INTERFACE)
target_include_directories(penstock_torch SYSTEM INTERFACE
  ${TORCH_DIR}/include ${TORCH_DIR}/include/torch/csrc/api/include)
target_compile_definitions(penstock_torch INTERFACE USE_DISTRIBUTED PENSTOCK_TORCH_MINOR="${TORCH_MINOR}")
target_link_libraries(penstock_torch INTERFACE
  ${TORCH_DIR}/lib/libtorch_cpu.so ${TORCH_DIR}/lib/libc10.so)

add_library(penstock_pch STATIC ${CMAKE_SOURCE_DIR}/cmake/pch.cpp)
target_link_libraries(penstock_pch PUBLIC penstock_torch penstock_flags)
target_precompile_headers(penstock_pch PRIVATE ${CMAKE_SOURCE_DIR}/cmake/pch.h)
target_compile_options(penstock_pch PRIVATE -fpch-preprocess -fPIC)

function(penstock_use_torch target)
  target_link_libraries(${target} PUBLIC penstock_torch)
  target_precompile_headers(${target} REUSE_FROM penstock_pch)
  target_compile_options(${target} PRIVATE -fpch-preprocess -fPIC)
endfunction()
