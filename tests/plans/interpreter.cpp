#include "tests/plans/interpreter.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/plan/copies.h"

namespace penstock::plans {

namespace {

// One copy of a unit's role, with a buffer for each flat (for the optimizer: the master weights of
// all flats, then all means, then all squares). If frozen flats lack this role, their buffers are
// empty.
struct Copy {
  Placement place;
  Buffers buffers;
};

// A role's book, and the buffers of the copies that are in it.
struct RoleState {
  Copies book;
  std::vector<Copy> copies;

  Copy* at(const Placement& place) {
    const auto found = std::find_if(copies.begin(), copies.end(),
                                    [&](const Copy& copy) { return copy.place == place; });
    return found == copies.end() ? nullptr : &*found;
  }
  void put(Copy copy) {
    book.make(copy.place);
    copies.push_back(std::move(copy));
  }
  // Removes copies that are no longer in the book.
  void tidy() {
    std::erase_if(copies, [&](const Copy& copy) { return !book.has(copy.place); });
  }
};

struct UnitState {
  RoleState param, grad, optim;
  bool published = true;  // the resting parameters are those of the last update
};

[[noreturn]] void fail(const std::string& why) { throw RuntimeFault("[plans::interpret] " + why); }

std::vector<double> part(const std::vector<double>& whole, size_t index, size_t num_parts) {
  const size_t size = whole.size() / num_parts;
  const auto begin = whole.begin() + static_cast<std::ptrdiff_t>(index * size);
  return {begin, begin + static_cast<std::ptrdiff_t>(size)};
}

void add(std::vector<double>& into, const std::vector<double>& from) {
  if (into.size() != from.size()) fail("sums of different sizes");
  for (size_t i = 0; i < into.size(); ++i) into[i] += from[i];
}

// Unlike std::max, keeps NaN.
void raise_to(double& most, double value) {
  if (!std::isnan(most) && !(value <= most)) most = value;
}

// The position of a rank in the mesh, and the units that the rank has.
struct Place {
  const ModelDesc& model;
  const Mesh mesh;
  const int rank;

  int coordinate(Axis axis) const { return mesh.coordinate(rank, axis); }
  // Returns whether a rank of the pipeline has the unit.
  bool has(int stage_rank, int unit) const {
    return std::any_of(model.forward.begin(), model.forward.end(), [&](const Visit& visit) {
      return visit.unit == unit && visit.stage % mesh.size(Axis::kPipeline) == stage_rank;
    });
  }
  bool mine(int unit) const { return has(coordinate(Axis::kPipeline), unit); }
  bool first_stage() const { return coordinate(Axis::kPipeline) == 0; }
  int neighbour(const Step& step) const {
    const std::vector<int> ranks = mesh.group(rank, {Axis::kPipeline});
    const auto size = static_cast<int>(ranks.size());
    return ranks[(coordinate(Axis::kPipeline) + step.hop + size) % size];
  }
};

// A rank's samples of a step, and the values that the rank has computed from them.
class MicroBatches {
 public:
  MicroBatches(const Place& place, int num_micro) : place_(place), num_micro_(num_micro) {}

  void begin(const Batch& batch) {
    batch_ = &batch;
    chains_.clear();
  }
  void begin_micro(int micro) { micro_ = micro; }

  // Returns the model of the step's micro-batch. Stages after the first do not know its input.
  ChainModel& of(const Step& step) {
    const int micro = step.micro == kNoMicro ? micro_ : step.micro;
    const auto [found, is_new] = chains_.try_emplace(micro, place_.model, place_.mesh);
    if (is_new) {
      Matrix input = rows(batch_->input, micro);
      if (!place_.first_stage())
        input.assign(input.size(), std::numeric_limits<double>::quiet_NaN());
      found->second.begin({std::move(input), rows(batch_->target, micro)});
    }
    return found->second;
  }

  // Checks the gradients of the chain's input.
  void check_input_grads(const Matrix& global, double& deviation) {
    if (!place_.first_stage()) return;
    if (static_cast<int>(chains_.size()) != num_micro_) fail("a micro-batch is missing");
    for (auto& [micro, chain] : chains_) {
      const Matrix expected = rows(global, micro);
      const Matrix& mine = chain.in_flight();
      if (mine.size() != expected.size()) fail("the gradient of the input has a wrong size");
      for (size_t i = 0; i < mine.size(); ++i) raise_to(deviation, std::abs(mine[i] - expected[i]));
    }
  }

