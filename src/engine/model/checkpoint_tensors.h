#pragma once
// The front's tensors in a checkpoint: buffers, generators, the state of a user's optimizer.
#include <set>
#include <string>
#include <vector>

#include "penstock/checkpoint.h"
#include "src/ckpt/manifest.h"
#include "src/ckpt/save.h"
#include "src/exec/executor.h"

namespace penstock::engine {

// [all ranks] Returns the tensors that this rank writes: its own tensors and, on rank 0, the
// tensors that are equal on all ranks.
std::vector<ckpt::Extra> extras_of(const std::vector<CheckpointTensor>& tensors,
                                   exec::Executor& executor, int rank);

// Returns the tensors to read. If each rank saved its own tensors, a rank reads the tensors that it
// saved or, if the number of ranks has changed, the tensors of rank 0.
std::vector<ckpt::Extra> wanted_of(const std::vector<CheckpointTensor>& tensors,
                                   const ckpt::Manifest& manifest, int rank, int world);

// Returns the names of the parameters of other pipeline stages.
std::set<std::string> names_away(exec::Executor& executor);

}  // namespace penstock::engine
