#include "src/plan/cost/pipeline_timeline.h"

#include <algorithm>
#include <sstream>
#include <tuple>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/plan/cost/simulator.h"
#include "src/plan/cost/step_time.h"
#include "src/plan/pipeline_plan.h"
#include "src/plan/step_queries.h"
#include "src/plan/strategy.h"

namespace penstock {

namespace {

// Key of a received message: unit, micro-batch, forward or backward.
using Arrival = std::tuple<int, int, Role>;

int64_t numel(const UnitDesc& unit, bool trained_only = false) {
  int64_t sum = 0;
  for (const FlatDesc& flat : unit.flats) sum += flat.trainable || !trained_only ? flat.numel : 0;
  return sum;
}

// The part of a backward's time that the gradients of the inputs take (work_of()).
double inputs_share(const UnitDesc& unit) {
  const auto params = static_cast<double>(numel(unit));
  return params > 0 ? params / (params + static_cast<double>(numel(unit, true))) : 0.5;
}

// Times the lines of one rank's plan.
class LineTimer {
 public:
  LineTimer(const Plan& plan, const Table& table, const ModelDesc& part, const Mesh& mesh,
            const Machine& machine, const std::vector<UnitWork>& work)
      : plan_(plan),
        table_(table.on(mesh)),
        part_(part),
        mesh_(mesh),
        machine_(machine),
        work_(work),
        bytes_(bytes_by_line(plan, table, part, mesh)) {
    for (const UnitDesc& unit : part.units) total_ += numel(unit);
  }

  TimedPlan time() && {
    for (size_t line = 0; line < plan_.steps.size(); ++line) {
      const Step& step = plan_.steps[line];
      double share = 0;
      if (step.is_compute()) {
        share =
            static_cast<double>(numel(part_.units[step.units[0]])) / static_cast<double>(total_);
      }
      timed_.lines.push_back({step, seconds(line), share});
    }
    return std::move(timed_);
  }

 private:
  double seconds(size_t line) {
    const Step& step = plan_.steps[line];
    switch (step.op) {
      case Op::kForward:
      case Op::kBackward: {
        // A unit with a begin mark computes at its end mark. A use computes no gradient yet.
        if (step.mark == Mark::kBegin || step.mark == Mark::kUse) return 0;
        const UnitWork& work = work_[step.units[0]];
        if (step.op == Op::kForward) return of(work.forward);
        const double inputs = inputs_share(part_.units[step.units[0]]) * of(work.backward);
        if (step.mark == Mark::kInputs) return inputs;
        if (step.mark == Mark::kWeights) return of(work.backward) - inputs;
        return of(work.backward) + (part_.units[step.units[0]].recomputed ? of(work.forward) : 0.0);
      }
      case Op::kUpdate: {
        const UnitDesc& unit = part_.units[step.units[0]];
        const Placement& place = table_.at(Role::kOptim, Phase::kUpdate);
        const double rate =
            place.tier == Tier::kDevice ? machine_.device_memory : machine_.host_memory;
        int64_t owned = 0;
        for (const FlatDesc& flat : unit.flats) {
          if (!flat.trainable) continue;
          owned += flat.numel / num_shards(place, flat.placement.mesh(mesh_));
        }
        return static_cast<double>(owned / unit.num_chunks) * kUpdateBytes / rate;
      }
      case Op::kMove:
      case Op::kSum:
      case Op::kSend:
      case Op::kPublish:
        return on_links(line);
      case Op::kMicro:
      case Op::kReceive:
      case Op::kDrop:
      case Op::kNorm:
        return 0;
    }
    return 0;
  }

  double of(const UnitWork::ComputePass& pass) const {
    return pass.flops / machine_.flops + pass.memory_bytes / machine_.device_memory;
  }

