#pragma once
// ReplicaEdits: finds parameters that users edited on some ranks only. Used only by the model's
// thread.
//
// [Note: Edits on some ranks] Ranks that hold the same parameter must hold the same values. The
// exchange of the norm carries two numbers for this purpose, so the check needs no extra
// collective:
//
//   counted  a hash of the edits that the engine has seen since the last agreement: torch's version
//            counters, and the values of parameters that got other memory. It shows every such edit
//            in the next step.
//   sample   a hash of at most kSamples values of each parameter that rests whole. Every
//            kStepsPerSample steps, other values are sampled. The hash also shows writes to
//            `.data`, which torch does not count. The next step shows an edit of a whole parameter;
//            a smaller edit shows only if the sample has one of the edited values. In `zero1` and
//            `zero2` the update replaces edited values, so later samples do not show the edit.
//
// If ranks differ in one of the numbers, they exchange a list of the parameters that may differ,
// and hashes of these parameters' full values. Equal values are no error: rank 0 may swap weights
// for an evaluation and put them back. A rank does not have the full values of a sharded parameter,
// so for such a parameter the ranks compare the values that users assigned.
//
// If each rank computes every update itself (`optim.update` is replicated, as in `ddp`), different
// processors may round differently. In that case, a difference by rounding is not an error, but it
// ends the sampling.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "src/exec/rank.h"

namespace penstock::exec {

class ReplicaEdits {
 public:
  static constexpr int64_t kSamples = 32;
  static constexpr int64_t kStepsPerSample = 32;

  explicit ReplicaEdits(Rank& rank);

  struct Facts {
    uint64_t counted = 0;
    double sample = 0.0;  // a whole number
  };
  // Returns this rank's facts. A sample on a device is not in the result: it is appended to `there`
  // as a scalar in double.
  Facts look(std::vector<at::Tensor>* there);
  // [all ranks] Takes the facts of all ranks, by rank. If ranks hold different values, all ranks
  // throw a RuntimeFault that names the parameter and the ranks.
  void agree(const std::vector<Facts>& all);

  // Returns a hash of a tensor's values.
  static uint64_t print_of(const at::Tensor& values);

 private:
  struct Print;  // of one parameter on one rank
  struct ReplicaPlace {
    UnitState* unit = nullptr;
    Flat* flat = nullptr;
    Slot* slot = nullptr;
  };
  bool alike(int rank, int other, bool values) const;
  Print print(const ReplicaPlace& place) const;
  std::string suspects(bool counted, bool sampled) const;
  void compare(const std::string& suspects);
  [[noreturn]] void refuse(size_t number, int rank, int other);
  at::Tensor sample();
  void choose();
  void settle();

  Rank& rank_;
  std::vector<ReplicaPlace> places_;               // of this stage
  std::vector<const ModelPlacement*> placements_;  // by slot number, over all stages
  std::vector<const ModelPlacement*> different_;   // one of each kind in placements_
  std::vector<uint32_t> agreed_;  // by place: the version counter at the last agreement
  // The sampled elements of each flat that rests whole, in the flat's memory.
  std::vector<std::pair<const Flat*, at::Tensor>> sampled_;
  int64_t turn_ = 0;  // number of agreements
  bool samples_ = true;
};

}  // namespace penstock::exec
