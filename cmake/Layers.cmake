# A source compiled alone costs seconds of headers before its first line. So by default several
# sources of a target are compiled together. If off (the preset dev), a rebuild after an edit
# compiles one source. In both cases, names that two sources of a layer define for themselves must
# differ.
option(PENSTOCK_UNITY "Compile the sources of a target several at a time" ON)
set(PENSTOCK_UNITY_BATCH 16 CACHE STRING "How many sources are compiled together")

# penstock_batches(target): compiles the sources of `target` in batches, if PENSTOCK_UNITY is on.
function(penstock_batches target)
  set_target_properties(${target} PROPERTIES
    UNITY_BUILD ${PENSTOCK_UNITY} UNITY_BUILD_BATCH_SIZE ${PENSTOCK_UNITY_BATCH})
  # In a batch, GCC treats a source as a header and warns about types with members of file-local
  # types.
  if(PENSTOCK_UNITY AND CMAKE_CXX_COMPILER_ID STREQUAL GNU)
    target_compile_options(${target} PRIVATE -Wno-subobject-linkage)
  endif()
endfunction()

# penstock_cold(target): its code is in no loop over values or bytes. -O1 compiles it in two thirds of
# the time of -O3, and a training step takes as long (benchmarks/engine_overhead.py, in turn).
function(penstock_cold target)
  target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O1>)
endfunction()

# penstock_layer(NAME plan SOURCES a.cpp TESTS a_test.cpp DEPS base place [TORCH] [HOT])
#   Makes one static library per folder of src/, and one test program `plan_test` from its tests.
#   DEPS are the layers whose headers it may include (tools/check_layers.py checks the includes).
#   HOT: not penstock_cold().
# Turn it off for a compiler that the sources were not tested with.
option(PENSTOCK_WERROR "Warnings are errors" ON)
add_library(penstock_flags INTERFACE)
target_include_directories(penstock_flags INTERFACE
  $<BUILD_INTERFACE:${CMAKE_SOURCE_DIR}> $<BUILD_INTERFACE:${CMAKE_SOURCE_DIR}/include>)
# GCC 12 reports array bounds and overlaps in std::string that do not exist (bugs 105329, 105651).
target_compile_options(penstock_flags INTERFACE -Wall -Wextra $<$<BOOL:${PENSTOCK_WERROR}>:-Werror>
  $<$<CXX_COMPILER_ID:GNU>:-Wno-array-bounds>
  $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>
  $<$<CXX_COMPILER_ID:GNU>:-Wno-stringop-overflow>
  $<$<CXX_COMPILER_ID:GNU>:-Wno-stringop-overread>)
target_link_libraries(penstock_flags INTERFACE Threads::Threads)
if(PENSTOCK_SANITIZE)
  add_compile_options(-fsanitize=${PENSTOCK_SANITIZE} -fno-omit-frame-pointer -g)
  add_link_options(-fsanitize=${PENSTOCK_SANITIZE})
  # torch's headers have a fence in code for Python objects; GCC warns that it cannot check it.
  if(PENSTOCK_SANITIZE MATCHES thread AND CMAKE_CXX_COMPILER_ID STREQUAL GNU)
    add_compile_options(-Wno-tsan)
  endif()
endif()

function(penstock_test name)
  cmake_parse_arguments(ARG "TORCH" "" "SOURCES;DEPS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  penstock_batches(${name})
  penstock_cold(${name})
  list(TRANSFORM ARG_DEPS PREPEND penstock_)
  target_link_libraries(${name} PRIVATE ${ARG_DEPS} penstock_flags GTest::gtest_main)
  if(ARG_TORCH)
    penstock_use_torch(${name})
    set_target_properties(${name} PROPERTIES BUILD_RPATH "${TORCH_DIR}/lib")
  endif()
  target_compile_definitions(${name} PRIVATE PENSTOCK_SOURCE_DIR="${CMAKE_SOURCE_DIR}")
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES TIMEOUT 300)
endfunction()

function(penstock_layer)
  cmake_parse_arguments(ARG "TORCH;HOT" "NAME" "SOURCES;TESTS;DEPS" ${ARGN})
  add_library(penstock_${ARG_NAME} STATIC ${ARG_SOURCES})
  penstock_batches(penstock_${ARG_NAME})
  if(NOT ARG_HOT)
    penstock_cold(penstock_${ARG_NAME})
  endif()
  set(deps ${ARG_DEPS})
  list(TRANSFORM deps PREPEND penstock_)
  target_link_libraries(penstock_${ARG_NAME} PUBLIC penstock_flags ${deps})
  if(ARG_TORCH)
    penstock_use_torch(penstock_${ARG_NAME})
  endif()
  if(PENSTOCK_TESTS AND ARG_TESTS)
    set(torch_flag "")
    if(ARG_TORCH)
      set(torch_flag TORCH)
    endif()
    penstock_test(${ARG_NAME}_test SOURCES ${ARG_TESTS} DEPS ${ARG_NAME} ${torch_flag})
  endif()
endfunction()
