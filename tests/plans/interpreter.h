#pragma once
// Interpreter: runs any plan of a training step on ranks that are threads, with plain buffers of
// doubles. Bytes move only if a plan line moves them, so a missing or wrong move ends in an error
// or in wrong weights. Casts change no values here.
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
  std::string error;  // error of the first rank that failed; empty if none failed
  double deviation =
      0;  // largest difference on any rank in weights, gradient norms or input gradients
};

// `plans`: one plan per rank, one plan for all ranks, or one per rank of the pipeline. Every
// training step of the problem runs the same plan.
Outcome interpret(const Training& run, const std::vector<Plan>& plans);

}  // namespace penstock::plans
