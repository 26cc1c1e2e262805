# penstock_openmp(optim kernels.cpp ...): compiles sources that call at::parallel_for, which runs
# serially in a file compiled without OpenMP. The runtime is torch's (its thread pool and number of
# threads), not the compiler's. These files do not use the precompiled header, which is compiled
# without OpenMP. Contraction is off: kernels request fused operations explicitly, so a value does
# not depend on the loop that computed it.
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
