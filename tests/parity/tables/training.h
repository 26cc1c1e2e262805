#pragma once
// One training loop for plain torch and for the engine, and the results to compare.
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
  std::vector<Tensors> gradients;  // one entry for each time that the first window read them
  std::vector<Tensors> reads;      // values of gathered parameters
  Tensors weights;                 // the masters of all parameters, at the end
  Tensors own;                     // the model's own parameters, after the engine was closed
};

// Plain torch or the engine, with one call for each thing that a loop may do. Used by one thread.
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

// Returns the device of that rank's model. Called before the model is made.
c10::Device place_of(int rank);

// Trains on the whole global batch in one process. It computes in `dtype`, with fp32 masters.
Trace train_plainly(const Draw& draw, Dtype dtype);

// Makes an engine. Throws what the engine's constructor throws.
std::unique_ptr<Trainer> start_engine(const Draw& draw, std::shared_ptr<ranks::NetImpl> net,
                                      const std::shared_ptr<Group>& group);
Trace train(const Loop& loop, Trainer& trainer);
Tensors start_weights();  // before any training

}  // namespace penstock::tables
