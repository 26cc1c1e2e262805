#include "src/plan/pipeline_schedule.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <set>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock {

namespace {

[[noreturn]] void refuse_schedule(const std::string& why) {
  throw ConfigError("[plan::Schedule] " + why);
}

// The schedule of arXiv:1811.06965. Virtual stages are scheduled breadth first (arXiv:2211.05953).
Schedule gpipe(const PipelineShape& shape) {
  Schedule schedule;
  for (int rank = 0; rank < shape.ranks; ++rank) {
    std::vector<Action>& actions = schedule.ranks.emplace_back();
    for (int chunk = 0; chunk < shape.virtual_stages; ++chunk) {
      const int stage = chunk * shape.ranks + rank;
      for (int micro = 0; micro < shape.micro; ++micro) actions.push_back({stage, true, micro});
    }
    for (int chunk = shape.virtual_stages - 1; chunk >= 0; --chunk) {
      const int stage = chunk * shape.ranks + rank;
      for (int micro = 0; micro < shape.micro; ++micro) actions.push_back({stage, false, micro});
    }
  }
  return schedule;
}

// The actions of one rank in the order of its turns, with micro-batches in order and stages round
// robin.
class Turns {
 public:
  Turns(int rank, const PipelineShape& shape, int round)
      : rank_(rank), shape_(shape), round_(round) {}

  Action next(bool forward) {
    int& turn = forward ? forwards_ : backwards_;
    int chunk = turn++ / round_ % shape_.virtual_stages;
    if (!forward) chunk = shape_.virtual_stages - 1 - chunk;
    const int stage = chunk * shape_.ranks + rank_;
    return {stage, forward, micro_[{stage, forward}]++};
  }

 private:
  const int rank_;
  const PipelineShape& shape_;
  const int round_;  // micro-batches of a stage before the next stage's turn
  int forwards_ = 0, backwards_ = 0;
  std::map<std::pair<int, bool>, int> micro_;
};

// Warm-up as in arXiv:2104.04473, section 2.2: later ranks start backwards earlier.
Schedule one_forward_one_backward(const PipelineShape& shape) {
  const int num_rounds = std::max(1, shape.micro / shape.ranks);
  if (shape.virtual_stages > 1 && shape.micro % num_rounds != 0) {
    refuse_schedule(concat("\"interleaved\" on ", shape.ranks, " ranks runs ", shape.micro,
                           " micro-batches in ", num_rounds,
                           " rounds, which must be of equal size: change "
                           "\"batch.accumulate\""));
  }
  const int round = shape.virtual_stages > 1 ? shape.micro / num_rounds : shape.micro;
  const int total = shape.micro * shape.virtual_stages;
  Schedule schedule;
  // `ahead`: number of forwards before the first backward. With virtual stages it is one round of
  // all stages except the last, plus two per later rank.
  for (int rank = 0; rank < shape.ranks; ++rank) {
    const int behind = shape.ranks - 1 - rank;
    const int ahead =
        shape.virtual_stages > 1 ? (shape.virtual_stages - 1) * round + 2 * behind : behind;
    const int warm_up = std::min(total, ahead);
    std::vector<Action>& actions = schedule.ranks.emplace_back();
    Turns turns(rank, shape, round);
    for (int i = 0; i < warm_up; ++i) actions.push_back(turns.next(true));
    for (int i = warm_up; i < total; ++i) {
      actions.push_back(turns.next(true));
      actions.push_back(turns.next(false));
    }
    for (int i = 0; i < warm_up; ++i) actions.push_back(turns.next(false));
  }
  return schedule;
}

// [Note: Zero bubble] Rank r does the weights of a micro-batch after the inputs of r later ones,
// because the ranks behind it are that far ahead.
Schedule zero_bubble(const PipelineShape& shape) {
  Schedule schedule;
  for (int rank = 0; rank < shape.ranks; ++rank) {
    std::vector<Action>& actions = schedule.ranks.emplace_back();
    int forwards = 0, weights = 0;
    const auto weights_until = [&](int end) {
      while (weights < end) actions.push_back({rank, false, weights++, BackwardPart::kWeights});
    };
    const auto forwards_until = [&](int end) {
      while (forwards < std::min(end, shape.micro)) actions.push_back({rank, true, forwards++});
    };
    for (int micro = 0; micro < shape.micro; ++micro) {
      forwards_until(shape.ranks - rank + micro);
      actions.push_back({rank, false, micro, BackwardPart::kInputs});
      weights_until(micro + 1 - rank);
    }
    weights_until(shape.micro);
  }
  return schedule;
}

int number(std::string_view text, std::string_view cell) {
  int value = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0)
    refuse_schedule(concat("cell '", cell, "' is not an action such as 0F0 or 3B7"));
  return value;
}

