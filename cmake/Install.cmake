# libpenstock.so, made of the layers, and two ways to install it, as components of one tree:
#   cmake --install build/release --prefix P    include/, lib/, and a package for find_package(Penstock)
#   the component `python`                      libpenstock.so and the module side by side, for the
#                                               wheel (the only component that pyproject.toml installs)
# Nothing here links Python: a C++ program needs none.
include(CMakePackageConfigHelpers)

set(layers base place plan mem comm optim activations exec ckpt tiles engine)
list(TRANSFORM layers PREPEND penstock_)

# Links the object files of the layers. Nothing inside the library refers to the public functions,
# so an archive would leave them out. The archives follow for their link dependencies.
add_library(penstock SHARED)
add_library(Penstock::penstock ALIAS penstock)
foreach(layer ${layers})
  target_sources(penstock PRIVATE $<TARGET_OBJECTS:${layer}>)
endforeach()
target_link_libraries(penstock
  PRIVATE penstock_flags ${layers}
  PUBLIC $<BUILD_INTERFACE:penstock_torch>)
target_include_directories(penstock PUBLIC
  $<BUILD_INTERFACE:${CMAKE_SOURCE_DIR}/include> $<INSTALL_INTERFACE:include>)
target_compile_features(penstock PUBLIC cxx_std_20)
if(NOT PENSTOCK_SANITIZE)
  target_link_options(penstock PRIVATE LINKER:-z,defs)
endif()

# A wheel finds torch in the folder next to its own; a C++ install finds the torch it was built
# with.
set(PENSTOCK_RPATH "$ORIGIN" "$ORIGIN/../torch/lib")
if(NOT SKBUILD_STATE STREQUAL "wheel")
  list(APPEND PENSTOCK_RPATH ${TORCH_DIR}/lib)
endif()
set_target_properties(penstock PROPERTIES
  LINKER_LANGUAGE CXX
  BUILD_RPATH ${TORCH_DIR}/lib
  INSTALL_RPATH "${PENSTOCK_RPATH}")

install(TARGETS penstock EXPORT PenstockTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT cpp)
install(DIRECTORY ${CMAKE_SOURCE_DIR}/include/penstock
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT cpp FILES_MATCHING PATTERN "*.h"
  PATTERN optimizer_kinds.h EXCLUDE)  # the planner and the kernels share it; no user needs it
set(PENSTOCK_PACKAGE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/Penstock)
install(EXPORT PenstockTargets
  NAMESPACE Penstock:: DESTINATION ${PENSTOCK_PACKAGE_DIR} COMPONENT cpp)
configure_package_config_file(
  ${CMAKE_SOURCE_DIR}/cmake/penstockConfig.cmake.in ${CMAKE_BINARY_DIR}/PenstockConfig.cmake
  INSTALL_DESTINATION ${PENSTOCK_PACKAGE_DIR} NO_SET_AND_CHECK_MACRO
  NO_CHECK_REQUIRED_COMPONENTS_MACRO)
write_basic_package_version_file(
  ${CMAKE_BINARY_DIR}/PenstockConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES
  ${CMAKE_BINARY_DIR}/PenstockConfig.cmake ${CMAKE_BINARY_DIR}/PenstockConfigVersion.cmake
  COMPONENT cpp DESTINATION ${PENSTOCK_PACKAGE_DIR})

install(TARGETS penstock LIBRARY DESTINATION penstock COMPONENT python EXCLUDE_FROM_ALL)
# A wheel contains what torch's wheel lacks: Highway, if it is a shared library.
get_target_property(hwy_type hwy::hwy TYPE)
if(SKBUILD_STATE STREQUAL "wheel" AND hwy_type STREQUAL "SHARED_LIBRARY")
  install(FILES $<TARGET_FILE:hwy::hwy> RENAME $<TARGET_SONAME_FILE_NAME:hwy::hwy>
    DESTINATION penstock COMPONENT python EXCLUDE_FROM_ALL)
endif()
# With PENSTOCK_AS_DEEPSPEED=1 this file makes `import deepspeed` find python/penstock/as_deepspeed.
install(FILES ${CMAKE_SOURCE_DIR}/python/penstock_as_deepspeed.pth
  DESTINATION . COMPONENT python EXCLUDE_FROM_ALL)

# Installs a Python extension module next to libpenstock.so (called by python/src).
function(penstock_install_module target)
  set_target_properties(${target} PROPERTIES
    BUILD_RPATH "${CMAKE_BINARY_DIR};${TORCH_DIR}/lib" INSTALL_RPATH "${PENSTOCK_RPATH}")
  install(TARGETS ${target} LIBRARY DESTINATION penstock COMPONENT python EXCLUDE_FROM_ALL)
endfunction()
