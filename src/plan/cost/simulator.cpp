#include "src/plan/cost/simulator.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/place/packing.h"
#include "src/plan/copies.h"
#include "src/plan/cost/memory_meter.h"
#include "src/plan/cost/residual_memory.h"
#include "src/plan/cost/state_bytes.h"
#include "src/plan/route.h"
#include "src/plan/step_queries.h"

namespace penstock {

namespace {

// Gives the bytes of each layer exchange. In each pass, a unit's lines come in the order of its
// description. If the description has no exchanges, a line sends nothing.
class LayerCursor {
 public:
  int64_t next(const ModelDesc& model, int unit, const std::string& phase) {
    const UnitDesc& desc = model.units[unit];
    const auto& exchanges = phase == "forward" ? desc.in_forward : desc.in_backward;
    if (exchanges.empty()) return 0;
    return exchanges[next_[{unit, phase}]++ % exchanges.size()].sent;
  }

 private:
  std::map<std::pair<int, std::string>, size_t> next_;
};

// Returns whether the source of a route from disk has memory beside the copy that it becomes.
bool is_staged(const Route& way, const ModelDesc& model) {
  return way.from.tier == Tier::kDisk && (model.on_accelerator || !way.only_reads());
}

// Simulates the plan of one rank. [Note: Copies] explains which copies exist, and [Note: Fusions]
// which buffers exist between passes.
class Simulation : StateBytes {
 public:
  Simulation(const Table& table, const ModelDesc& model, const Mesh& mesh,
             const SimulatedUpdate& update)
      : StateBytes(table, model, mesh, update.moments_per_param), update_(update) {
    params_.assign(model.units.size(), Copies::resting(cell(Role::kParam, Phase::kRest)));
    grads_.assign(model.units.size(), Copies::moving());
    staged_.resize(model.units.size());
    extra_grads_.resize(model.units.size());
    for (int unit = 0; unit < static_cast<int>(model.units.size()); ++unit) {
      meter_.add(held(Role::kParam, unit, cell(Role::kParam, Phase::kRest)));
      meter_.add(held(Role::kOptim, unit, cell(Role::kOptim, Phase::kRest)));
      if (table_.keeps_base()) meter_.add(held_base(unit));
    }
    const Placement& whole = cell(Role::kParam, Phase::kForward);
    for (int unit = 0; unit < static_cast<int>(model.units.size()); ++unit) {
      if (!model.units[unit].kept || table_.rests_whole()) continue;
      // The unit stays whole. Its move needs more memory for a moment.
      const Route way = route_of(params_[unit], params_[unit].way_to(whole, table_.wires.param));
      std::vector<Held> moving = {
          {Tier::kDevice, Use::kBuffers, buffer_bytes(way, Role::kParam, {unit})}};
      if (is_staged(way, model)) {
        moving.push_back({Tier::kHost, Use::kParam, bytes(Role::kParam, unit, way.from)});
      }
      meter_.add(held(Role::kParam, unit, whole));
      for (const Held& one : moving) meter_.add(one);
      free_all(moving);
    }
    if (!table_.keeps_residual() || mesh_.data() == 1) return;  // nothing is exchanged
    std::vector<Held> residuals;
    for (int unit = 0; unit < static_cast<int>(model.units.size()); ++unit) {
      residuals.push_back(held(Role::kResidual, unit, cell(Role::kResidual, Phase::kRest)));
    }
    residuals_ = {std::move(residuals), meter_};
  }

  // `by_line` receives the bytes that each line sends; the ledger then does not contain these
  // bytes.
  Ledger run(const Plan& plan, LineBytes* by_line = nullptr) && {
    walk(plan, by_line);
    const Ledger first = ledger_;
    const bool whole = std::any_of(plan.steps.begin(), plan.steps.end(),
                                   [](const Step& step) { return step.op == Op::kBackward; });
    if (by_line == nullptr && whole && rests() && (!writing_.empty() || update_.late_update)) {
      after_ = meter_.now();
      if (!updated_.empty()) raise(updated_.back().second, meter_.lately());
      if (update_.late_update) continue_update();
      walk(plan, nullptr);  // [Note: Steady peaks]
      ledger_ = first;
    }
    ledger_.tier = meter_.peaks;
    ledger_.in_memory = meter_.in_memory;
    ledger_.tensors = meter_.tensors;
    return std::move(ledger_);
  }