Action parse_action(std::string_view cell) {
  const size_t letter = cell.find_first_of("FBIW");
  if (letter == std::string_view::npos) number("", cell);
  return {number(cell.substr(0, letter), cell), cell[letter] == 'F',
          number(cell.substr(letter + 1), cell),
          cell[letter] == 'I'   ? BackwardPart::kInputs
          : cell[letter] == 'W' ? BackwardPart::kWeights
                                : BackwardPart::kAll};
}

// One slot for each forward, each backward that sends a gradient, and each backward of weights.
class Slots {
 public:
  explicit Slots(const Schedule& schedule) : num_micro_(schedule.num_micro()) {
    ends_.assign(3 * static_cast<size_t>(schedule.num_stages() * num_micro_), -1);
  }
  // The time at which the action ended; -1 before that.
  double& end_of(const Action& action) {
    const int kind = action.forward ? 0 : action.part == BackwardPart::kWeights ? 2 : 1;
    return ends_[static_cast<size_t>((3 * action.stage + kind) * num_micro_ + action.micro)];
  }
  // Returns whether `action` can run: what it waits for, and the forward of a backward, has ended.
  bool ready(const Action& action, const Action& needed) {
    if (needed.stage >= 0 && end_of(needed) < 0) return false;
    return action.forward || end_of({action.stage, true, action.micro}) >= 0;
  }

 private:
  const int num_micro_;
  std::vector<double> ends_;
};

}  // namespace

std::string Action::text() const {
  constexpr std::array kLetters = {"B", "I", "W"};
  return concat(stage, forward ? "F" : kLetters[static_cast<size_t>(part)], micro);
}

int Schedule::num_stages() const {
  int most = -1;
  for (const auto& actions : ranks)
    for (const Action& action : actions) most = std::max(most, action.stage);
  return most + 1;
}

int Schedule::num_micro() const {
  int most = -1;
  for (const auto& actions : ranks)
    for (const Action& action : actions) most = std::max(most, action.micro);
  return most + 1;
}

std::string Schedule::text() const {
  std::string out;
  for (const auto& actions : ranks) {
    std::vector<std::string> cells;
    for (const Action& action : actions) cells.push_back(action.text());
    out += join(cells, ",") + "\n";
  }
  return out;
}

Action before(const Action& action, int num_stages) {
  if (action.forward) return {action.stage - 1, true, action.micro};
  if (action.part == BackwardPart::kWeights) return {action.stage, false, action.micro};
  if (action.stage + 1 == num_stages) return {action.stage, true, action.micro};
  return {action.stage + 1, false, action.micro};
}

const std::vector<std::string>& schedule_names() {
  static const std::vector<std::string> kNames = {"gpipe", "1f1b", "interleaved", "zero_bubble"};
  return kNames;
}

Schedule make_schedule(const std::string& name, const PipelineShape& shape) {
  const std::vector<std::string>& names = schedule_names();
  if (std::find(names.begin(), names.end(), name) == names.end()) {
    const std::string nearest_name = nearest(name, names);
    refuse_schedule(
        concat("there is no schedule \"", name, "\"",
               nearest_name.empty() ? "" : concat("; did you mean \"", nearest_name, "\"?"),
               " (valid: ", join(names, ", "), ")"));
  }
  if (shape.ranks < 1 || shape.virtual_stages < 1 || shape.micro < 1) {
    refuse_schedule(concat("a pipeline cannot have ", shape.ranks, " ranks with ",
                           shape.virtual_stages, " stages each and ", shape.micro,
                           " micro-batches: each number must be at least 1"));
  }
  if ((name == "1f1b" || name == "zero_bubble") && shape.virtual_stages > 1) {
    refuse_schedule(concat("\"", name, "\" has one stage per rank, not ", shape.virtual_stages,
                           ": use \"interleaved\" for several"));
  }
  if (name == "zero_bubble") return zero_bubble(shape);
  if (name == "gpipe") return gpipe(shape);
  if (name == "1f1b" || name == "interleaved") return one_forward_one_backward(shape);
  throw Bug(concat("[plan::make_schedule] no function makes the schedule \"", name, "\""));
}

Schedule parse_schedule(std::string_view csv) {
  Schedule schedule;
  for (const std::string& line : split(csv, '\n')) {
    if (trim(line).empty()) continue;
    std::vector<Action>& actions = schedule.ranks.emplace_back();
    for (const std::string& cell : split(line, ',')) {
      if (!trim(cell).empty()) actions.push_back(parse_action(trim(cell)));
    }
  }
  check_schedule(schedule);
  return schedule;
}

