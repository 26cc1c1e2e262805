#pragma once
// State of flats beside their copies in checkpoints: residuals and momenta of outer steps. The
// values are in fp32, in host memory.
#include <memory>
#include <string>
#include <vector>

#include "src/ckpt/inventory.h"
#include "src/ckpt/load.h"
#include "src/ckpt/save.h"
#include "src/exec/executor.h"

namespace penstock::engine {

// This rank's part of one flat's state.
struct FlatPart {
  exec::Flat* flat = nullptr;
  at::Tensor values;
  // Without memory: describes `values` as state that this rank holds.
  exec::Buffer shape;
  ckpt::Holding holding{};
};
using FlatParts = std::vector<std::unique_ptr<FlatPart>>;

// `values`: shard number `shard` of the flat under `place`.
std::unique_ptr<FlatPart> part_of(int unit, exec::Flat& flat, at::Tensor values,
                                  const Placement& place, int shard, const char* role);
// Appends the tensors that this rank saves.
void add_saved(const FlatParts& parts, const Mesh& mesh, int rank, const ckpt::GlobalOf& names,
               std::vector<ckpt::Extra>* extras);
// Returns the pieces of the parts that the checkpoint has. They share memory with the parts.
std::vector<ckpt::Extra> to_read(const FlatParts& parts, const ckpt::Manifest& manifest,
                                 const ckpt::GlobalOf& names);
// Tells which parts of the checkpoint this run has no use for.
void say_lost(const std::string& path, const ckpt::Manifest& manifest, bool keeps_residuals,
              bool makes_outer_steps);
inline constexpr const char* kResidualRole = "residual";  // of tensors in checkpoints
inline constexpr const char* kOuterRole = "outer";        // momenta of outer steps
bool has_role(const ckpt::Manifest& manifest, const std::string& role);

}  // namespace penstock::engine