  // Links do not overlap within one line.
  double on_links(size_t line) {
    double seconds = 0;
    for (const auto& [link, bytes] : bytes_[line]) {
      timed_.sent[link] += bytes;
      const double rate = link == "local"         ? machine_.local
                          : link == "device-host" ? machine_.device_host
                          : link == "host-disk"   ? machine_.host_disk
                                                  : machine_.node;
      seconds += static_cast<double>(bytes) / rate;
    }
    return seconds;
  }

  const Plan& plan_;
  const Table table_;
  const ModelDesc& part_;
  const Mesh mesh_;
  const Machine machine_;
  const std::vector<UnitWork>& work_;
  const LineBytes bytes_;
  int64_t total_ = 0;
  TimedPlan timed_;
};

// Replays the plan of one rank. replay() passes messages between the ranks and makes the ranks wait
// for each other at the norm.
class RankReplay {
 public:
  RankReplay(const TimedPlan& plan, double overlap) : plan_(plan.lines), overlap_(overlap) {
    size_t num_units = 0;
    for (const TimedLine& line : plan_) {
      for (const int unit : line.step.units) {
        num_units = std::max(num_units, static_cast<size_t>(unit) + 1);
      }
      rank_.lines.push_back(line.seconds);
    }
    params_there_.assign(num_units, 0);
    rank_.sent = plan.sent;
  }

  enum class Stop : uint8_t { kReceive, kNorm, kEnd };

  // Runs until the plan ends or must wait. It waits at kReceive for expected data and at kNorm for
  // the other ranks.
  Stop run() {
    for (; next_ < plan_.size(); ++next_) {
      const Step& step = plan_[next_].step;
      if (step.op == Op::kReceive && !arrived_.contains(key_of(step))) return Stop::kReceive;
      if (step.op == Op::kNorm && !met_) return Stop::kNorm;
      perform(plan_[next_]);
    }
    return Stop::kEnd;
  }

  // A message that was sent since the last call, with its arrival time.
  struct TimedMessage {
    int hop, micro;
    Role role;
    double there;
  };
  std::vector<TimedMessage> sent() { return std::exchange(sent_, {}); }
  // The next receive of this kind in the plan takes the message.
  void take(const TimedMessage& message) {
    for (size_t i = next_; i < plan_.size(); ++i) {
      const Step& step = plan_[i].step;
      if (step.op != Op::kReceive || step.hop != -message.hop || step.micro != message.micro ||
          step.role != message.role || arrived_.contains(key_of(step))) {
        continue;
      }
      arrived_[key_of(step)] = message.there;
      return;
    }
  }

  double ready_for_norm() const { return std::max({compute_, gather_, reduce_}); }
  void meet(double when) {
    met_ = true;
    compute_ = gather_ = reduce_ = update_ = when;
  }

  Timeline::RankTime finish(double passes) {
    rank_.idle = passes - rank_.busy;
    return rank_;
  }
  double passes() const { return passes_; }
  double end() const { return std::max({compute_, gather_, reduce_, update_}); }
  std::string where() const { return plan_[next_].step.text(); }

 private:
  static Arrival key_of(const Step& step) { return {step.units[0], step.micro, step.role}; }

  void perform(const TimedLine& line) {
    const Step& step = line.step;
    switch (step.op) {
      case Op::kForward:
      case Op::kBackward:
        return compute(line);
      case Op::kMove:
        return move(line);
      case Op::kSum:
        reduce_ = std::max(reduce_, compute_) + on_lane(line.seconds);
        return;
      case Op::kSend: {
        double& lane = send_[step.hop > 0];
        lane = std::max(lane, compute_) + on_lane(line.seconds);
        sent_.push_back({step.hop, step.micro, step.role, lane});
        return;
      }
      case Op::kUpdate:
        update_ += on_lane(line.seconds);
        return;
      case Op::kPublish:
        gather_ = std::max(gather_, update_) + on_lane(line.seconds);
        return;
      case Op::kMicro:
      case Op::kReceive:
      case Op::kDrop:
      case Op::kNorm:
        return;
    }
  }

