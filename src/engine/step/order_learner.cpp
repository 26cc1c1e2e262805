#include "src/engine/step/order_learner.h"

#include <algorithm>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/base/turns.h"

namespace penstock::engine {

namespace {

// Returns the visits, with the end of each whole unit moved to just before the end of the root.
std::vector<Visit> whole_until_the_end(std::vector<Visit> visits) {
  std::vector<Visit> ends;
  for (Visit& visit : visits) {
    if (visit.mark != Mark::kWhole) continue;
    visit.mark = Mark::kBegin;
    ends.push_back({visit.unit, Mark::kEnd, visit.stage});
  }
  const bool root_ends = !visits.empty() && visits.back().mark == Mark::kEnd;
  visits.insert(root_ends ? visits.end() - 1 : visits.end(), ends.begin(), ends.end());
  return visits;
}

}  // namespace

OrderLearner::OrderLearner(ModelDesc assumed, Scope scope)
    : assumed_(std::move(assumed)), scope_(std::move(scope)) {}

void OrderLearner::begin_forward(bool trains) {
  in_forward_ = trains && !done_;
  if (trains) forward_.clear();
}

void OrderLearner::begin_backward() {
  if (!done_) backward_.clear();
}

bool OrderLearner::may_return() const {
  return scope_.moves_params && !scope_.interleaves && !stays_whole_ && !saw_the_same_;
}

void OrderLearner::keep_whole() {
  stays_whole_ = true;
  assumed_.backward = whole_until_the_end(std::move(assumed_.backward));
}

void OrderLearner::begin(Op pass, int unit) {
  if (records(pass)) record_of(pass).begin(unit);
}

void OrderLearner::end(Op pass, int unit) {
  if (!records(pass)) return;
  // The unit's gradients came although it was not entered, so its backward needs no parameters (as
  // for an embedding).
  if (pass == Op::kBackward && scope_.moves_params && !backward_.has(unit)) {
    return backward_.add({unit, Mark::kGradient});
  }
  record_of(pass).end(unit);
}

void OrderLearner::add(Op pass, const Visit& visit) {
  if (records(pass)) record_of(pass).add(visit);
}

bool OrderLearner::spans(int unit) const {
  return std::find(spanning_.begin(), spanning_.end(), unit) != spanning_.end();
}

bool OrderLearner::enters_again(int unit) const {
  return scope_.moves_params && in_forward_ && forward_.has(unit);
}

// Returns the recorded visits, and whole visits of units that did not run. A unit that did not run
// comes after its predecessor in the assumed order. If a rank runs the unit later, the visit is
// then in the right place.
std::vector<Visit> OrderLearner::all_of(const OrderRecord& record,
                                        const std::vector<Visit>& assumed) const {
  std::vector<Visit> visits = record.visits(static_cast<int>(assumed_.units.size()));
  std::erase_if(visits, [&](const Visit& visit) { return !record.has(visit.unit); });
  const auto of = [](int unit) { return [unit](const Visit& one) { return one.unit == unit; }; };
  int before = -1;
  for (const Visit& visit : assumed) {
    if (visit.unit != 0 && std::none_of(visits.begin(), visits.end(), of(visit.unit))) {
      // The place is after the first visit of unit `before`. If that unit runs twice, other units
      // come before its second visit.
      auto place = std::find_if(visits.begin(), visits.end(), of(before));
      place = place == visits.end() ? visits.begin() : place + 1;
      const bool stays = visit.mark == Mark::kBegin;
      visits.insert(place, {visit.unit, stays ? Mark::kBegin : Mark::kWhole});
      const bool root_ends = visits.back().mark == Mark::kEnd && visits.back().unit == 0;
      if (stays) visits.insert(visits.end() - (root_ends ? 1 : 0), {visit.unit, Mark::kEnd});
    }
    if (!spans(visit.unit)) before = visit.unit;
  }
  if (std::none_of(visits.begin(), visits.end(), of(0)) &&
      std::any_of(assumed.begin(), assumed.end(), of(0))) {
    visits.push_back({0, Mark::kWhole});
  }
  return visits;
}

std::vector<Visit> OrderLearner::seen_forward() const {
  if (!scope_.units_are_entered || forward_.empty()) return assumed_.forward;
  std::vector<Visit> visits = all_of(forward_, assumed_.forward);
  // A tile that was not used inside the forward gets no visit. It is gathered on demand.
  std::erase_if(visits, [this](const Visit& visit) {
    return scope_.is_tile(visit.unit) && !forward_.has(visit.unit);
  });
  add_spanning(visits);
  return visits;
}

std::vector<Visit> OrderLearner::seen_backward() const {
  if (backward_.empty()) return assumed_.backward;
  std::vector<Visit> visits = all_of(backward_, assumed_.backward);
  // A unit that the backward did not reach (for example a frozen one) keeps its assumed visit if
  // that visit uses no parameters.
  for (const Visit& visit : assumed_.backward) {
    if (visit.mark != Mark::kGradient || backward_.has(visit.unit)) continue;
    std::replace(visits.begin(), visits.end(), Visit{visit.unit, Mark::kWhole}, visit);
  }
  add_spanning(visits);
  return visits;
}

// Spanning units begin right after the root and end right before it, in the order in which the
// events enter and leave them.
void OrderLearner::add_spanning(std::vector<Visit>& visits) const {
  std::erase_if(visits, [this](const Visit& visit) { return spans(visit.unit); });
  auto begin = visits.begin() + 1;
  for (const int unit : spanning_) begin = visits.insert(begin, {unit, Mark::kBegin}) + 1;
  for (const int unit : spanning_) visits.insert(visits.end() - 1, {unit, Mark::kEnd});
}

ModelDesc OrderLearner::agree(int64_t off_plan, const ShareText& share) {
  done_ = true;
  ModelDesc seen = assumed_;
  seen.forward = seen_forward();
  seen.backward = seen_backward();
  const std::string mine = visits_text(seen.forward) + "\n" + visits_text(seen.backward);
  const std::string difference = first_difference(share("order of step one", mine));
  saw_the_same_ = difference.empty();
  if (saw_the_same_) {
    stays_whole_ = false;
    return seen;
  }
  // Ranks may skip different units, so the assumed order is kept. If parameters move, this order
  // must have fit every rank. If only gradients move, any common order is right.
  bool served = true;
  for (const std::string& count : share("off plan in step one", std::to_string(off_plan))) {
    served &= count == "0";
  }
  if (scope_.moves_params && !served) {
    throw RuntimeFault(
        concat("[engine::replan] in the first step the ranks ran their units in different orders, "
               "but all ranks must gather units in the same order: ",
               difference, ". ", kUnequalUnits));
  }
  return assumed_;
}

}  // namespace penstock::engine