 private:
  // Returns this rank's rows of the global batch, which is cut first by micro-batch and then by
  // data rank.
  Matrix rows(const Matrix& global, int micro) const {
    const int data = place_.coordinate(Axis::kNode) * place_.mesh.size(Axis::kLocal) +
                     place_.coordinate(Axis::kLocal);
    return part(global, static_cast<size_t>(micro * place_.mesh.data() + data),
                static_cast<size_t>(num_micro_ * place_.mesh.data()));
  }

  const Place& place_;
  const int num_micro_;
  const Batch* batch_ = nullptr;
  std::map<int, ChainModel> chains_;  // by micro-batch
  int micro_ = 0;
};

class RankRun {
 public:
  RankRun(const Training& run, const ModelDesc& model, int rank, Exchange& exchange)
      : run_(run),
        table_(run.table.on(run.mesh)),
        mesh_(run.mesh),
        model_(model),
        rank_(rank),
        place_{model, run.mesh, rank},
        batches_(place_, run.num_micro),
        exchange_(exchange) {
    for (int unit = 0; unit < num_units(); ++unit) {
      UnitState& state = units_.emplace_back();
      if (!place_.mine(unit)) continue;
      const Placement& rest = cell(Role::kParam, Phase::kRest);
      state.param.book = Copies::resting(rest);
      state.param.copies = {Copy{rest, shards(unit, run.problem.weights[unit], rest)}};
      state.grad.book = state.optim.book = Copies::moving();
      const Placement& optim = cell(Role::kOptim, Phase::kRest);
      Copy copy{optim, shards(unit, run.problem.weights[unit], optim)};
      for (size_t flat = 0; flat < kNumFlats; ++flat)
        if (!trains(unit, flat)) copy.buffers[flat].clear();
      copy.buffers.resize(3 * kNumFlats);
      for (size_t i = kNumFlats; i < copy.buffers.size(); ++i)
        copy.buffers[i].assign(copy.buffers[i % kNumFlats].size(), 0);
      state.optim.put(std::move(copy));
    }
  }

  void train_step(const Plan& plan, const Batch& batch) {
    batches_.begin(batch);
    ++step_;
    for (const Step& step : plan.steps) {
      now_ = step.text();
      execute(step);
    }
    now_ = "end";
    check_at_rest();
  }

  // Returns the largest deviation from the trained reference.
  double deviation() const {
    double most = input_deviation_;
    for (size_t i = 0; i < norms_.size(); ++i)
      raise_to(most, std::abs(norms_[i] - run_.expected.norms[i]));
    for (int unit = 0; unit < num_units(); ++unit) {
      if (!place_.mine(unit)) continue;
      const Copy& own = units_[unit].param.copies.front();
      const Buffers wanted = shards(unit, run_.expected.weights[unit], own.place);
      for (size_t flat = 0; flat < kNumFlats; ++flat)
        for (size_t i = 0; i < wanted[flat].size(); ++i)
          raise_to(most, std::abs(own.buffers[flat].at(i) - wanted[flat][i]));
    }
    return most;
  }

  std::string where() const { return concat("rank ", rank_, ", step '", now_, "': "); }

 private:
  int num_units() const { return static_cast<int>(model_.units.size()); }
  const Placement& cell(Role role, Phase phase) const { return table_.at(role, phase); }
  bool trains(int unit, size_t flat) const { return model_.units[unit].flats[flat].trainable; }
  bool trains(int unit) const { return trains(unit, 0) || trains(unit, 1) || trains(unit, 2); }

  Buffers shards(int unit, const Matrix& weights, const Placement& place) const {
    Buffers flats = to_flats(model_, mesh_, mesh_.coordinate(rank_, Axis::kTensor), unit, weights);
    for (auto& flat : flats)
      flat = part(flat, static_cast<size_t>(shard_index(place, mesh_, rank_)),
                  static_cast<size_t>(num_shards(place, mesh_)));
    return flats;
  }

  void execute(const Step& step) {
    switch (step.op) {
      case Op::kMicro:
        batches_.begin_micro(step.micro);
        break;
      case Op::kForward:
        batches_.of(step).forward(step.units[0], step.mark, whole_param(step.units[0]));
        break;
      case Op::kBackward:
        backward(step);
        break;
      case Op::kSend:
        exchange_.post(rank_, place_.neighbour(step), tag(step, step.units[0]),
                       batches_.of(step).leave());
        break;
      case Op::kReceive:
        batches_.of(step).arrive(
            step.role, exchange_.take(rank_, place_.neighbour(step),
                                      tag(step, step.units[0] + (step.hop > 0 ? 1 : -1))));
        break;
      case Op::kDrop:
        for (const int unit : step.units) {
          units_[unit].param.book.drop();
          units_[unit].param.tidy();
        }
        break;
      case Op::kSum:
        for (const int unit : step.units) sum(unit, step.moves);
        break;
      case Op::kNorm:
        norm();
        break;
      case Op::kUpdate:
        for (const int unit : step.units) update(unit);
        break;
      case Op::kPublish:
        for (const int unit : step.units) publish(unit, step.moves);
        break;
      case Op::kMove:
        move(step);
        break;
    }
  }