  // The work of a lane takes time from the computing cores (Machine::overlap).
  double on_lane(double takes) {
    compute_ += (1.0 - overlap_) * takes;
    return takes;
  }

  void compute(const TimedLine& line) {
    const Step& step = line.step;
    const int unit = step.units[0];
    if (step.mark == Mark::kBegin || step.mark == Mark::kUse) {
      issued_ = compute_ = std::max(compute_, params_there_[unit]);
      return;
    }
    const bool forward = step.op == Op::kForward;
    double begin = std::max(compute_, params_there_[unit]);
    const auto came = arrived_.find({unit, step.micro, forward ? Role::kAct : Role::kGrad});
    if (came != arrived_.end()) begin = std::max(begin, came->second);
    issued_ = begin;
    compute_ = begin;
    occupy(line.seconds);
    if (step.mark != Mark::kInputs) held_ += forward ? line.share : -line.share;
    rank_.most_held = std::max(rank_.most_held, held_);
  }

  void occupy(double takes) {
    compute_ += takes;
    passes_ = compute_;
    rank_.busy += takes;
  }

  // Parameter moves run on the gather lane, gradient moves before the norm on the reduce lane, and
  // all other moves on the update lane.
  void move(const TimedLine& line) {
    const Step& step = line.step;
    if (is_layer_exchange(step)) return occupy(line.seconds);
    const double takes = on_lane(line.seconds);
    if (step.role == Role::kParam) {
      gather_ = std::max(gather_, issued_) + takes;
      for (const int unit : step.units) params_there_[unit] = gather_;
    } else if (step.role == Role::kGrad && !met_) {
      reduce_ = std::max(reduce_, compute_) + takes;
    } else {
      update_ += takes;
    }
  }

  const std::vector<TimedLine>& plan_;
  const double overlap_;
  size_t next_ = 0;
  std::map<Arrival, double> arrived_;
  std::vector<TimedMessage> sent_;
  std::vector<double> params_there_;
  // End times of the lanes, and the start of the computation in progress.
  double compute_ = 0, gather_ = 0, reduce_ = 0, update_ = 0, issued_ = 0;
  double send_[2] = {0, 0};
  double passes_ = 0, held_ = 0;
  bool met_ = false;
  Timeline::RankTime rank_;
};

}  // namespace

double Timeline::bubble() const {
  double idle = 0, busy = 0;
  for (const RankTime& rank : ranks) {
    idle += rank.idle;
    busy += rank.busy;
  }
  return busy > 0 ? idle / busy : 0;
}

std::vector<UnitWork> work_of(const ModelDesc& model, double tokens) {
  std::vector<UnitWork> work;
  for (const UnitDesc& unit : model.units) {
    const auto params = static_cast<double>(numel(unit));
    const auto trained = static_cast<double>(numel(unit, true));
    work.push_back({{2 * params * tokens}, {2 * (params + trained) * tokens}});
  }
  return work;
}

std::string TimedPlan::text() const {
  std::string text;
  for (const TimedLine& line : lines) {
    text += concat(line.step.text(), "\t", line.seconds, "\t", line.share, "\n");
  }
  return text;
}

TimedPlan parse_timed_plan(std::string_view text) {
  TimedPlan plan;
  std::istringstream lines{std::string(text)};
  for (std::string line; std::getline(lines, line);) {
    const size_t tab = line.find('\t');
    TimedLine made;
    std::istringstream numbers(tab == std::string::npos ? "" : line.substr(tab));
    if (!(numbers >> made.seconds >> made.share)) {
      throw ConfigError(concat("[plan::parse_timed_plan] not a timed line: ", line));
    }
    made.step = parse_step(line.substr(0, tab));
    plan.lines.push_back(std::move(made));
  }
  return plan;
}

TimedPlan timed(const Plan& plan, const Table& table, const ModelDesc& part, const Mesh& mesh,
                const Machine& machine, const std::vector<UnitWork>& work) {
  return LineTimer(plan, table, part, mesh, machine, work).time();
}

Timeline replay(const std::vector<Plan>& plans, const Table& table, const ModelDesc& model,
                const Mesh& mesh, const Machine& machine, const std::vector<UnitWork>& work) {
  const auto num_ranks = static_cast<int>(plans.size());
  const ModelDesc held = with_holders(model, num_ranks);
  std::vector<TimedPlan> ranks;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const ModelDesc own = part(held, num_ranks, rank);
    ranks.push_back(timed(plans[static_cast<size_t>(rank)], table, own, mesh, machine, work));
  }
  return replay(ranks, machine.overlap);
}