 private:
  void walk(const Plan& plan, LineBytes* by_line) {
    free_all(publishing_);
    for (size_t i = 0; i < plan.steps.size(); ++i) {
      if (by_line != nullptr) ledger_.sent.clear();
      step(plan, i);
      if (by_line == nullptr) continue;
      std::map<std::string, int64_t>& line = by_line->emplace_back();
      for (const auto& [phase, links] : ledger_.sent)
        for (const auto& [link, bytes] : links) line[link] += bytes;
    }
  }

  // Returns whether all units are as at the beginning of a step.
  bool rests() const {
    bool rests = lane_.empty() && read_.empty();
    for (size_t unit = 0; unit < params_.size(); ++unit) {
      rests &= params_[unit].at_rest();
      for (const Placement& place : grads_[unit].places())  // a frozen unit has no bytes
        rests &= bytes(Role::kGrad, static_cast<int>(unit), place) == 0;
    }
    return rests;
  }

  void step(const Plan& plan, size_t index) {
    const Step& step = plan.steps[index];
    switch (step.op) {
      case Op::kMicro:
        phase_ = "forward";
        break;
      case Op::kForward:
        phase_ = "forward";
        wait_update(step.units[0]);
        use(step);
        meter_.compute(step, model_.units[step.units[0]].tensors);
        look_for_edits(step);
        break;
      case Op::kBackward:
        if (std::exchange(phase_, "backward") == "forward") free_all(writing_);
        free_all(updating_);
        use(step);
        if (gives_gradient(step.mark)) make_grad(step.units[0], table_.grad_after_backward());
        meter_.compute(step, model_.units[step.units[0]].tensors);
        look_for_edits(step);
        break;
      case Op::kMove:
        move(plan, index);
        break;
      case Op::kSend:
        ledger_.sent[phase_]["pipeline"] += model_.boundary_bytes;
        ++ledger_.exchanges;
        break;
      case Op::kReceive:
        ++ledger_.exchanges;
        break;
      case Op::kSum:
        count_exchanges(step);
        for (const int unit : step.units) sum_grad(step.moves.front().axes.front(), unit);
        break;
      case Op::kDrop:
        for (const int unit : step.units) drop_param(unit);
        break;
      case Op::kNorm:
        phase_ = "update";
        meter_.end_tensors();
        drain_lane();
        residuals_.update(meter_);
        if (update_.external) copy_grads();
        updated_.clear();
        meter_.lately();
        ledger_.exchanges += mesh_.world() > 1 ? 1 : 0;
        break;
      case Op::kUpdate:
        free_all(writing_);
        for (const int unit : step.units) update(unit, step.chunk);
        updated_.emplace_back(step.units.back(), meter_.lately());
        break;
      case Op::kPublish:
        count_exchanges(step);
        pass_through_publish(step);
        for (const int unit : step.units) publish(step, unit);
        break;
    }
  }

  // A publish may run on the gather lane while the update lane works on later units, so the largest
  // buffers of a publish are kept until the end of the update.
  void pass_through_publish(const Step& step) {
    const Route way = route(table_.master(), step.moves, mesh_, 0, /*consumes=*/false);
    if (cell(Role::kOptim, Phase::kUpdate).tier == Tier::kDevice) {
      return pass_through(way, Role::kOptim, step.units);
    }
    const int64_t bytes = buffer_bytes(way, Role::kOptim, step.units);
    if (!publishing_.empty() && publishing_.front().bytes >= bytes) return;
    free_all(publishing_);
    meter_.add(publishing_.emplace_back(Held{Tier::kDevice, Use::kBuffers, bytes}));
  }

  // When a forward uses `unit`, a late update has finished this unit, and may be at any later unit.
  // So the largest memory of the rest of the update is added during the forward.
  void wait_update(int unit) {
    if (!update_.late_update || updated_.empty()) return;
    const auto done = std::find_if(updated_.rbegin(), updated_.rend(),
                                   [unit](const auto& one) { return one.first == unit; });
    updated_.erase(updated_.begin(), done.base());
    free_all(updating_);
    continue_update();
  }

