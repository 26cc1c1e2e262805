#pragma once
// Norm: what the ranks tell each other before an update: the norm of the gradients, and what they
// saw of the window. Compute thread only.
#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "penstock/config.h"
#include "src/exec/gradients.h"

namespace penstock::exec {

// What this rank counted in the window, added up over the ranks with the norm.
struct Told {
  double loss = 0.0, losses = 0.0;  // their sum and number
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
  at::Tensor loss_there;  // a part of told.loss that is on a device, or undefined
};

// What all ranks know after it.
struct Seen {
  double grad_norm = 0.0;  // of the averaged gradient, before clipping
  Told told;               // by all of them
};

// What one step is asked for.
struct Update {
  std::vector<OptimizerConfig> groups;  // by parameter group
  double clip = 0.0;
  std::string bad;                 // first non-finite contribution on this rank, or empty
  std::function<void()> external;  // the user's optimizer; empty = our kernels
  Counted counted;
  // What this rank says of the window: as long everywhere, and told with the norm.
  std::function<std::string()> say;
  // What all of them said, by rank. Returns what the gradients are divided by (micro-batches
  // averaged over, times the loss scale); or 0 when it moved gradients or changed what say() says,
  // so that they have to be told again. What it throws ends the update before anything is written.
  std::function<double(const std::vector<std::string>&)> hear;
};

class Norm {
 public:
  Norm(Rank& rank, Lanes& lanes, Gradients& gradients)
      : rank_(rank), lanes_(lanes), gradients_(gradients) {}

  struct Result {
    double total = 0.0;    // of squares
    double divisor = 0.0;  // what hear() said
    std::string bad;       // the first contribution that is not finite, or empty
    Told told;             // of all ranks
  };
  // [all ranks] Marks the parameters that any rank has touched. Every move of gradients has been
  // given to its lane. Throws RuntimeFault on all ranks where users wrote to gathered parameters,
  // and where ranks made other collectives on their devices up to the norm before (those through
  // the host are compared one by one).
  Result exchange(const comm::Label& label, const Update& update);

 private:
  // What one rank knows of the gradients before it is told of the others'.
  struct Own {
    double squares = 0.0;
    std::string bad;     // the first contribution that is not finite, or empty
    bool doubt = false;  // it counts only where the sum is not finite either
    std::string edited;  // a parameter that was written to where it is a gathered copy
    Told told;
  };
  Own look(const Update& update);
  bool stay_on_device() const;  // gradients
  std::array<uint64_t, 2> history();

  // What a lane has made of collectives when it comes to this.
  struct Made {
    uint64_t history = 0;
    device::Fence seen;
  };

  Rank& rank_;
  Lanes& lanes_;
  Gradients& gradients_;
  std::array<std::shared_ptr<Made>, 2> before_{};  // at the norm before; gathers, reductions
};

}  // namespace penstock::exec
