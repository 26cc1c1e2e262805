# penstock_openmp(optim kernels.cpp ...): these sources call at::parallel_for, which runs serially in
# a file compiled without OpenMP. The runtime is torch's own (its thread pool, its number of
# threads), not the compiler's. Such files do without the precompiled header, which was made without
# OpenMP. Contraction is off: the kernels say where they fuse, so that a value does not depend on the
# loop it was computed in.
include_guard(GLOBAL)
find_package(OpenMP REQUIRED COMPONENTS CXX)
file(GLOB TORCH_OPENMP ${TORCH_DIR}/lib/libgomp*.so* ${TORCH_DIR}/lib/libiomp5.so
     ${TORCH_DIR}/lib/libomp.so)
if(NOT TORCH_OPENMP)
  set(TORCH_OPENMP OpenMP::OpenMP_CXX)
endif()
message(STATUS "OpenMP runtime: ${TORCH_OPENMP}")
add_library(penstock_openmp_runtime INTERFACE)
target_link_libraries(penstock_openmp_runtime INTERFACE ${TORCH_OPENMP})

function(penstock_openmp_sources)
  set_source_files_properties(${ARGN} PROPERTIES SKIP_PRECOMPILE_HEADERS ON
    COMPILE_OPTIONS "${OpenMP_CXX_FLAGS};-ffp-contract=off")
endfunction()

function(penstock_openmp layer)
  penstock_openmp_sources(${ARGN})
  target_link_libraries(penstock_${layer} PRIVATE penstock_openmp_runtime)
endfunction()
