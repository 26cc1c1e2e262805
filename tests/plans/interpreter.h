#pragma once
// Interpreter: runs any plan of a training step on ranks that are threads, over plain double
// buffers. Every byte moves because a step says so: a plan that lacks a move, or has a wrong one,
// ends in an error or in wrong weights. Casts are exact here.
#include <chrono>
#include <string>
#include <vector>

#include "src/plan/plan.h"
#include "tests/plans/chain_model.h"
#include "tests/plans/exchange.h"

namespace penstock::plans {

struct Training {
  const Problem& problem;
  const Trained& expected;
  const Table& table;
  Mesh mesh;
  int num_micro = 1;
  int num_stages = 1;
  Exchange::Transport transport = Exchange::Transport::kBuffered;
  std::chrono::milliseconds timeout{5000};
};

struct Outcome {
  std::string error;  // of the first rank that failed; empty when all ended
  double deviation =
      0;  // largest difference, on any rank, in weights, gradient norms, input gradients
};

// plans[rank], or one plan for all ranks, or one for each rank of the pipeline; the same plan for
// every training step of the problem.
Outcome interpret(const Training& run, const std::vector<Plan>& plans);

}  // namespace penstock::plans