  // Adds the memory that the rest of the update takes beyond the memory in use after the update.
  void continue_update() {
    Bytes most{};
    for (const auto& [unit, bytes] : updated_) raise(most, bytes);
    for (size_t tier = 0; tier < most.size(); ++tier) {
      for (size_t use = 0; use < most[tier].size(); ++use) {
        const int64_t more = most[tier][use] - after_[tier][use];
        if (updated_.empty() || more <= 0) continue;
        updating_.push_back({static_cast<Tier>(tier), static_cast<Use>(use), more});
        meter_.add(updating_.back());
      }
    }
  }

  // Gradients that were read from disk are freed by the update that uses them; the last chunk frees
  // all remaining ones.
  void update(int unit, const Chunk& chunk) {
    const Held published{Tier::kHost, Use::kParam, published_bytes(unit, chunk)};
    meter_.add(published);
    meter_.free(published);
    if (!read_.empty()) {
      meter_.free(read_.front());
      read_.erase(read_.begin());
    }
    if (!chunk.last()) return;
    for (const Placement& place : grads_[unit].places())
      meter_.free(held(Role::kGrad, unit, place));
    grads_[unit].clear();
    free_all(extra_grads_[unit]);
  }

  // When a unit is used, the source memory of its gather is freed. Moves that follow the begin mark
  // of the unit run before that.
  void use(const Step& step) {
    for (const int unit : std::exchange(begun_, {})) free_all(staged_[unit]);
    if (step.mark == Mark::kBegin) begun_.push_back(step.units[0]);
    if (step.mark != Mark::kBegin) free_all(staged_[step.units[0]]);
  }

  // The values of a unit are compared with those at rest when its forward or backward ends, one
  // flat after another (GatheredValues::edited). For this, values on disk are read, and quantized
  // values are decoded.
  void look_for_edits(const Step& step) {
    const Placement& rest = cell(Role::kParam, Phase::kRest);
    const bool ends =
        step.mark == Mark::kWhole || step.mark == Mark::kEnd || step.mark == Mark::kWeights;
    if (!ends) return;
    const bool decodes = is_quantized(rest.dtype) && !model_.on_accelerator;
    Held compared{Tier::kHost, Use::kParam, 0};
    if (rest.tier == Tier::kDisk) compared.bytes += largest_flat(step.units[0], rest);
    if (decodes) compared.bytes += largest_decoded(step.units[0], rest);
    meter_.add(compared);
    meter_.free(compared);
  }

  // An optimizer of the user's own gets a copy of all gradients in fp32.
  void copy_grads() {
    const Placement& place = cell(Role::kGrad, Phase::kUpdate);
    for (int unit = 0; unit < static_cast<int>(model_.units.size()); ++unit) {
      if (grads_[unit].empty()) continue;
      const Tier tier = cell(Role::kOptim, Phase::kUpdate).tier;
      meter_.add(extra_grads_[unit].emplace_back(Held{tier, Use::kGrad, wide_bytes(unit, place)}));
    }
  }

  // A sum in a low precision becomes fp32 when a second backward adds to it (Gradients::widen).
  void widen(int unit, const Placement& place) {
    const Held low = held(Role::kGrad, unit, place);
    const int64_t wide = wide_bytes(unit, place);
    if (place.tier == Tier::kDisk || wide == low.bytes || !extra_grads_[unit].empty()) return;
    meter_.add({place.tier, Use::kGrad, wide});
    meter_.free(low);
    extra_grads_[unit].push_back({place.tier, Use::kGrad, wide - low.bytes});
  }

  void publish(const Step& step, int unit) {
    // Only parameters that train are published.
    send(step.moves, Role::kGrad, unit, table_.master(), phase_, step.chunk);
    const Placement& rest = cell(Role::kParam, Phase::kRest);
    if (rest.tier == Tier::kDisk)
      write({Tier::kHost, Use::kParam, bytes(Role::kParam, unit, rest, step.chunk), unit});
  }

  void make_grad(int unit, const Placement& place) {
    if (!grads_[unit].has(place)) meter_.add(held(Role::kGrad, unit, place));
    grads_[unit].make(place);
  }

