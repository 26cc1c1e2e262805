#include "src/plan/table.h"

#include <algorithm>
#include <array>
#include <map>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/plan/route.h"

namespace penstock {

namespace {

// The cells that each role has; the other cells are not used.
const std::vector<std::pair<Role, std::vector<Phase>>>& used_cells() {
  static const std::vector<std::pair<Role, std::vector<Phase>>> kUsed = {
      {Role::kParam,
       {Phase::kRest, Phase::kForward, Phase::kHold, Phase::kBackward, Phase::kUpdate}},
      {Role::kGrad, {Phase::kBackward, Phase::kHold, Phase::kUpdate}},
      {Role::kOptim, {Phase::kRest, Phase::kUpdate}},
      {Role::kAct, {Phase::kForward, Phase::kHold, Phase::kBackward}},
      {Role::kResidual, {Phase::kRest}},
      {Role::kCache, {Phase::kRest}},
  };
  return kUsed;
}

constexpr const char* kPublish = "publish";

Rounding usual_rounding(const std::string& wires) {
  return wires == role_name(Role::kGrad) ? Rounding::kStochastic : Rounding::kNearest;
}

bool is_optional(Role role, Phase phase) {
  return role == Role::kResidual || role == Role::kCache ||
         (role == Role::kParam && phase == Phase::kUpdate);
}

}  // namespace

const char* role_name(Role role) {
  static constexpr std::array<const char*, kNumRoles> kNames = {"param", "grad",     "optim",
                                                                "act",   "residual", "cache"};
  return kNames[static_cast<size_t>(role)];
}

const char* phase_name(Phase phase) {
  static constexpr std::array<const char*, kNumPhases> kNames = {"rest", "forward", "hold",
                                                                 "backward", "update"};
  return kNames[static_cast<size_t>(phase)];
}

const Placement& Table::at(Role role, Phase phase) const {
  return cells_[static_cast<size_t>(role)][static_cast<size_t>(phase)];
}

void Table::set(Role role, Phase phase, const Placement& place) {
  cells_[static_cast<size_t>(role)][static_cast<size_t>(phase)] = place;
  keeps_residual_ |= role == Role::kResidual;
  keeps_base_ |= role == Role::kParam && phase == Phase::kUpdate;
}

bool Table::has(Role role, Phase phase) const {
  if (role == Role::kResidual) return keeps_residual_;
  if (role == Role::kCache) return moves_caches(*this);
  return !is_optional(role, phase) || keeps_base_;
}

// [Note: Equal layouts] Planning, checks and execution use the table of their mesh.
Table Table::on(const Mesh& mesh) const {
  Table seen = *this;
  for (auto& row : seen.cells_)
    for (Placement& cell : row) cell = normalize(cell, mesh);
  seen.wires = wires.on(mesh);
  seen.keeps_base_ &= mesh.data() > 1;  // nothing is published to other ranks
  return seen;
}

// A model may mix dtypes. If a cell has the table's precision, it means the compute dtype of each
// parameter.
Dtype Table::dtype_in(const Placement& cell, Dtype own, bool quantized) const {
  if (is_quantized(cell.dtype)) return quantized ? cell.dtype : own;
  return cell.dtype == at(Role::kParam, Phase::kForward).dtype ? own : cell.dtype;
}

// There is no separate master if the resting parameter is fp32, is on the tier where the optimizer
// works, and contains the elements that this rank updates.
bool Table::has_master(Dtype dtype) const {
  if (keeps_base_) return true;
  const Placement& rest = at(Role::kParam, Phase::kRest);
  const Placement& optim = at(Role::kOptim, Phase::kUpdate);
  if (dtype_in(rest, dtype) != Dtype::kFp32 || rest.tier != optim.tier) return true;
  const Placement& kept = at(Role::kOptim, Phase::kRest);
  if (kept.tier != optim.tier || kept.layout != optim.layout) return true;
  Placement master = rest;
  master.layout = optim.layout;
  const std::vector<Move> moves = hops(rest, master);
  return moves.size() > 1 || (moves.size() == 1 && moves[0].kind != MoveKind::kSlice);
}

Placement Table::master() const {
  Placement place = at(Role::kOptim, Phase::kUpdate);
  place.dtype = Dtype::kFp32;
  return place;
}

bool Table::rests_whole() const {
  return at(Role::kParam, Phase::kRest) == at(Role::kParam, Phase::kForward);
}

bool Table::moves_params() const {
  const Placement& computes = at(Role::kParam, Phase::kForward);
  return !rests_whole() || at(Role::kParam, Phase::kHold) != computes;
}

bool Table::moves_activations() const {
  return !(at(Role::kAct, Phase::kHold) == at(Role::kAct, Phase::kForward));
}

// The dtypes may differ. Then a backward adds to a held copy of a different dtype.
bool Table::holds_grad_in_place() const {
  const Placement& made = at(Role::kGrad, Phase::kBackward);
  const Placement& held = at(Role::kGrad, Phase::kHold);
  return made.layout == held.layout && made.tier == held.tier;
}

const Placement& Table::grad_after_backward() const {
  return at(Role::kGrad, holds_grad_in_place() ? Phase::kHold : Phase::kBackward);
}

bool Table::uses_disk() const {
  for (const auto& [role, phases] : used_cells()) {
    for (const Phase phase : phases) {
      const bool sized = role != Role::kAct && role != Role::kCache;
      if (sized && has(role, phase) && at(role, phase).tier == Tier::kDisk) return true;
    }
  }
  return false;
}

bool Table::grads_wait_on_disk() const {
  const Placement& held = at(Role::kGrad, Phase::kHold);
  return held.tier == Tier::kDisk && !held.partial();
}

bool Table::grads_come_in_chunks() const {
  return grads_wait_on_disk() &&
         hops(at(Role::kGrad, Phase::kHold), at(Role::kGrad, Phase::kUpdate)).size() == 1;
}

// hops() plans a publish like every other move. If the placements are equal but a master exists,
// the values still move to a second buffer; this move is written as a cast.
std::vector<Move> Table::publish() const {
  Placement rest = at(Role::kParam, Phase::kRest);
  if (is_quantized(rest.dtype)) rest.dtype = at(Role::kParam, Phase::kForward).dtype;
  std::vector<Move> moves = hops(master(), rest, wires.publish);
  if (moves.empty() && has_master(rest.dtype)) {
    moves = {{.kind = MoveKind::kCast, .dtype = rest.dtype}};
  }
  return moves;
}

bool Table::publishes_chunks() const {
  const std::vector<Move> moves = publish();
  return at(Role::kParam, Phase::kRest).tier == Tier::kDisk &&
         std::all_of(moves.begin(), moves.end(), [](const Move& move) {
           return move.kind == MoveKind::kCast || move.kind == MoveKind::kCopy;
         });
}

std::string Table::text() const {
  std::string out;
  for (const auto& [role, phases] : used_cells()) {
    if (!has(role, phases.front())) continue;
    out += role_name(role);
    for (const Phase phase : phases) {
      if (has(role, phase)) out += concat(" ", phase_name(phase), "=", at(role, phase).text());
    }
    out += "\n";
  }
  std::string row;
  for (const std::string& name : TableWires::names()) {
    const std::string text = wires.text(name);
    if (text != Wire().text()) row += concat(" ", name, "=", text);
  }
  return row.empty() ? out : concat(out, kWireRow, row, "\n");
}

const std::vector<std::string>& TableWires::names() {
  static const std::vector<std::string> kNames = {role_name(Role::kParam), role_name(Role::kGrad),
                                                  kPublish};
  return kNames;
}

Wires& TableWires::named(const std::string& name) {
  PENSTOCK_ASSERT(std::count(names().begin(), names().end(), name) == 1, name);
  return name == kPublish ? publish : name == role_name(Role::kGrad) ? grad : param;
}

std::string TableWires::text(const std::string& name) const {
  Wires wires = TableWires(*this).named(name);
  for (Wire& wire : wires.axes) wire.delta = false;
  return wires.text(usual_rounding(name));
}

void TableWires::set(const std::string& name, const std::string& text) {
  Wires wires = Wires::parse(text, usual_rounding(name));
  for (Wire& wire : wires.axes) {
    if (wire.delta) {
      throw ConfigError(concat("[plan::TableWires::set] wire '", text,
                               "' is not valid. Leave out 'delta': table.wire.publish always sends "
                               "deltas, and the other wires never do"));
    }
    wire.delta = name == kPublish && wire.lossy();
  }
  named(name) = wires;
}

TableWires TableWires::on(const Mesh& mesh) const {
  return {param.on(mesh), grad.on(mesh), publish.on(mesh)};
}

Table Table::parse(const std::string& text) {
  std::map<std::string, std::string> given;  // "param.rest" -> placement
  for (const std::string& line : split(text, '\n')) {
    const std::vector<std::string> words = split(trim(line), ' ');
    for (size_t i = 1; i < words.size(); ++i) {
      const size_t equals = std::min(words[i].find('='), words[i].size());
      const std::string cell = concat(words[0], ".", words[i].substr(0, equals));
      if (!given.emplace(cell, words[i].substr(std::min(equals + 1, words[i].size()))).second)
        throw ConfigError(concat("[plan::Table::parse] cell ", cell, " is given twice"));
    }
  }
  Table table;
  for (const auto& [role, phases] : used_cells()) {
    for (const Phase phase : phases) {
      const std::string cell = concat(role_name(role), ".", phase_name(phase));
      const auto found = given.find(cell);
      if (found == given.end() && is_optional(role, phase)) continue;
      if (found == given.end())
        throw ConfigError(concat("[plan::Table::parse] cell ", cell, " is missing"));
      table.set(role, phase, Placement::parse(found->second));
      given.erase(found);
    }
  }
  for (const std::string& name : TableWires::names()) {
    const auto found = given.find(concat(kWireRow, ".", name));
    if (found == given.end()) continue;
    table.wires.set(name, found->second);
    given.erase(found);
  }
  if (!given.empty())
    throw ConfigError(concat("[plan::Table::parse] there is no cell ", given.begin()->first));
  return table;
}

bool moves_caches(const Table& table) {
  return table.at(Role::kCache, Phase::kRest).tier != Tier::kDevice;
}

bool joins_update(const Table& table, const Route& way) {
  return !table.keeps_base() && way.joins_update();
}

bool streams_state(const Table& table) {
  const Placement& rest = table.at(Role::kOptim, Phase::kRest);
  if (rest.tier != Tier::kDisk || hops(rest, table.at(Role::kOptim, Phase::kUpdate)).size() != 1) {
    return false;
  }
  // The update itself must write the published values, since the state is gone afterwards.
  const std::vector<Move> moves = table.publish();
  return moves.empty() || table.publishes_chunks() ||
         joins_update(table, route(table.master(), moves, Mesh(), 0));
}

bool takes_deltas(const Table& table) {
  Placement computes = table.at(Role::kParam, Phase::kForward);
  const Placement& rest = table.at(Role::kParam, Phase::kRest);
  computes.layout = rest.layout;
  const std::vector<Move> moves = hops(table.master(), rest);
  const bool slices = std::any_of(moves.begin(), moves.end(),
                                  [](const Move& move) { return move.kind == MoveKind::kSlice; });
  return rest == computes && !slices;
}

Placement base_of(const Table& table) {
  Placement base = table.at(Role::kOptim, Phase::kUpdate);
  base.dtype = table.at(Role::kParam, Phase::kRest).dtype;
  return base;
}

std::vector<LossySum> lossy_sums(const Table& table, const Mesh& mesh) {
  const Placement& held = table.at(Role::kGrad, Phase::kHold);
  const std::pair<Placement, Placement> ways[] = {{table.grad_after_backward(), held},
                                                  {held, table.at(Role::kGrad, Phase::kUpdate)}};
  std::vector<LossySum> sums;
  for (const auto& [from, to] : ways) {
    Placement at = from;
    bool direct = true;
    for (const Move& move : hops(from, to, table.wires.grad)) {
      int ranks = 1;
      for (const Axis axis : move.axes) ranks *= mesh.size(axis);
      const bool exchanges = move.is_collective() && ranks > 1;
      if (exchanges && move.wire.lossy()) sums.push_back({at, move.kind, move.wire, direct});
      direct &= !exchanges || move.kind == MoveKind::kReduceScatter;
      at = apply(at, move);
    }
  }
  return sums;
}

bool sums_signs(const Table& table, const Mesh& mesh) {
  const std::vector<LossySum> sums = lossy_sums(table, mesh);
  return std::any_of(sums.begin(), sums.end(),
                     [](const LossySum& sum) { return sum.wire.code == Code::kSign; });
}

Cells::Cells(const Table& table)
    : param_rest(table.at(Role::kParam, Phase::kRest)),
      param_forward(table.at(Role::kParam, Phase::kForward)),
      param_hold(table.at(Role::kParam, Phase::kHold)),
      base(table.keeps_base() ? std::optional(table.at(Role::kParam, Phase::kUpdate))
                              : std::nullopt),
      grad_hold(table.at(Role::kGrad, Phase::kHold)),
      grad_update(table.at(Role::kGrad, Phase::kUpdate)),
      optim_rest(table.at(Role::kOptim, Phase::kRest)),
      optim_update(table.at(Role::kOptim, Phase::kUpdate)),
      act_hold(table.at(Role::kAct, Phase::kHold)),
      residual(table.keeps_residual() ? std::optional(table.at(Role::kResidual, Phase::kRest))
                                      : std::nullopt),
      cache(moves_caches(table) ? std::optional(table.at(Role::kCache, Phase::kRest))
                                : std::nullopt),
      grads_on_disk(table.grads_wait_on_disk()),
      grads_in_chunks(table.grads_come_in_chunks()),
      publishes_chunks(table.publishes_chunks()),
      has_master{table.has_master(Dtype::kFp32), table.has_master(Dtype::kBf16),
                 table.has_master(Dtype::kFp16)} {}

}  // namespace penstock