Timeline replay(const std::vector<TimedPlan>& timed_ranks, double overlap) {
  const auto num_ranks = static_cast<int>(timed_ranks.size());
  std::vector<RankReplay> ranks;
  for (const TimedPlan& plan : timed_ranks) ranks.emplace_back(plan, overlap);
  using Stop = RankReplay::Stop;
  std::vector<Stop> stops(timed_ranks.size(), Stop::kReceive);
  const auto all_at = [&](Stop stop) {
    return std::all_of(stops.begin(), stops.end(), [&](Stop one) { return one == stop; });
  };
  while (!all_at(Stop::kEnd)) {
    bool any = false;
    for (int rank = 0; rank < num_ranks; ++rank) {
      stops[rank] = ranks[rank].run();
      for (const RankReplay::TimedMessage& message : ranks[rank].sent()) {
        any = true;
        ranks[(rank + message.hop + num_ranks) % num_ranks].take(message);
      }
    }
    if (all_at(Stop::kNorm)) {
      double when = 0;
      for (const RankReplay& rank : ranks) when = std::max(when, rank.ready_for_norm());
      for (RankReplay& rank : ranks) rank.meet(when);
    } else if (!any && !all_at(Stop::kEnd)) {
      std::vector<std::string> stuck;
      for (int rank = 0; rank < num_ranks; ++rank) {
        if (stops[rank] != Stop::kEnd)
          stuck.push_back(concat(rank, " at '", ranks[rank].where(), "'"));
      }
      throw ConfigError(
          concat("[plan::replay] pipeline ranks wait for messages that are never sent: ",
                 join(stuck, ", ")));
    }
  }
  Timeline timeline;
  for (const RankReplay& rank : ranks) timeline.passes = std::max(timeline.passes, rank.passes());
  for (RankReplay& rank : ranks) {
    timeline.ranks.push_back(rank.finish(timeline.passes));
    timeline.step = std::max(timeline.step, rank.end());
  }
  return timeline;
}

double simulated_bubble(const std::string& schedule, int num_ranks, int num_micro,
                        const std::vector<StageSeconds>& stages) {
  const auto num_stages = static_cast<int>(stages.size());
  if (num_ranks < 1 || num_stages % num_ranks != 0) {
    throw ConfigError(
        concat("[plan::simulated_bubble] ", num_stages, " stages on ", num_ranks,
               " ranks: the number of stages must be a multiple of the number of ranks"));
  }
  Machine machine;
  machine.flops = 1;  // one FLOP is one second
  ModelDesc model;
  std::vector<UnitWork> work;
  for (const StageSeconds& stage : stages) {
    const auto number = static_cast<int>(model.units.size());
    model.units.push_back({.name = concat("stage ", number), .flats = {{1, Dtype::kFp32}}});
    work.push_back({{stage.forward}, {stage.backward}});
  }
  assume_order(model, false);
  for (auto* order : {&model.forward, &model.backward}) {
    for (Visit& visit : *order) visit.stage = visit.unit;
  }
  const Mesh mesh = Mesh::of({{Axis::kPipeline, num_ranks}});
  const Table table = preset("ddp", {.precision = Dtype::kFp32});
  const Schedule order = make_schedule(schedule, {num_ranks, num_stages / num_ranks, num_micro});
  return replay(plan_pipeline(table, model, mesh, order), table, model, mesh, machine, work)
      .bubble();
}

}  // namespace penstock
