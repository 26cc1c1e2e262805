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
#include "src/plan/route.h"

namespace penstock {

namespace {

enum class Use : uint8_t { kParam, kGrad, kOptim, kBuffers };
inline constexpr int kNumUses = 4;

struct Held {
  Tier tier;
  Use use;
  int64_t bytes;
};

// Current bytes and their peaks.
class Meter {
 public:
  void add(const Held& held) {
    int64_t& now = now_[static_cast<size_t>(held.tier)][static_cast<size_t>(held.use)];
    now += held.bytes;
    PENSTOCK_ASSERT(now >= 0, "more bytes freed than held");
    MemoryPeak& peak = peaks[static_cast<size_t>(held.tier)];
    int64_t* const by_use[kNumUses] = {&peak.param, &peak.grad, &peak.optim, &peak.buffers};
    int64_t& own = *by_use[static_cast<size_t>(held.use)];
    own = std::max(own, now);
    int64_t total = 0;
    for (const int64_t bytes : now_[static_cast<size_t>(held.tier)]) total += bytes;
    peak.total = std::max(peak.total, total);
    if (held.tier == Tier::kDisk) return;
    in_memory_now_ += held.bytes;
    in_memory = std::max(in_memory, in_memory_now_);
  }
  void free(const Held& held) { add({held.tier, held.use, -held.bytes}); }

  std::array<MemoryPeak, kNumTiers> peaks{};
  int64_t in_memory = 0;  // peak of device and host together

 private:
  std::array<std::array<int64_t, kNumUses>, kNumTiers> now_{};
  int64_t in_memory_now_ = 0;
};

// Simulates the plan of one rank. [Note: Copies] explains which copies exist, [Note: Fusions] which
// buffers exist between passes.
class Simulation {
 public:
  Simulation(const Table& table, const ModelDesc& model, const Mesh& mesh, double num_moments)
      : table_(table.on(mesh)), model_(model), mesh_(mesh), num_moments_(num_moments) {
    params_.assign(model.units.size(), Copies::resting(cell(Role::kParam, Phase::kRest)));
    grads_.assign(model.units.size(), Copies::moving());
    staged_.resize(model.units.size());
    for (int unit = 0; unit < static_cast<int>(model.units.size()); ++unit) {
      meter_.add(held(Role::kParam, unit, cell(Role::kParam, Phase::kRest)));
      meter_.add(held(Role::kOptim, unit, cell(Role::kOptim, Phase::kRest)));
    }
  }

  // `by_line` receives the bytes that each line sends. If it is given, the ledger does not contain
  // them.
  Ledger run(const Plan& plan, LineBytes* by_line = nullptr) && {
    for (size_t i = 0; i < plan.steps.size(); ++i) {
      if (by_line != nullptr) ledger_.sent.clear();
      step(plan, i);
      if (by_line == nullptr) continue;
      std::map<std::string, int64_t>& line = by_line->emplace_back();
      for (const auto& [phase, links] : ledger_.sent)
        for (const auto& [link, bytes] : links) line[link] += bytes;
    }
    ledger_.tier = meter_.peaks;
    ledger_.in_memory = meter_.in_memory;
    return std::move(ledger_);
  }

 private:
  const Placement& cell(Role role, Phase phase) const { return table_.at(role, phase); }

  // Returns the bytes of one unit's role under a placement. Frozen parameters have no gradient and
  // no optimizer state.
  int64_t bytes(Role role, int unit, const Placement& place, const Chunk& chunk = {}) const {
    int64_t sum = 0;
    for (const FlatDesc& flat : model_.units[unit].flats) {
      if (role != Role::kParam && !flat.trainable) continue;
      const auto [begin, end] = range_of(chunk, flat.numel / num_shards(place, mesh_));
      const int64_t owned = end - begin;
      if (role != Role::kOptim) {
        sum += owned * dtype_bytes(table_.dtype_in(place, flat.dtype));
      } else {
        const auto moments = static_cast<double>(owned * dtype_bytes(place.dtype)) * num_moments_;
        sum += static_cast<int64_t>(moments) + (table_.has_master(flat.dtype) ? owned * 4 : 0);
      }
    }
    return sum;
  }

  Held held(Role role, int unit, const Placement& place, const Chunk& chunk = {}) const {
    const Use use = role == Role::kParam  ? Use::kParam
                    : role == Role::kGrad ? Use::kGrad
                                          : Use::kOptim;
    return {place.tier, use, bytes(role, unit, place, chunk)};
  }