  // `unit` is the last unit of the sender's stage, in the direction of the message.
  static std::string tag(const Step& step, int unit) {
    return concat(role_name(step.role), " of u", unit, " #", step.micro);
  }

  Matrix whole_param(int unit) {
    const Copy* whole = units_[unit].param.at(cell(Role::kParam, Phase::kForward));
    if (whole == nullptr) fail(concat("the parameters of u", unit, " are not whole"));
    return from_flats(whole->buffers, mesh_);
  }

  void backward(const Step& step) {
    const int unit = step.units[0];
    const Mark mark = step.mark;
    const Matrix local = batches_.of(step).backward(unit, mark, whole_param(unit));
    if (!trains(unit) || mark == Mark::kInputs) return;
    Copy made{table_.grad_after_backward(), pad_flats(model_, mesh_, unit, local)};
    for (size_t flat = 0; flat < kNumFlats; ++flat)
      if (!trains(unit, flat)) made.buffers[flat].clear();
    const bool unmoved = units_[unit].grad.book.has(made.place);
    if (unmoved && mark != Mark::kEnd && !table_.holds_grad_in_place())
      fail(concat("the last gradient of u", unit, " was never moved"));
    add_grad(unit, std::move(made));
  }

  void add_grad(int unit, Copy made) {
    Copy* held = units_[unit].grad.at(made.place);
    if (held == nullptr) return units_[unit].grad.put(std::move(made));
    for (size_t flat = 0; flat < kNumFlats; ++flat) add(held->buffers[flat], made.buffers[flat]);
  }

  RoleState& state_of(int unit, Role role) {
    UnitState& state = units_[unit];
    if (role == Role::kParam) return state.param;
    return role == Role::kGrad ? state.grad : state.optim;
  }

  void move(const Step& step) {
    if (step.role == Role::kAct) {
      for (const Move& move : step.moves) sum_activations(move, batches_.of(step).in_flight());
      return;
    }
    std::vector<Copy> copies;
    for (const int unit : step.units) copies.push_back(take_source(unit, step));
    walk(copies, step.moves);
    for (size_t i = 0; i < copies.size(); ++i) settle(step.units[i], step, std::move(copies[i]));
  }

  void sum_activations(const Move& move, Matrix& values) {
    if (move.kind != MoveKind::kAllReduce) fail("activations support only all_reduce");
    const auto all = exchange_.all(rank_, mesh_.group(rank_, move.axes), now_, {values});
    values = (*all)[0][0];
    for (size_t i = 1; i < all->size(); ++i) add(values, (*all)[i][0]);
  }

  // Sums gradients of which tensor ranks have addends, or gradients of a unit in several stages.
  void sum(int unit, const std::vector<Move>& moves) {
    if (moves.size() != 1 || moves[0].kind != MoveKind::kAllReduce || moves[0].axes.size() != 1)
      fail("a sum is one all_reduce over one axis");
    const Axis axis = moves[0].axes[0];
    if (axis != Axis::kTensor && axis != Axis::kPipeline) fail("data axes are summed by moves");
    std::vector<int> group;
    for (const int rank : mesh_.group(rank_, {axis})) {
      if (axis == Axis::kTensor || place_.has(mesh_.coordinate(rank, Axis::kPipeline), unit))
        group.push_back(rank);
    }
    RoleState& grad = units_[unit].grad;
    if (grad.book.empty()) fail(concat("u", unit, " has no gradient"));
    Copy& copy = *grad.at(grad.book.current());
    for (size_t flat = 0; flat < kNumFlats; ++flat) {
      const bool partial = model_.units[unit].flats[flat].placement.is_partial(Axis::kTensor);
      if (!trains(unit, flat) || (axis == Axis::kTensor && !partial)) continue;
      const auto all = exchange_.all(rank_, group, now_, {copy.buffers[flat]});
      copy.buffers[flat] = combine(*all, 0, MoveKind::kAllReduce, 0);
    }
  }

  // Takes the copy from which the moves start.
  Copy take_source(int unit, const Step& step) {
    RoleState& state = state_of(unit, step.role);
    const std::optional<Placement> from = state.book.source(step.moves);
    if (!from)
      fail(concat("u", unit, " has no ", role_name(step.role), " from which this can start"));
    return *state.at(*from);
  }

