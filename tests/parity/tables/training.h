#pragma once
// One training loop for plain torch and for the engine, and what it leaves to be compared.
#include <torch/types.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "penstock/core.h"
#include "penstock/group.h"
#include "tests/parity/tables/draw.h"
#include "tests/ranks/thread_ranks.h"

namespace penstock::tables {

using Tensors = std::map<std::string, torch::Tensor>;  // by parameter, fp32

struct Trace {
  std::vector<double> losses, norms;
  std::vector<Tensors> gradients;  // each time they were looked at, in the first window
  std::vector<Tensors> reads;      // of gathered parameters
  Tensors weights;                 // the masters of all parameters, at the end
  Tensors own;                     // the model's own parameters, after the engine was closed
};

// Who trains: one call for each thing that a loop may do. Used from one thread.
class Trainer {
 public:
  virtual ~Trainer() = default;
  virtual torch::Tensor forward(int step, int micro) = 0;
  virtual double evaluate(int step, int micro) = 0;
  virtual void backward(const torch::Tensor& loss, bool again) = 0;
  virtual Tensors gradients() = 0;  // averaged over the backwards of the window so far
  virtual bool step(bool force) = 0;
  virtual double grad_norm() const = 0;
  virtual Tensors read() = 0;
  virtual void write() = 0;
  virtual void save_and_load(const Loop& loop) = 0;
  virtual Tensors weights() = 0;
  virtual Tensors close() = 0;  // the model's own parameters
};

// Where that rank's model is; called on its thread before it is made.
c10::Device place_of(int rank);

// All of a global batch in one process; `dtype` is what it computes in, over fp32 masters.
Trace train_plainly(const Draw& draw, Dtype dtype);

// The engine's constructor; throws what it throws.
std::unique_ptr<Trainer> start_engine(const Draw& draw, std::shared_ptr<ranks::NetImpl> net,
                                      const std::shared_ptr<Group>& group);
Trace train(const Loop& loop, Trainer& trainer);
Tensors start_weights();  // before any training

}  // namespace penstock::tables