  void drop_param(int unit) {
    if (params_[unit].at_rest()) return;
    meter_.free(held(Role::kParam, unit, params_[unit].current()));
    params_[unit].drop();
  }

  // Must be called when the lane has finished its last gradient move. Frees the buffers of that
  // move and starts to write its results.
  void drain_lane() {
    free_all(lane_);
    if (made_.empty()) return;
    free_all(writing_);
    writing_ = std::exchange(made_, {});
  }

  void free_all(std::vector<Held>& list) {
    for (const Held& held : std::exchange(list, {})) meter_.free(held);
  }

  // Adds memory that is freed when the next chunk has been updated.
  void write(const Held& held) {
    meter_.add(held);
    writing_.push_back(held);
  }

  // A read of parameters waits until the update has written them.
  void end_writes_of(int unit) {
    std::erase_if(writing_, [&](const Held& held) {
      if (held.unit == unit) meter_.free(held);
      return held.unit == unit;
    });
  }

  void move(const Plan& plan, size_t index) {
    const Step& step = plan.steps[index];
    if (is_layer_exchange(step)) {
      // The ranks of these axes are neighbours, so they are taken to be on one node.
      const int64_t sent = exchanged_.next(model_, step.units.front(), phase_);
      ledger_.sent[phase_]["local"] += sent;
      ledger_.waited[phase_]["local"] += sent;
      return;
    }
    count_exchanges(step);
    if (step.role == Role::kGrad) drain_lane();
    for (const int unit : step.units) {
      if (step.role == Role::kParam) move_param(plan, index, unit);
      if (step.role == Role::kGrad) move_grad(step, unit);
      if (step.role == Role::kOptim) move_optim(step, unit);
    }
  }

  // All units of a step whose flats have the same mesh share the exchanges of that step.
  void count_exchanges(const Step& step) {
    const Role role = step.op == Op::kPublish ? Role::kOptim : step.role;
    const bool sums = step.op == Op::kSum;
    for (const Mesh& mesh : sums ? std::vector{mesh_} : meshes_of(role, step.units)) {
      for (const Move& move : step.moves) {
        if (!move.is_collective() || mesh.ranks_along(move.axes) == 1) continue;
        ledger_.exchanges += move.kind == MoveKind::kAllReduce ? 2 : 1;
      }
    }
  }

  void move_param(const Plan& plan, size_t index, int unit) {
    const std::vector<Move>& moves = plan.steps[index].moves;
    const Route way = route_of(params_[unit], moves);
    send(moves, Role::kParam, unit, way.from,
         way.to.sharded() ? phase_ : phase_of_use(plan, index, unit));
    if (way.from.tier == Tier::kDisk) end_writes_of(unit);
    if (is_staged(way, model_)) {
      const Held staging{Tier::kHost, Use::kParam, bytes(Role::kParam, unit, way.from)};
      meter_.add(staging);
      staged_[unit].push_back(staging);
    }
    if (way.to != cell(Role::kParam, Phase::kRest)) meter_.add(held(Role::kParam, unit, way.to));
    if (way.to.tier == Tier::kDisk) {  // one write at a time (Params::put_away)
      free_all(writing_);
      write({Tier::kHost, Use::kParam, bytes(Role::kParam, unit, way.to), unit});
    }
    if (unit == plan.steps[index].units.back()) carry(plan, index, way);
    if (!params_[unit].at_rest()) {
      const Held left = held(Role::kParam, unit, params_[unit].current());
      const bool read_until_use = way.to == cell(Role::kParam, Phase::kForward);
      if (read_until_use) staged_[unit].push_back(left);
      if (!read_until_use) meter_.free(left);
    }
    params_[unit].move(moves);
  }

