#include "src/engine/model/checkpoint_tensors.h"

#include <algorithm>
#include <string>

#include "src/base/text.h"
#include "src/ckpt/checksum.h"

namespace penstock::engine {

std::vector<ckpt::Extra> extras_of(const std::vector<CheckpointTensor>& tensors,
                                   exec::Executor& executor, int rank) {
  uint64_t own = 0;
  for (const CheckpointTensor& one : tensors) {
    if (one.rank == CheckpointTensor::kIfDifferent) own = own * 31 + ckpt::checksum(one.tensor);
  }
  const std::vector<std::string> all =
      executor.share("save buffers", {reinterpret_cast<const char*>(&own), sizeof(own)});
  const bool same =
      std::all_of(all.begin(), all.end(), [&](const auto& one) { return one == all.front(); });
  std::vector<ckpt::Extra> extras;
  for (const CheckpointTensor& one : tensors) {
    int owner = one.rank;
    if (owner == CheckpointTensor::kIfDifferent) owner = same ? CheckpointTensor::kAll : rank;
    if (owner == CheckpointTensor::kAll && rank != 0) continue;
    if (owner == CheckpointTensor::kPieces) {
      const Placement& place = executor.table().at(Role::kOptim, Phase::kUpdate);
      if (owners(place, executor.mesh(), rank).index < 0) continue;  // another rank writes them
      owner = CheckpointTensor::kAll;
    }
    extras.push_back({one.role, {one.name, one.shape, one.begin}, owner, one.tensor});
  }
  return extras;
}

std::vector<ckpt::Extra> wanted_of(const std::vector<CheckpointTensor>& tensors,
                                   const ckpt::Manifest& manifest, int rank, int world) {
  std::vector<ckpt::Extra> extras;
  for (const CheckpointTensor& one : tensors) {
    int owner = std::max(one.rank, CheckpointTensor::kAll);
    if (one.rank == CheckpointTensor::kIfDifferent) {
      const bool of_all = manifest.find(one.role + "/" + one.name) != nullptr;
      const bool of_mine = manifest.find(concat(one.role, "/", one.name, "@rank", rank)) != nullptr;
      const bool of_first = manifest.find(concat(one.role, "/", one.name, "@rank0")) != nullptr;
      owner = of_all || !of_first                  ? CheckpointTensor::kAll
              : of_mine && manifest.world == world ? rank
                                                   : 0;
    }
    extras.push_back({one.role, {one.name, one.shape, one.begin}, owner, one.tensor});
  }
  return extras;
}

std::set<std::string> names_away(exec::Executor& executor) {
  std::set<std::string> names;
  for (exec::UnitState& unit : executor.units()) {
    for (const exec::Flat& flat : unit.away) {
      for (const exec::Slot& slot : flat.slots) names.insert(slot.name);
    }
  }
  return names;
}

}  // namespace penstock::engine
