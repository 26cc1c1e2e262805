#include "src/plan/step_writer.h"

#include <algorithm>
#include <utility>

namespace penstock {

namespace {

// Returns the index of each unit's last visit. If a unit begins in one stage of a pipeline and ends
// in another one, the pass of each stage has only one of these two visits.
std::vector<size_t> last_visits(const std::vector<Visit>& order, size_t num_units) {
  std::vector<size_t> last(num_units, 0);
  for (size_t i = 0; i < order.size(); ++i) last[static_cast<size_t>(order[i].unit)] = i;
  return last;
}

}  // namespace

StepWriter::StepWriter(const Table& table, const ModelDesc& model, const Mesh& mesh)
    : table_(table.on(mesh)), model_(model), mesh_(mesh), publish_(table_.publish()) {}

bool StepWriter::trains(int unit) const {
  const std::vector<FlatDesc>& flats = model_.units[unit].flats;
  return std::any_of(flats.begin(), flats.end(),
                     [](const FlatDesc& flat) { return flat.trainable; });
}

// Writes nothing if the two placements are equal.
void StepWriter::move(int unit, Role role, const Placement& from, const Placement& to,
                      Chunk chunk) {
  std::vector<Move> moves = hops(from, to, role == Role::kGrad ? table_.wires.grad : Wires());
  if (moves.empty()) return;
  put({.op = Op::kMove,
       .units = {unit},
       .role = role,
       .moves = std::move(moves),
       .micro = role == Role::kAct ? micro_ : kNoMicro,
       .chunk = chunk});
}

void StepWriter::move_grad(int unit, Phase from, Phase to, Chunk chunk) {
  if (trains(unit)) move(unit, Role::kGrad, cell(Role::kGrad, from), cell(Role::kGrad, to), chunk);
}

// [Note: Copies] The book knows the working copy, so the shortest list of moves starts from this
// copy. Units that are kept have no lines: the engine makes them whole once.
void StepWriter::settle_param(int unit, Phase phase) {
  if (model_.units[unit].kept) return;
  const Placement& want = cell(Role::kParam, phase);
  Copies& book = params_[unit];
  if (book.current() == want) return;
  if (want == cell(Role::kParam, Phase::kRest)) {
    put({.op = Op::kDrop, .units = {unit}, .role = Role::kParam});
    book.drop();
    return;
  }
  std::vector<Move> moves = book.way_to(want, table_.wires.param);
  book.move(moves);
  put({.op = Op::kMove, .units = {unit}, .role = Role::kParam, .moves = std::move(moves)});
}

// All units start alike, with the copy at rest and a working copy in the cell of the phase.
void StepWriter::begin_params(Phase phase) {
  Copies book = Copies::resting(cell(Role::kParam, Phase::kRest));
  book.make(cell(Role::kParam, phase));
  params_.assign(model_.units.size(), book);
}

void StepWriter::exchange(int unit, const std::vector<LayerExchange>& exchanges) {
  for (const LayerExchange& one : exchanges) {
    put({.op = Op::kMove,
         .units = {unit},
         .role = Role::kAct,
         .moves = {{.kind = one.kind, .axes = {one.axis}}},
         .micro = micro_});
  }
}

// [Note: Caches] In forwards without a backward, attention layers cache the keys and values of
// earlier tokens. A cell cache.rest moves them to another tier while their block does not compute.
// Their sizes are known only at run time. A forward without cached tokens runs these lines, too,
// and moves nothing.
void StepWriter::move_cache(int unit, const Placement& from, const Placement& to) {
  const bool caches = model_.units[unit].block && (unit > 0 || num_units() == 1);
  if (moves_caches(table_) && caches) move(unit, Role::kCache, from, to);
}

void StepWriter::move_inputs(int unit, Phase from, Phase to) {
  if (model_.units[unit].recomputed)
    move(unit, Role::kAct, cell(Role::kAct, from), cell(Role::kAct, to));
}

void StepWriter::settle_grad(int unit, bool last) {
  const bool in_place = table_.holds_grad_in_place();
  const bool goes_straight = cell(Role::kGrad, Phase::kHold) == cell(Role::kGrad, Phase::kUpdate);
  if (!in_place) move_grad(unit, Phase::kBackward, Phase::kHold);
  if (last && !goes_straight && !table_.grads_wait_on_disk())
    move_grad(unit, Phase::kHold, Phase::kUpdate);
}

void StepWriter::sum_addends(int unit) {
  const std::vector<FlatDesc>& flats = model_.units[unit].flats;
  for (const Axis axis : kModelAxes) {
    const bool any = std::any_of(flats.begin(), flats.end(), [&](const FlatDesc& flat) {
      return flat.trainable && flat.placement.is_partial(axis);
    });
    if (mesh_.size(axis) == 1 || !any) continue;
    put({.op = Op::kSum,
         .units = {unit},
         .role = Role::kGrad,
         .moves = {{.kind = MoveKind::kAllReduce, .axes = {axis}}}});
  }
}

void StepWriter::forward(const std::vector<Visit>& order, bool trains, Phase after) {
  const bool caches = !trains;
  const Placement& cached = cell(Role::kCache, Phase::kRest);
  const Placement& computes = cell(Role::kAct, Phase::kForward);
  const std::vector<size_t> last_visit = last_visits(order, model_.units.size());
  for (size_t i = 0; i < order.size(); ++i) {
    const auto& [unit, mark, stage] = order[i];
    settle_param(unit, Phase::kForward);
    if (caches && mark != Mark::kEnd) move_cache(unit, cached, computes);
    put({.op = Op::kForward, .units = {unit}, .mark = mark, .micro = micro_});
    if (mark == Mark::kBegin && i != last_visit[unit]) continue;
    exchange(unit, model_.units[unit].in_forward);
    if (trains) move_inputs(unit, Phase::kForward, Phase::kHold);
    if (caches) move_cache(unit, computes, cached);
    settle_param(unit, after);
  }
}

void StepWriter::backward(const std::vector<Visit>& order, const std::vector<bool>& last) {
  const std::vector<size_t> last_visit = last_visits(order, model_.units.size());
  for (size_t i = 0; i < order.size(); ++i) {
    const auto& [unit, mark, stage] = order[i];
    if (mark != Mark::kEnd) move_inputs(unit, Phase::kHold, Phase::kBackward);
    if (mark != Mark::kGradient) settle_param(unit, Phase::kBackward);
    put({.op = Op::kBackward, .units = {unit}, .mark = mark, .micro = micro_});
    if (mark == Mark::kBegin && i != last_visit[unit]) continue;
    // Layers exchange the gradients of their inputs.
    if (mark != Mark::kUse && mark != Mark::kWeights) {
      exchange(unit, model_.units[unit].in_backward);
    }
    // The gradient of a unit that is visited again is summed before the last visit only if it moves
    // anyway.
    const bool moves_now = gives_gradient(mark) && !table_.holds_grad_in_place();
    const bool settles = mark != Mark::kInputs && (moves_now || i == last_visit[unit]);
    // The sum needs the gradient in memory, so it runs before the gradient is written to disk.
    if (settles && table_.grads_wait_on_disk()) sum_addends(unit);
    if (settles) settle_grad(unit, last[unit]);
    settle_param(unit, last[unit] && i == last_visit[unit] ? Phase::kRest : Phase::kHold);
  }
}

void StepWriter::update() {
  for (int unit = num_units() - 1; unit >= 0 && !table_.grads_wait_on_disk(); --unit) {
    sum_addends(unit);
  }
  put({.op = Op::kNorm});
  for (int unit = 0; unit < num_units(); ++unit) {
    if (!trains(unit)) continue;
    // A gradient that changes its layout cannot be read in chunks.
    if (table_.grads_wait_on_disk() && !table_.grads_come_in_chunks()) {
      move_grad(unit, Phase::kHold, Phase::kUpdate);
    }
    const int count = model_.units[unit].num_chunks;
    for (int index = 0; index < count; ++index) update_chunk(unit, {index, count});
  }
}

// Writes the lines that read, update, publish and write back the state of one chunk. read_ahead()
// makes chunks overlap.
void StepWriter::update_chunk(int unit, const Chunk& chunk) {
  const Placement& rest = cell(Role::kOptim, Phase::kRest);
  const Placement& at = cell(Role::kOptim, Phase::kUpdate);
  move(unit, Role::kOptim, rest, at, chunk);
  if (table_.grads_come_in_chunks()) move_grad(unit, Phase::kHold, Phase::kUpdate, chunk);
  put({.op = Op::kUpdate, .units = {unit}, .chunk = chunk});
  const bool chunks = table_.publishes_chunks();
  if (!publish_.empty() && (chunks || chunk.last())) {
    put({.op = Op::kPublish,
         .units = {unit},
         .moves = publish_,
         .chunk = chunks ? chunk : Chunk{}});
  }
  move(unit, Role::kOptim, at, rest, chunk);
}

}  // namespace penstock