  void move_grad(const Step& step, int unit) {
    Copies& copies = grads_[unit];
    // The section started with gradients in `hold`.
    if (copies.empty()) make_grad(unit, cell(Role::kGrad, Phase::kHold));
    const Route way = route_of(copies, step.moves);
    send(step.moves, Role::kGrad, unit, way.from, phase_, step.chunk);
    if (way.from.tier == Tier::kDisk && phase_ == "update") {
      read_.push_back(held(Role::kGrad, unit, way.to, step.chunk));
      meter_.add(read_.back());
      return;
    }
    if (copies.has(way.to)) widen(unit, way.to);
    if (has_residual(way)) {
      const int64_t crosses = residuals_.feed(unit, way, meter_);
      if (model_.on_accelerator && crosses > 0) ledger_.sent[phase_]["device-host"] += crosses;
    }
    if (unit == step.units.back()) {
      const Held buffers{Tier::kDevice, Use::kBuffers,
                         buffer_bytes(way, step.role, step.units, copies.has(way.to))};
      meter_.add(buffers);
      lane_.push_back(buffers);
    }
    const bool arrives = !copies.has(way.to);
    copies.move(step.moves);
    if (way.in_place() && arrives) return;
    lane_.push_back(held(Role::kGrad, unit, way.from));
    if (arrives) {  // a widened sum moves on
      lane_.insert(lane_.end(), extra_grads_[unit].begin(), extra_grads_[unit].end());
      extra_grads_[unit].clear();
    }
    if (arrives) meter_.add(held(Role::kGrad, unit, way.to));
    if (way.to.tier != Tier::kDisk) return;
    made_.push_back({Tier::kHost, Use::kGrad, bytes(Role::kGrad, unit, way.to)});
    meter_.add(made_.back());
  }

  void move_optim(const Step& step, int unit) {
    const Placement& rest = cell(Role::kOptim, Phase::kRest);
    const Placement& at = cell(Role::kOptim, Phase::kUpdate);
    const bool fetches = apply_all(rest, step.moves) == at;
    send(step.moves, Role::kOptim, unit, fetches ? rest : at, "update", step.chunk);
    const Held kept = held(Role::kOptim, unit, rest, step.chunk);
    const Held state = held(Role::kOptim, unit, at, step.chunk);
    if (fetches) {
      meter_.add(state);
      if (rest.tier != Tier::kDisk) meter_.free(kept);
    } else if (rest.tier != Tier::kDisk) {
      meter_.add(kept);
      meter_.free(state);
    } else {  // the memory is freed after the write
      meter_.free(state);
      write({Tier::kHost, Use::kOptim, kept.bytes});
    }
  }

  // Adds the memory that a move needs in addition to its copies, for the duration of the move.
  void pass_through(const Route& way, Role role, const std::vector<int>& units) {
    const Held buffers{Tier::kDevice, Use::kBuffers, buffer_bytes(way, role, units)};
    meter_.add(buffers);
    meter_.free(buffers);
  }

  // The buffers of a gather are kept until one of its units is used, so that measured peaks do not
  // depend on timing.
  void carry(const Plan& plan, size_t index, const Route& way) {
    const std::vector<int>& units = plan.steps[index].units;
    if (way.to != cell(Role::kParam, Phase::kForward))
      return pass_through(way, Role::kParam, units);
    const auto use = std::find_if(
        plan.steps.begin() + static_cast<std::ptrdiff_t>(index), plan.steps.end(),
        [&](const Step& step) {
          return step.is_compute() && std::count(units.begin(), units.end(), step.units[0]) > 0;
        });
    const int user = use == plan.steps.end() ? units.front() : use->units[0];
    const Held buffers{Tier::kDevice, Use::kBuffers, buffer_bytes(way, Role::kParam, units)};
    meter_.add(buffers);
    staged_[user].push_back(buffers);
  }

  std::string phase_of_use(const Plan& plan, size_t index, int unit) const {
    for (size_t i = index; i < plan.steps.size(); ++i)
      if (plan.steps[i].is_compute() && plan.steps[i].units[0] == unit)
        return plan.steps[i].op == Op::kForward ? "forward" : "backward";
    return phase_;
  }

  void send(const std::vector<Move>& moves, Role role, int unit, Placement place,
            const std::string& phase, const Chunk& chunk = {}) {
    for (const Move& move : moves) {
      for_each_flat(role, {unit}, [&](const FlatDesc& flat) {
        const int64_t here = bytes(role, flat, place, chunk);
        if (move.is_collective()) {
          send_collective(move, flat, piece_bytes(move, here, flat, place), phase);
          if (move.wire.lossy()) ledger_.coded[phase] += coded_values(move, flat, place);
        } else if (move.kind == MoveKind::kCopy) {
          const bool disk = move.from == Tier::kDisk || move.to == Tier::kDisk;
          ledger_.sent[phase][disk ? "host-disk" : "device-host"] += here;
        }
      });
      place = apply(place, move);
    }
  }

