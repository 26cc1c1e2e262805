#pragma once
// Norm: the exchange of all ranks before an update. It computes the global gradient norm and
// agrees on the accumulation window ([Note: One window]). Used only by the model's thread.
#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "penstock/config.h"
#include "src/exec/gradients.h"
#include "src/exec/replica_edits.h"

namespace penstock::exec {

// Counts of the window, which are added up over the ranks together with the norm.
struct Told {
  double loss = 0.0, losses = 0.0;  // sum and number of the losses
  double samples = 0.0, tokens = 0.0;
  void add(const Told& other) {
    loss += other.loss;
    losses += other.losses;
    samples += other.samples;
    tokens += other.tokens;
  }
};

struct Counted {
  Told told;
  at::Tensor loss_there;  // device scalar: losses that are not in told.loss yet; or undefined
};

// Results of the exchange, equal on all ranks.
struct Seen {
  double grad_norm = 0.0;  // norm of the averaged gradient, before clipping
  Told told;               // counts over all ranks
};

// Rules for updates, in addition to the settings of the optimizer.
struct UpdateRules {
  bool keeps_second_moments = false;  // no update after their first one
  double whole_divisor = 1.0;         // of the gradient sums of a full window
};

// Arguments of one step.
struct Update {
  std::vector<OptimizerConfig> groups;  // by parameter group
  double clip = 0.0;
  std::string bad;                 // first non-finite contribution on this rank, or ""
  std::function<void()> external;  // the user's optimizer; empty: the engine's kernels
  Counted counted;
  // Returns this rank's text about the window, which is sent with the norm. It has the same length
  // on every rank.
  std::function<std::string()> say;
  // Takes the texts of all ranks, by rank. Returns the divisor of the gradients (number of averaged
  // micro-batches times loss scale). Returns 0 if it moved gradients or changed the text of say().
  // In that case the exchange runs again. An exception ends the update before anything is written.
  std::function<double(const std::vector<std::string>&)> hear;
  UpdateRules rules{};
};

class Norm {
 public:
  Norm(Rank& rank, Lanes& lanes, Gradients& gradients)
      : rank_(rank), lanes_(lanes), gradients_(gradients), edits_(rank) {}

  // What a rank does after the last backward of its window.
  enum class Next : char { kStep, kForward, kBackward };

  struct Result {
    double total = 0.0;    // sum of squares
    double divisor = 0.0;  // returned by hear()
    std::string bad;       // the first contribution that is not finite, or ""
    Told told;             // counts over all ranks
  };
  // [all ranks] Marks the parameters that got a gradient on any rank. All gradient moves must have
  // been submitted. Throws RuntimeFault on all ranks if users wrote to gathered parameters, if
  // parameters differ between ranks ([Note: Edits on some ranks]), or if ranks made different
  // device collectives before the previous norm. Collectives through the host are compared one by
  // one.
  Result exchange(const comm::Label& label, const Update& update);

  // The label of the exchange in every plan.
  static constexpr const char* kLabel = "norm ()";
  // Returns the payload of a rank that runs a forward or a backward after the window's last
  // backward, although a step should follow. The rank sends it in place of the norm's payload.
  // `said`: a text such as say() returns.
  static std::string going_on(const std::vector<UnitState>& units, Next next,
                              const std::string& said);
  // Takes such payloads of all ranks, by rank. If the ranks do not all go on in the same way,
  // throws a RuntimeFault on all of them, so that no rank waits until a timeout.
  static void compare(const std::vector<std::string>& payloads);

 private:
  // This rank's values before the exchange.
  struct Own {
    double squares = 0.0;
    std::string bad;     // the first contribution that is not finite, or ""
    bool doubt = false;  // `bad` counts only if the total is not finite too
    std::string edited;  // a gathered parameter that users wrote to, or ""
    Told told;
    ReplicaEdits::Facts edits;
  };
  struct Head;
  Own look(const Update& update);
  static std::string payload_of(const Head& head, const std::string& flags,
                                const std::string& said);
  void compare_history(const std::vector<std::string>& all, const Head& mine) const;
  std::array<uint64_t, 2> history();

  // Hash of the device collectives that a lane made up to one point in its queue.
  struct Made {
    uint64_t history = 0;
    device::Fence seen;
  };

  Rank& rank_;
  Lanes& lanes_;
  Gradients& gradients_;
  ReplicaEdits edits_;
  std::array<std::shared_ptr<Made>, 2> before_{};  // at the previous norm: gather lane, reduce lane
};

}  // namespace penstock::exec