  void settle(int unit, const Step& step, Copy copy) {
    RoleState& state = state_of(unit, step.role);
    if (step.role == Role::kParam && state.book.current() == copy.place)
      fail("the destination already has a copy");
    if (step.role == Role::kGrad && copy.place != cell(Role::kGrad, Phase::kHold) &&
        copy.place != cell(Role::kGrad, Phase::kUpdate))
      fail(concat("no gradient belongs at ", copy.place.text()));
    const bool adds = state.book.has(copy.place);
    state.book.move(step.moves);
    state.tidy();
    if (adds && step.role == Role::kGrad) return add_grad(unit, std::move(copy));
    if (!adds) state.copies.push_back(std::move(copy));
  }

  // One exchange for all copies of a step.
  void walk(std::vector<Copy>& copies, const std::vector<Move>& moves) {
    for (const Move& move : moves) {
      for (const Copy& copy : copies)
        if (!applies(copy.place, move)) fail("the joined copies differ in placement");
      if (!move.axes.empty()) relayout(copies, move);
      for (Copy& copy : copies) copy.place = apply(copy.place, move);
    }
  }

  void relayout(std::vector<Copy>& copies, const Move& move) {
    const std::vector<int> group = mesh_.group(rank_, move.axes);
    const auto position =
        static_cast<size_t>(std::find(group.begin(), group.end(), rank_) - group.begin());
    if (move.kind == MoveKind::kSlice) {
      for (Copy& copy : copies)
        for (auto& buffer : copy.buffers) buffer = part(buffer, position, group.size());
      return;
    }
    Buffers mine;
    for (Copy& copy : copies)
      for (auto& buffer : copy.buffers) mine.push_back(std::move(buffer));
    const auto all = exchange_.all(rank_, group, now_, std::move(mine));
    size_t index = 0;
    for (Copy& copy : copies)
      for (auto& buffer : copy.buffers) buffer = combine(*all, index++, move.kind, position);
  }

  static std::vector<double> combine(const std::vector<Buffers>& all, size_t index, MoveKind kind,
                                     size_t position) {
    std::vector<double> out = all[0][index];
    for (size_t i = 1; i < all.size(); ++i) {
      if (kind == MoveKind::kAllGather) {
        out.insert(out.end(), all[i][index].begin(), all[i][index].end());
      } else {
        add(out, all[i][index]);
      }
    }
    return kind == MoveKind::kReduceScatter ? part(out, position, all.size()) : out;
  }

  void norm() {
    batches_.check_input_grads(run_.expected.input_grads[static_cast<size_t>(step_ - 1)],
                               input_deviation_);
    // A gradient held on disk is fetched only after the norm, so its squares are summed at the
    // write.
    const Placement& held = cell(Role::kGrad, Phase::kHold);
    const Placement& place = held.tier == Tier::kDisk ? held : cell(Role::kGrad, Phase::kUpdate);
    double sum = 0;
    for (int unit = 0; unit < num_units(); ++unit) {
      if (!place_.mine(unit) || !trains(unit)) continue;
      const Copy* grad = units_[unit].grad.at(place);
      if (grad == nullptr || units_[unit].grad.copies.size() != 1)
        fail(concat("the gradient of u", unit, " is not where it is updated"));
      for (size_t flat = 0; flat < kNumFlats; ++flat)
        for (const double value : grad->buffers[flat])
          sum += value * value * share(unit, flat, place);
    }
    std::vector<int> everyone(static_cast<size_t>(mesh_.world()));
    for (int rank = 0; rank < mesh_.world(); ++rank) everyone[static_cast<size_t>(rank)] = rank;
    const auto all = exchange_.all(rank_, everyone, now_, {{sum}});
    double total = 0;
    for (const Buffers& given : *all) total += given[0][0];
    norms_.push_back(std::sqrt(total));
  }

  // Returns the weight of this rank's elements in the norm. Over all ranks, each element counts
  // once.
  double share(int unit, size_t flat, const Placement& place) const {
    int parts = num_shards(place, mesh_) * mesh_.size(Axis::kPipeline), stages = 0;
    if (model_.units[unit].flats[flat].placement.is_sharded(Axis::kTensor))
      parts *= mesh_.size(Axis::kTensor);
    for (int rank = 0; rank < mesh_.size(Axis::kPipeline); ++rank) stages += place_.has(rank, unit);
    return static_cast<double>(parts) / (stages * mesh_.world());
  }