  // Counts a sum of the unit's gradients over one axis.
  void sum_grad(Axis axis, int unit) {
    const Placement& place = grads_[unit].current();
    const char* const link = axis == Axis::kPipeline ? "pipeline" : "local";
    for (const FlatDesc& flat : model_.units[unit].flats) {
      if (!flat.trainable || !flat.placement.is_partial(axis)) continue;
      const int64_t bytes = owned(flat, place) * dtype_bytes(table_.dtype_in(place, flat.dtype));
      const int64_t size = flat.placement.num_holders(axis, mesh_);
      ledger_.sent[phase_][link] += 2 * (size - 1) * bytes / size;
    }
  }

  void send_collective(const Move& move, const FlatDesc& flat, int64_t piece,
                       const std::string& phase) {
    const Mesh mesh = flat.placement.mesh(mesh_);
    const int64_t size = mesh.ranks_along(move.axes);
    if (size == 1) return;
    int64_t sent = (size - 1) * piece;
    if (move.kind == MoveKind::kAllReduce) sent *= 2;
    int64_t across = 0;  // number of peers on other nodes
    for (const Axis axis : move.axes)
      if (axis == Axis::kNode) across = size - size / mesh.size(axis);
    const int64_t node_bytes = sent * across / (size - 1);
    if (node_bytes > 0) ledger_.sent[phase]["node"] += node_bytes;
    if (sent > node_bytes) ledger_.sent[phase]["local"] += sent - node_bytes;
  }

  const SimulatedUpdate update_;
  Meter meter_;
  Ledger ledger_;
  std::string phase_ = "update";
  std::vector<Copies> params_, grads_;  // by unit
  std::vector<std::vector<Held>>
      staged_;  // by unit: memory that the unit's gather reads, until the unit is used
  ResidualMemory residuals_;
  LayerCursor exchanged_;
  std::vector<int> begun_;     // units that have begun and whose gather still has its memory
  std::vector<Held> writing_;  // being written to disk
  std::vector<std::vector<Held>> extra_grads_;  // by unit: in addition to the copies in grads_
  std::vector<Held> publishing_;                // buffers of the largest publish so far
  // For a late update: (unit, peak bytes since the update before it), the bytes after the update,
  // and the memory that the rest of the update takes.
  std::vector<std::pair<int, Bytes>> updated_;
  Bytes after_{};
  std::vector<Held> updating_;
  std::vector<Held> read_;  // gradients read from disk for later updates
  std::vector<Held> made_;  // gradients that the lane has reduced and writes next
  std::vector<Held> lane_;  // memory that the last gradient move still uses
};

}  // namespace

std::string Ledger::text() const {
  std::string out;
  for (int i = 0; i < kNumTiers; ++i) {
    const MemoryPeak& peak = tier[static_cast<size_t>(i)];
    out += concat(tier_name(static_cast<Tier>(i)), " total ", format_bytes(peak.total), " (param ",
                  format_bytes(peak.param), ", grad ", format_bytes(peak.grad), ", optim ",
                  format_bytes(peak.optim), ", buffers ", format_bytes(peak.buffers), ")\n");
  }
  for (const auto& [phase, links] : sent)
    for (const auto& [link, bytes] : links)
      out += concat("sent in ", phase, " over ", link, " ", format_bytes(bytes), "\n");
  return out;
}

Ledger simulate(const Plan& step, const Table& table, const ModelDesc& model, const Mesh& mesh,
                const SimulatedUpdate& update) {
  return Simulation(table, model, mesh, update).run(step);
}

LineBytes bytes_by_line(const Plan& step, const Table& table, const ModelDesc& model,
                        const Mesh& mesh) {
  LineBytes bytes;
  Simulation(table, model, mesh, {}).run(step, &bytes);
  return bytes;
}

}  // namespace penstock
