#include "src/exec/executor.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "penstock/error.h"
#include "src/base/board.h"
#include "src/base/text.h"

namespace penstock::exec {

namespace {

// Moves run mostly on lanes, so the model's thread records an event for a move only if the move
// takes at least this time (ns).
constexpr int64_t kWorthAnEvent = 20'000;

// Returns whether masters and moments rest in host memory and are never copied to the device. That
// is so if the optimizer runs on the host and also writes the published values to host memory.
bool state_stays_on_host(const Rank& rank) {
  if (!rank.on_accelerator() || rank.cells.updates_on_device()) return false;
  if (rank.cells.optim_rest.tier == Tier::kDevice) return false;
  return rank.cells.publishes_chunks ||
         joins_update(rank.table, route(rank.table.master(), rank.table.publish(), rank.mesh,
                                        rank.group.rank()));
}

}  // namespace

Executor::Executor(const Table& table, const Mesh& mesh, Group& group, mem::Tiers& tiers,
                   std::vector<UnitState> units)
    : rank_(table, mesh, group, tiers, std::move(units)),
      params_(rank_, lanes_),
      gradients_(rank_, lanes_),
      updates_(rank_, lanes_, gradients_),
      values_(rank_, lanes_, gradients_, updates_),
      activations_(rank_.cells.act_hold.tier, tiers.computes),
      caches_(rank_.cells.cache.value_or(Placement()), tiers.computes),
      lanes_(rank_.table, tiers.computes, group.size() > 1 && !group.device_groups()) {
  lanes_.connected = rank_.connected;
  if (state_stays_on_host(rank_)) tiers.keep_here(mem::Account::kOptim);
  lanes_.record(tiers.recorder);
  rank_.channels.record(tiers.recorder);
  set_step(1);
}

void Executor::claim(const ModelDesc& model, int num_moments) {
  for (size_t u = 0; u < rank_.units.size(); ++u) {
    for (Flat& flat : rank_.units[u].flats) {
      rank_.claim_params(flat);
      if (flat.trainable) rank_.claim_state(flat, model.units[u].num_chunks, num_moments);
    }
  }
  if (rank_.tiers.disk) rank_.tiers.disk->allocate();
}

std::vector<PlannedStep> Executor::prepare(const Plan& plan) const {
  std::vector<PlannedStep> prepared;
  for (const Step& step : plan.steps) {
    std::vector<std::string> names;
    for (const int unit : step.units) names.push_back(rank_.units.at(unit).name);
    prepared.push_back({step, concat(step.text(), " (", join(names, ", "), ")")});
  }
  // If the next publish of a unit begins with a local pass, the optimizer writes its output during
  // the update, while the values are in the cache (Updates::publish_from).
  for (size_t i = 0; i < prepared.size(); ++i) {
    if (plan.steps[i].op != Op::kUpdate) continue;
    const auto next =
        std::find_if(plan.steps.begin() + static_cast<std::ptrdiff_t>(i), plan.steps.end(),
                     [unit = plan.steps[i].units.front()](const Step& step) {
                       return step.op == Op::kPublish &&
                              std::count(step.units.begin(), step.units.end(), unit) > 0;
                     });
    if (next == plan.steps.end()) continue;
    prepared[i].writes_back = joins_update(
        rank_.table, route(rank_.table.master(), next->moves, rank_.mesh, rank_.group.rank()));
  }
  return prepared;
}

void Executor::run(const PlannedStep& planned) {
  const Step& step = planned.step;
  const trace::AtLine at(planned.label.text);
  // This event covers only this thread. Lanes record events for the work that this line submits.
  trace::Span span(step.is_compute() ? nullptr : rank_.tiers.recorder.get(), trace::Kind::kLine,
                   planned.label.text);
  if (step.op == Op::kMove || step.op == Op::kDrop) span.at_least(kWorthAnEvent);
  if (Board* const board = rank_.group.board()) board->log(*planned.label.text, step.is_compute());
  switch (step.op) {
    case Op::kMove:
      return move(planned);
    case Op::kDrop:
      for (const int unit : step.units) params_.drop(unit);
      return;
    case Op::kNorm:
      return updates_.norm(planned.label);
    case Op::kUpdate:
      return updates_.update(planned);
    case Op::kPublish:
      return updates_.publish(planned);
    case Op::kMicro:
    case Op::kForward:
    case Op::kBackward:
      return;
    case Op::kSum:
      return gradients_.sum(planned);
    case Op::kSend:
    case Op::kReceive:
      throw Bug(
          concat("[exec::run] send and receive lines are not executed: ", *planned.label.text));
  }
}

// Each role has its own function for moves.
void Executor::move(const PlannedStep& planned) {
  switch (planned.step.role) {
    case Role::kParam:
      return params_.run(planned);
    case Role::kGrad:
      // Gradients that are held on disk are read chunk by chunk on the update lane.
      if (rank_.cells.grads_in_chunks && planned.step.moves.front().from == Tier::kDisk &&
          planned.step.moves.front().kind == MoveKind::kCopy) {
        return updates_.move(planned);
      }
      return gradients_.run(planned);
    case Role::kOptim:
      return updates_.move(planned);
    case Role::kAct:
      return move_act(planned);
    case Role::kCache:
      return move_cache(planned);
    case Role::kResidual:
      throw Bug("[exec::move] residuals have no moves of their own");
  }
}

void Executor::move_act(const PlannedStep& planned) {
  const Move& move = planned.step.moves.front();
  PENSTOCK_ASSERT(move.kind == MoveKind::kCopy,
                  concat("[exec::move] activations can only be copied: ", *planned.label.text));
  for (const int unit : planned.step.units) {
    if (move.from == Tier::kDevice) {
      activations_.put_away(unit, rank_.units[unit].name);
    } else {
      activations_.bring(unit);
    }
  }
}

// A cache is cast on its way, so the first or the last move may be a cast.
void Executor::move_cache(const PlannedStep& planned) {
  const std::vector<Move>& moves = planned.step.moves;
  const auto copy = std::find_if(moves.begin(), moves.end(),
                                 [](const Move& move) { return move.kind == MoveKind::kCopy; });
  PENSTOCK_ASSERT(copy != moves.end(), *planned.label.text);
  for (const int unit : planned.step.units) {
    if (copy->from == Tier::kDevice) {
      caches_.put_away(unit);
    } else {
      caches_.bring(unit);
    }
  }
}

void Executor::drain(bool last) {
  // A lane is ordered, so an empty task ends after all work that was submitted before it.
  const std::array<device::Fence, 3> ends = {
      lanes_.gather.submit([] {}), lanes_.reduce.submit([] {}), lanes_.update.submit([] {})};
  // All lanes are waited for before any of them throws.
  for (const device::Fence& end : ends) end.settle();
  if (last) {
    for (device::Lane* lane : {&lanes_.gather, &lanes_.reduce, &lanes_.update}) lane->close();
  }
  for (const device::Fence& end : ends) end.wait();
  rank_.traffic.settle();
}

std::vector<std::string> Executor::share(const std::string& label, const std::string& payload,
                                         bool in_stage) {
  if (!in_stage) take_turn(rank_.group.board(), label, concat("reached `", label, "`"));
  if (!in_stage) return rank_.channels.control.share(label, rank_.groups.everyone(), payload);
  return rank_.channels.stage().share(label, rank_.groups.stage(), payload);
}

std::vector<std::string> Executor::collect(const std::string& label, std::string text) {
  const int64_t before = rank_.channels.exchanges();
  const Members& everyone = rank_.groups.everyone();
  const int64_t own = static_cast<int64_t>(text.size());
  std::vector<int64_t> sizes;
  for (const std::string& one : share(label, {reinterpret_cast<const char*>(&own), sizeof(own)})) {
    std::memcpy(&sizes.emplace_back(), one.data(), sizeof(own));
  }
  // Texts are padded to the longest one, because a collective needs equal sizes.
  const auto most = static_cast<size_t>(*std::max_element(sizes.begin(), sizes.end()));
  const bool first = rank_.group.rank() == 0;
  text.resize(first ? most * sizes.size() : most);
  rank_.channels.control.collect(label, everyone, text.data(), static_cast<int64_t>(most));
  exchanges_before_ += rank_.channels.exchanges() - before;
  std::vector<std::string> texts;
  for (size_t rank = 0; first && rank < sizes.size(); ++rank) {
    texts.push_back(text.substr(rank * most, static_cast<size_t>(sizes[rank])));
  }
  return texts;
}

void Executor::broadcast(const std::string& label, void* data, int64_t bytes) {
  rank_.channels.control.broadcast(label, rank_.groups.everyone(), data, bytes);
}

void Executor::set_step(int64_t step) {
  const int64_t so_far = rank_.channels.exchanges() + updates_.exchanges();
  exchanges_ = so_far - std::exchange(exchanges_before_, so_far);
  rank_.channels.set_step(step);
  if (Board* const board = rank_.group.board()) board->set_step(step);
  updates_.set_step(step);
  rank_.tiers.recorder->set_step(step);
}

bool divides_model(const Executor& executor) {
  const Mesh& mesh = executor.mesh();
  if (mesh.size(Axis::kTensor) > 1 || mesh.size(Axis::kPipeline) > 1) return true;
  const std::vector<UnitState>& units = executor.units();
  return std::any_of(units.begin(), units.end(), [](const UnitState& unit) {
    return std::any_of(unit.flats.begin(), unit.flats.end(),
                       [](const Flat& flat) { return flat.placement.is_sharded(); });
  });
}

void discard(Executor& executor) {
  executor.updates().discard();
  executor.gradients().discard();
}

void take_every_edit(Executor& executor) {
  const auto num_units = static_cast<int>(executor.units().size());
  for (int unit = 0; unit < num_units; ++unit) executor.values().take_edits(unit);
}

void publish_exactly(Executor& executor, const std::vector<int>& units) {
  executor.updates().finish();
  for (const int unit : units) {
    executor.values().take_edits(unit);
    executor.values().publish(unit);
  }
  executor.updates().arrive();
}

}  // namespace penstock::exec