// Checks the set of actions. replay() finds cyclic waits afterwards.
void check_schedule(const Schedule& schedule) {
  const int num_stages = schedule.num_stages(), num_micro = schedule.num_micro();
  if (num_stages == 0) refuse_schedule("the schedule has no actions");
  std::set<Action> seen;
  for (int rank = 0; rank < schedule.num_ranks(); ++rank) {
    for (const Action& action : schedule.ranks[rank]) {
      const int owner = rank_of_stage(action.stage, schedule.num_ranks());
      if (owner != rank) {
        refuse_schedule(concat(action.text(), " is on rank ", rank, ", but stage ", action.stage,
                               " is on rank ", owner));
      }
      if (!seen.insert(action).second) refuse_schedule(concat(action.text(), " is listed twice"));
    }
  }
  for (int stage = 0; stage < num_stages; ++stage) {
    for (int micro = 0; micro < num_micro; ++micro) {
      const Action forward{stage, true, micro}, backward{stage, false, micro};
      const Action inputs{stage, false, micro, BackwardPart::kInputs};
      const Action weights{stage, false, micro, BackwardPart::kWeights};
      const bool splits = seen.contains(inputs) || seen.contains(weights);
      for (const Action& action :
           splits ? std::vector{forward, inputs, weights} : std::vector{forward, backward}) {
        if (!seen.contains(action)) refuse_schedule(concat(action.text(), " is missing"));
      }
      if (splits && seen.contains(backward)) {
        refuse_schedule(concat(backward.text(), " is listed beside its parts ", inputs.text(),
                               " and ", weights.text()));
      }
    }
  }
  replay(schedule, 1, 2);  // throws if the order cannot finish
}

int next_stage(const Action& action, int num_stages) {
  if (action.part == BackwardPart::kWeights) return -1;
  const int to = action.stage + (action.forward ? 1 : -1);
  return to < num_stages ? to : -1;
}

std::vector<Action> in_rounds(const Schedule& schedule) {
  const int num_stages = schedule.num_stages();
  Slots slots(schedule);
  std::vector<size_t> next(schedule.ranks.size(), 0);
  std::vector<Action> order;
  for (bool any = true; any;) {
    any = false;
    for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
      if (next[rank] == schedule.ranks[rank].size()) continue;
      const Action& action = schedule.ranks[rank][next[rank]];
      if (!slots.ready(action, before(action, num_stages))) continue;
      any = true;
      ++next[rank];
      slots.end_of(action) = 0;
      order.push_back(action);
    }
  }
  return order;
}

// Runs each rank's actions as soon as their inputs have arrived, until no rank can continue.
Replay replay(const Schedule& schedule, double forward, double backward, double transfer) {
  const int num_stages = schedule.num_stages();
  const auto num_ranks = static_cast<size_t>(schedule.num_ranks());
  Slots slots(schedule);
  std::vector<size_t> next(num_ranks, 0);
  std::vector<double> time(num_ranks, 0), work(num_ranks, 0);
  std::vector<int> held(num_ranks, 0);
  Replay made;
  made.most_held.assign(num_ranks, 0);
  for (bool any = true; any;) {
    any = false;
    for (size_t rank = 0; rank < num_ranks; ++rank) {
      if (next[rank] == schedule.ranks[rank].size()) continue;
      const Action& action = schedule.ranks[rank][next[rank]];
      const Action needed = before(action, num_stages);
      if (!slots.ready(action, needed)) continue;
      any = true;
      ++next[rank];
      const bool travels =
          needed.stage >= 0 && needed.stage % schedule.num_ranks() != static_cast<int>(rank);
      const double arrived = needed.stage < 0 ? 0 : slots.end_of(needed);
      const double ready = arrived + (travels ? transfer : 0);
      const double halves = action.part == BackwardPart::kAll ? 1 : 0.5;
      const double takes = action.forward ? forward : backward * halves;
      time[rank] = std::max(time[rank], ready) + takes;
      work[rank] += takes;
      slots.end_of(action) = time[rank];
      held[rank] += static_cast<int>(action.forward) - static_cast<int>(action.is_last());
      made.most_held[rank] = std::max(made.most_held[rank], held[rank]);
    }
  }
  std::vector<std::string> stuck;
  for (size_t rank = 0; rank < num_ranks; ++rank) {
    if (next[rank] == schedule.ranks[rank].size()) continue;
    const Action& action = schedule.ranks[rank][next[rank]];
    stuck.push_back(
        concat("rank ", rank, " at ", action.text(), " for ", before(action, num_stages).text()));
  }
  if (!stuck.empty())
    refuse_schedule(concat("the order cannot finish; waiting: ", join(stuck, ", ")));
  made.makespan = *std::max_element(time.begin(), time.end());
  for (const double own : work) made.idle.push_back(made.makespan - own);
  return made;
}

}  // namespace penstock