  void update(int unit) {
    UnitState& state = units_[unit];
    Copy* optim = state.optim.at(cell(Role::kOptim, Phase::kUpdate));
    const Copy* grad = state.grad.at(cell(Role::kGrad, Phase::kUpdate));
    if (optim == nullptr) fail(concat("the optimizer of u", unit, " is not where it updates"));
    if (grad == nullptr || grad->place.layout != optim->place.layout ||
        grad->place.tier != optim->place.tier)
      fail(concat("the gradient of u", unit, " is not where its optimizer is"));
    for (size_t flat = 0; flat < kNumFlats; ++flat)
      for (size_t i = 0; i < grad->buffers[flat].size(); ++i)
        Adam::apply(step_, grad->buffers[flat][i], optim->buffers[flat].at(i),
                    optim->buffers[flat + kNumFlats].at(i),
                    optim->buffers[flat + 2 * kNumFlats].at(i));
    state.optim.book.write(optim->place);
    state.grad.book.clear();
    state.grad.tidy();
    state.published = cell(Role::kParam, Phase::kRest) == optim->place;
    if (state.published) adopt(unit, *optim);
  }

  // Master weights become the resting copy of the flats that train.
  void adopt(int unit, const Copy& master) {
    for (size_t flat = 0; flat < kNumFlats; ++flat)
      if (trains(unit, flat))
        units_[unit].param.copies.front().buffers[flat] = master.buffers[flat];
  }

  void publish(int unit, const std::vector<Move>& moves) {
    const Copy* optim = units_[unit].optim.at(cell(Role::kOptim, Phase::kUpdate));
    if (optim == nullptr || units_[unit].published)
      fail(concat("u", unit, " has nothing to publish"));
    std::vector<Copy> master = {{optim->place, {}}};
    master[0].buffers.assign(optim->buffers.begin(), optim->buffers.begin() + kNumFlats);
    walk(master, moves);
    if (master[0].place != cell(Role::kParam, Phase::kRest))
      fail(concat("no parameter rests at ", master[0].place.text()));
    units_[unit].published = true;
    units_[unit].param.book.write(master[0].place);
    adopt(unit, master[0]);
  }

  void check_at_rest() {
    for (int unit = 0; unit < num_units(); ++unit) {
      if (!place_.mine(unit)) continue;
      UnitState& state = units_[unit];
      if (!state.published) fail(concat("the new weights of u", unit, " were not published"));
      if (!state.param.book.at_rest())
        fail(concat("the parameters of u", unit, " did not go back to rest"));
      if (!state.grad.book.empty()) fail(concat("the gradient of u", unit, " was not used"));
      if (state.optim.at(cell(Role::kOptim, Phase::kRest)) == nullptr)
        fail(concat("the optimizer of u", unit, " did not go back to rest"));
    }
  }

  const Training& run_;
  const Table table_;
  const Mesh mesh_;
  const ModelDesc& model_;
  const int rank_;
  const Place place_;
  MicroBatches batches_;
  Exchange& exchange_;
  std::vector<UnitState> units_;
  std::vector<double> norms_;
  double input_deviation_ = 0;
  std::string now_;
  int step_ = 0;
};

}  // namespace

Outcome interpret(const Training& run, const std::vector<Plan>& plans) {
  const ModelDesc model = describe(run.problem.variant, run.mesh, run.num_stages);
  Exchange exchange(run.timeout, run.mesh.world(), run.transport);
  Outcome outcome;
  std::mutex mutex;  // guards outcome
  const auto run_rank = [&](int rank) {
    RankRun runner(run, model, rank, exchange);
    try {
      const bool by_stage = run.mesh.size(Axis::kPipeline) > 1;
      const int index = by_stage ? run.mesh.coordinate(rank, Axis::kPipeline) : rank;
      const Plan& plan = plans[static_cast<size_t>(index) % plans.size()];
      for (const Batch& batch : run.problem.steps) runner.train_step(plan, batch);
      const double deviation = runner.deviation();
      const std::scoped_lock lock(mutex);
      raise_to(outcome.deviation, deviation);
    } catch (const std::exception& error) {
      const std::string what = runner.where() + error.what();
      const std::scoped_lock lock(mutex);
      if (outcome.error.empty()) outcome.error = what;
      exchange.abort(what);
    }
    exchange.ended();
  };
  std::vector<std::jthread> threads;
  for (int rank = 1; rank < run.mesh.world(); ++rank) threads.emplace_back(run_rank, rank);
  run_rank(0);
  threads.clear();
  return outcome;
}

}  // namespace penstock::plans