  void step(const Plan& plan, size_t index) {
    const Step& step = plan.steps[index];
    switch (step.op) {
      case Op::kMicro:
        phase_ = "forward";
        break;
      case Op::kForward:
        phase_ = "forward";
        free_all(staged_[step.units[0]]);
        break;
      case Op::kBackward:
        phase_ = "backward";
        free_all(staged_[step.units[0]]);
        if (step.mark != Mark::kUse) make_grad(step.units[0], table_.grad_after_backward());
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
        drain_lane();
        ledger_.exchanges += mesh_.world() > 1 ? 1 : 0;
        break;
      case Op::kUpdate:
        free_all(writing_);
        for (const int unit : step.units) update(unit, step.chunk);
        break;
      case Op::kPublish:
        count_exchanges(step);
        pass_through(route(table_.master(), step.moves, mesh_, 0, /*consumes=*/false), Role::kOptim,
                     step.units);
        for (const int unit : step.units) publish(step, unit);
        break;
    }
  }

  // Gradients read from disk are freed by the update that uses them; the last chunk frees the rest.
  void update(int unit, const Chunk& chunk) {
    if (!read_.empty()) {
      meter_.free(read_.front());
      read_.erase(read_.begin());
    }
    if (!chunk.last()) return;
    for (const Placement& place : grads_[unit].places())
      meter_.free(held(Role::kGrad, unit, place));
    grads_[unit].clear();
  }

