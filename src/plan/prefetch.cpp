// The pass that starts gathers early: prefetch() of passes.h.
#include <algorithm>
#include <cstddef>
#include <map>
#include <utility>
#include <vector>

#include "src/plan/passes.h"
#include "src/plan/step_queries.h"

namespace penstock {

namespace {

// Rebuilds the plan step by step. For every compute step, counts the bytes that are gathered before
// this step and first used after it.
class Prefetcher {
 public:
  Prefetcher(const ModelDesc& model, int64_t budget) : model_(model), budget_(budget) {}

  void add(const Step& step) {
    int64_t ahead = 0;
    for (const auto& [unit, bytes] : unused_)
      if (std::find(step.units.begin(), step.units.end(), unit) == step.units.end()) ahead += bytes;
    if (step.is_compute())
      for (const int unit : step.units) unused_.erase(unit);
    if (!is_gather(step)) {
      entries_.push_back({step, ahead});
      return;
    }
    insert(step);
    for (const int unit : step.units) unused_[unit] = unit_bytes(model_.units[unit]);
  }

  Plan finish() && {
    Plan plan;
    for (Entry& entry : entries_) plan.steps.push_back(std::move(entry.step));
    return plan;
  }

 private:
  struct Entry {
    Step step;
    int64_t bytes_ahead = 0;  // counted at compute steps
  };

  // Moves the gather up past compute steps until a step of its unit, another gather or the budget
  // stops it.
  void insert(const Step& move) {
    const int64_t bytes = param_bytes(move, model_);
    size_t best = entries_.size();
    for (size_t i = entries_.size(); i > 0; --i) {
      const Entry& above = entries_[i - 1];
      if (is_wall(above.step) || is_gather(above.step) || in_order(above.step, move)) break;
      if (!above.step.is_compute()) continue;
      if (above.bytes_ahead + bytes > budget_) break;
      best = i - 1;
    }
    for (size_t i = best; i < entries_.size(); ++i) entries_[i].bytes_ahead += bytes;
    entries_.insert(entries_.begin() + static_cast<std::ptrdiff_t>(best), {move, 0});
  }

  const ModelDesc& model_;
  const int64_t budget_;
  std::vector<Entry> entries_;
  std::map<int, int64_t> unused_;
};

}  // namespace

Plan prefetch(const Plan& plan, const ModelDesc& model, int64_t budget_bytes) {
  Prefetcher prefetcher(model, budget_bytes);
  for (const Step& step : plan.steps) prefetcher.add(step);
  return std::move(prefetcher).finish();
}

}  // namespace penstock