  void publish(const Step& step, int unit) {
    // Only parameters that train are published.
    send(step.moves, Role::kGrad, unit, table_.master(), phase_, step.chunk);
    const Placement& rest = cell(Role::kParam, Phase::kRest);
    if (rest.tier == Tier::kDisk)
      write({Tier::kHost, Use::kParam, bytes(Role::kParam, unit, rest, step.chunk)});
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

  // Called when the lane has finished its last gradient move. Frees the buffers of that move and
  // starts to write its results.
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

  void move(const Plan& plan, size_t index) {
    const Step& step = plan.steps[index];
    count_exchanges(step);
    if (step.role == Role::kGrad) drain_lane();
    for (const int unit : step.units) {
      if (step.role == Role::kParam) move_param(plan, index, unit);
      if (step.role == Role::kGrad) move_grad(step, unit);
      if (step.role == Role::kOptim) move_optim(step, unit);
    }
  }

  // All units of a step share the exchanges of that step.
  void count_exchanges(const Step& step) {
    for (const Move& move : step.moves) {
      if (!move.is_collective() || group_size(move) == 1) continue;
      ledger_.exchanges += move.kind == MoveKind::kAllReduce ? 2 : 1;
    }
  }

  void move_param(const Plan& plan, size_t index, int unit) {
    const std::vector<Move>& moves = plan.steps[index].moves;
    const Route way = route_of(params_[unit], moves);
    send(moves, Role::kParam, unit, way.from,
         way.to.sharded() ? phase_ : phase_of_use(plan, index, unit));
    if (way.from.tier == Tier::kDisk) {
      const Held staging{Tier::kHost, Use::kParam, bytes(Role::kParam, unit, way.from)};
      meter_.add(staging);
      staged_[unit].push_back(staging);
    }
    if (way.to != cell(Role::kParam, Phase::kRest)) meter_.add(held(Role::kParam, unit, way.to));
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
    if (!arrives) return;
    meter_.add(held(Role::kGrad, unit, way.to));
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

  Route route_of(const Copies& copies, const std::vector<Move>& moves) const {
    const std::optional<Placement> from = copies.source(moves);
    PENSTOCK_ASSERT(from, concat("no copy for ", moves.front().text(), " to start from"));
    return route(*from, moves, mesh_, 0);
  }

  int group_size(const Move& move) const {
    int size = 1;
    for (const Axis axis : move.axes) size *= mesh_.size(axis);
    return size;
  }

  int64_t group_size(const Pass& pass) const {
    int64_t size = 1;
    for (const Axis axis : pass.axes) size *= mesh_.size(axis);
    return size;
  }

  // Adds the memory that a move needs besides its copies, for the duration of the move.
  void pass_through(const Route& way, Role role, const std::vector<int>& units) {
    const Held buffers{Tier::kDevice, Use::kBuffers, buffer_bytes(way, role, units)};
    meter_.add(buffers);
    meter_.free(buffers);
  }

  // Returns the bytes of buffers for a step whose flats all take the same route. These are the
  // buffers between passes, plus the largest receive buffer and the largest packed buffer, since
  // passes run one after another.
  int64_t buffer_bytes(const Route& way, Role role, const std::vector<int>& units,
                       bool adds = false) const {
    std::vector<Packing> packing(way.passes.size());
    for_each_flat(role, units, [&](const FlatDesc& flat) {
      for (size_t i = 0; i < way.passes.size(); ++i) packing[i].add(shard_bytes(way, i, flat));
    });
    int64_t sum = 0, packed = 0;
    for (size_t i = 0; i < way.passes.size(); ++i) {
      const int64_t size = group_size(way.passes[i]);
      if (way.passes[i].sums()) packed = std::max(packed, packing[i].reduce_bytes(size));
      if (way.passes[i].kind == PassKind::kAllGather)
        packed = std::max(packed, packing[i].gather_bytes(size));
    }
    for_each_flat(role, units, [&](const FlatDesc& flat) {
      int64_t received = 0;
      for (size_t i = 0; i < way.passes.size(); ++i) {
        const Pass& pass = way.passes[i];
        if (pass.sums())
          received = std::max(received, shard_bytes(way, i, flat) * (group_size(pass) - 1));
        const bool stands = pass.kind != PassKind::kAllReduce && !way.into_next(i);
        if (stands && !(adds ? i + 1 == way.passes.size() : way.ends_at(i)))
          sum += flat.numel / num_shards(pass.to, mesh_) * dtype_bytes(dtype_after(way, i, flat));
      }
      sum += received;
    });
    return sum + packed;
  }

  template <class Visit>
  void for_each_flat(Role role, const std::vector<int>& units, const Visit& visit) const {
    for (const int unit : units) {
      for (const FlatDesc& flat : model_.units[unit].flats) {
        if (flat.trainable || role == Role::kParam) visit(flat);
      }
    }
  }

  Dtype dtype_after(const Route& way, size_t pass, const FlatDesc& flat) const {
    return way.dtype_after(pass, table_.dtype_in(way.from, flat.dtype),
                           table_.dtype_in(way.to, flat.dtype));
  }

  // Returns the bytes of one shard in a collective pass.
  int64_t shard_bytes(const Route& way, size_t index, const FlatDesc& flat) const {
    const Pass& pass = way.passes[index];
    const int64_t numel = flat.numel / num_shards(pass.from, mesh_);
    if (!pass.sums()) return numel * dtype_bytes(dtype_after(way, index, flat));
    const Dtype before =
        index == 0 ? table_.dtype_in(way.from, flat.dtype) : dtype_after(way, index - 1, flat);
    return numel * dtype_bytes(before) / group_size(pass);
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
      const int64_t here = bytes(role, unit, place, chunk);
      if (move.is_collective()) {
        send_collective(move, here, phase);
      } else if (move.kind == MoveKind::kCopy) {
        const bool disk = move.from == Tier::kDisk || move.to == Tier::kDisk;
        ledger_.sent[phase][disk ? "host-disk" : "device-host"] += here;
      }
      place = apply(place, move);
    }
  }

  // Counts a sum of gradients. Over tensor ranks it covers the partial flats of a unit; over the
  // stages that share a unit it covers all its flats.
  void sum_grad(Axis axis, int unit) {
    const bool partial_only = axis == Axis::kTensor;
    const Placement& place = grads_[unit].current();
    int64_t sum = 0;
    for (const FlatDesc& flat : model_.units[unit].flats) {
      if (!flat.trainable || (partial_only && flat.tensor != TensorCut::kPartial)) continue;
      const int64_t owned = flat.numel / num_shards(place, mesh_);
      sum += owned * dtype_bytes(table_.dtype_in(place, flat.dtype));
    }
    std::set<int> stages;
    for (const Visit& visit : model_.forward) {
      if (visit.unit == unit) stages.insert(visit.stage % mesh_.size(Axis::kPipeline));
    }
    const auto size = static_cast<int64_t>(partial_only ? mesh_.size(axis) : stages.size());
    ledger_.sent[phase_][partial_only ? "local" : "pipeline"] += 2 * (size - 1) * sum / size;
  }

  void send_collective(const Move& move, int64_t here, const std::string& phase) {
    const int64_t size = group_size(move);
    if (size == 1) return;
    int64_t sent = (size - 1) * here;
    if (move.kind != MoveKind::kAllGather) sent /= size;
    if (move.kind == MoveKind::kAllReduce) sent *= 2;
    int64_t across = 0;  // number of peers on other nodes
    for (const Axis axis : move.axes)
      if (axis == Axis::kNode) across = size - size / mesh_.size(axis);
    const int64_t node_bytes = sent * across / (size - 1);
    if (node_bytes > 0) ledger_.sent[phase]["node"] += node_bytes;
    if (sent > node_bytes) ledger_.sent[phase]["local"] += sent - node_bytes;
  }

  const Table table_;
  const ModelDesc& model_;
  const Mesh mesh_;
  const double num_moments_;
  Meter meter_;
  Ledger ledger_;
  std::string phase_ = "update";
  std::vector<Copies> params_, grads_;  // by unit
  std::vector<std::vector<Held>>
      staged_;  // by unit: memory that the unit's gather reads, until the unit is used
  std::vector<Held> writing_;  // being written to disk
  std::vector<Held> read_;     // gradients read from disk for later updates
  std::vector<Held> made_;     // reduced by the lane, written next
  std::vector<Held> lane_;     // memory that the last gradient move still uses
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
                double moments_per_param) {
  return Simulation(table, model, mesh, moments_per_param).run(step);
}

LineBytes bytes_by_line(const Plan& step, const Table& table, const ModelDesc& model,
                        const Mesh& mesh) {
  LineBytes bytes;
  Simulation(table, model, mesh, 2.0).run(step, &bytes);
  return bytes;
}

}  // namespace penstock
