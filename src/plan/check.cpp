#include "src/plan/check.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock {

namespace {

bool rounds(const Wires& wires, Rounding rounding) {
  return std::any_of(wires.axes.begin(), wires.axes.end(),
                     [&](const Wire& wire) { return wire.lossy() && wire.rounding == rounding; });
}

// Compares cells that are normalized for the mesh ([Note: Equal layouts]). Errors quote the table
// as it was written.
class Checker {
 public:
  Checker(const Table& table, const Mesh& mesh, Dtype precision)
      : written_(table), table_(table.on(mesh)), mesh_(mesh), precision_(precision) {}

  void run(const Conditions& conditions) const {
    computes();
    sums();
    dtypes();
    updates();
    wires();
    residuals();
    deltas();
    signs(conditions);
    if (conditions.own_optimizer) leaves_state_alone();
    if (conditions.late_update && written_.rests_whole()) {
      refuse(Role::kParam, Phase::kRest, "late",
             "with offload.late_update, the fetch of parameters before each use waits for the "
             "update, but these parameters are never fetched. Shard the cell or change its tier");
    }
  }

  // The names of the principles below are rows of docs/tables.md; check_test.cpp compares the two.
 private:
  const Placement& cell(Role role, Phase phase) const { return table_.at(role, phase); }

  [[noreturn]] void refuse(Role role, Phase phase, const char* principle,
                           const std::string& why) const {
    throw ConfigError(concat("[plan::check] table.", role_name(role), ".", phase_name(phase),
                             " is \"", written_.at(role, phase).text(), "\": ", principle, ": ",
                             why));
  }

  void must_be(Role role, Phase phase, const Placement& wanted, const std::string& why) const {
    if (cell(role, phase) == normalize(wanted, mesh_)) return;
    refuse(role, phase, "compute", concat(why, ": it can only be \"", wanted.text(), "\""));
  }

  static Placement on_device(const char* layout, Dtype dtype) {
    return Placement::parse(concat(layout, "@device:", dtype_name(dtype)));
  }

  // compute: eager code runs on whole parameters, and autograd leaves partial sums.
  void computes() const {
    for (const Phase phase : {Phase::kForward, Phase::kBackward}) {
      must_be(Role::kParam, phase, on_device("RR", precision_),
              "a unit computes with whole parameters on the device, in the dtype of \"precision\"");
    }
    Placement made = on_device("PP", cell(Role::kGrad, Phase::kBackward).dtype);
    must_be(Role::kGrad, Phase::kBackward, made,
            "a backward leaves the sum over a rank's own samples on the device");
    for (const Phase phase : {Phase::kForward, Phase::kBackward}) {
      must_be(Role::kAct, phase, on_device("SS", precision_),
              "a rank computes with the activations of its own samples");
    }
  }

  // sum: only a gradient that was not yet used by an update may be a partial sum.
  void sums() const {
    const std::vector<std::pair<Role, Phase>> values = {{Role::kParam, Phase::kRest},
                                                        {Role::kParam, Phase::kHold},
                                                        {Role::kOptim, Phase::kRest},
                                                        {Role::kOptim, Phase::kUpdate},
                                                        {Role::kGrad, Phase::kUpdate}};
    for (const auto& [role, phase] : values) {
      if (!cell(role, phase).partial()) continue;
      refuse(role, phase, "sum",
             "P means an incomplete sum. Only gradients can be P, and only before their update. "
             "Here each axis can be R or S");
    }
  }

  // precision and moments: a narrower dtype would round values that exact training keeps.
  void dtypes() const {
    const std::vector<std::pair<Role, Phase>> cells = {{Role::kParam, Phase::kRest},
                                                       {Role::kParam, Phase::kHold},
                                                       {Role::kGrad, Phase::kBackward},
                                                       {Role::kGrad, Phase::kHold},
                                                       {Role::kGrad, Phase::kUpdate}};
    for (const auto& [role, phase] : cells) {
      const Dtype dtype = cell(role, phase).dtype;
      // quantize.dtype sets these cells, for parameters that do not train.
      if (role == Role::kParam && is_quantized(dtype)) continue;
      if (dtype == precision_ || dtype == Dtype::kFp32) continue;
      refuse(role, phase, "precision",
             concat("a dtype narrower than the precision would change the result: it can be ",
                    dtype_name(precision_), precision_ == Dtype::kFp32 ? "" : " or fp32"));
    }
    const Placement& rest = cell(Role::kOptim, Phase::kRest);
    const Placement& at = cell(Role::kOptim, Phase::kUpdate);
    const bool known = rest.dtype == Dtype::kFp32 || rest.dtype == Dtype::kBf16;
    if (known && rest.dtype == at.dtype) return;
    refuse(Role::kOptim, Phase::kRest, "moments",
           concat("this cell and table.optim.update (\"", at.text(),
                  "\") must both have the dtype of the moments, fp32 or bf16 "
                  "(optimizer.moments_dtype sets "
                  "it); masters are always fp32"));
  }

  // together: an update reads gradient and state of the same elements in one pass.
  void updates() const {
    const Placement& optim = cell(Role::kOptim, Phase::kUpdate);
    const Placement& grad = cell(Role::kGrad, Phase::kUpdate);
    if (optim.tier == Tier::kDisk) {
      refuse(Role::kOptim, Phase::kUpdate, "compute",
             "nothing computes on disk: the tier can be device or host");
    }
    if (grad.tier == optim.tier && grad.layout == optim.layout) return;
    refuse(Role::kGrad, Phase::kUpdate, "together",
           concat("an element is updated where both its gradient and its state are, so this cell "
                  "and table.optim.update (\"",
                  written_.at(Role::kOptim, Phase::kUpdate).text(),
                  "\") must have the same layout and tier"));
  }

  // wire: every transfer of a parameter gives the same value, and the rounding of sums has no bias.
  void wires() const {
    if (rounds(table_.wires.grad, Rounding::kNearest) && !table_.keeps_residual()) {
      refuse_wire("grad",
                  "nearest rounding turns all gradients below half of a code's step into 0. Write "
                  "stochastic, or keep what it loses in table.residual.rest");
    }
    if (rounds(table_.wires.param, Rounding::kStochastic)) {
      refuse_wire("param",
                  "forward and backward must compute with the same parameters: write "
                  "nearest");
    }
    const Placement& rest = cell(Role::kParam, Phase::kRest);
    must_travel("param", table_.wires.param, {Role::kParam, Phase::kRest},
                [&](Axis axis) { return rest.on(axis) == Layout::kSharded; });
  }

  // One wire for both axes is used on the axes over which values travel. `why` is the cell that
  // determines these axes.
  template <class Travels>
  void must_travel(const std::string& name, const Wires& wires, std::pair<Role, Phase> why,
                   const Travels& travels) const {
    const bool both = wires.on(Axis::kNode) == wires.on(Axis::kLocal);
    const bool any = travels(Axis::kNode) || travels(Axis::kLocal);
    for (const Axis axis : kDataAxes) {
      if (!wires.on(axis).lossy() || mesh_.size(axis) == 1) continue;
      if (travels(axis) || (both && any)) continue;
      refuse_wire(name,
                  concat("no parameter travels over the axis ", axis_name(axis), " while table.",
                         role_name(why.first), ".", phase_name(why.second), " is \"",
                         written_.at(why.first, why.second).text(), "\". Leave this wire out"));
    }
  }

  // residual: it has the layout of the addends of the one sum that rounds.
  void residuals() const {
    if (!table_.keeps_residual() || mesh_.data() == 1) return;
    const auto refuse_residual = [&](const std::string& why) {
      refuse(Role::kResidual, Phase::kRest, "residual", why);
    };
    const Placement& rest = cell(Role::kResidual, Phase::kRest);
    const std::vector<LossySum> sums = lossy_sums(table_, mesh_);
    if (sums.empty()) {
      refuse_residual(
          "no sum of gradients rounds anything: set a lossy table.wire.grad, or leave the cell "
          "out");
    }
    const LossySum& sum = sums.front();
    if (sums.size() > 1 || sum.kind == MoveKind::kAllReduce) {
      refuse_residual(
          "gradients are rounded twice on their way, but a residual keeps only one rounding error. "
          "Use a strategy that shards the optimizer state, such as zero1, and one wire for both "
          "axes");
    }
    if (!sum.direct) {
      refuse_residual(
          "gradients are gathered before the sum that rounds. Hold them in a layout from which "
          "they "
          "are only reduced");
    }
    if (rest.layout != sum.addends.layout) {
      Placement wanted = rest;
      wanted.layout = sum.addends.layout;
      refuse_residual(
          concat("it must have the layout of the addends of the sum that rounds: "
                 "it can only be \"",
                 wanted.text(), "\""));
    }
    if (rest.tier == Tier::kDisk) {
      refuse_residual("it is read and written in every sum: the tier can be device or host");
    }
    if (is_quantized(rest.dtype)) {
      refuse_residual("it collects rounding errors and is never rounded: write bf16 or fp32");
    }
    if (rest.dtype == Dtype::kFp16 || precision_ == Dtype::kFp16) {
      refuse_residual(
          "gradients in fp16 have a loss scale, but a residual is not scaled with it. Train in "
          "bf16 or fp32, with a residual in bf16 or fp32");
    }
  }

  // base: a delta starts from values that the sender and all receivers have.
  void deltas() const {
    if (mesh_.data() == 1) return;
    const Wires& wires = table_.wires.publish;
    const Placement& rest = cell(Role::kParam, Phase::kRest);
    const Placement& optim = cell(Role::kOptim, Phase::kUpdate);
    const std::pair<Role, Phase> alone = optim.sharded() ? std::pair(Role::kParam, Phase::kRest)
                                                         : std::pair(Role::kOptim, Phase::kUpdate);
    must_travel("publish", wires, alone, [&](Axis axis) {
      return rest.on(axis) == Layout::kReplicated && optim.on(axis) == Layout::kSharded;
    });
    if (wires.has(Code::kSign) || rounds(wires, Rounding::kStochastic)) {
      refuse_wire("publish",
                  "the next delta includes the rounding error of this one, and must not grow "
                  "because of it: write int4 or int8, and nearest");
    }
    const Wire &node = wires.on(Axis::kNode), &local = wires.on(Axis::kLocal);
    if (node.lossy() && local.lossy() && node != local) {
      refuse_wire("publish",
                  "a delta is rounded once. Use one wire for both axes, or a wire for one axis");
    }
    if (wires.lossy()) return base(optim);
    if (table_.keeps_base()) {
      refuse(Role::kParam, Phase::kUpdate, "base",
             "only deltas need this cell: set a lossy table.wire.publish, or leave it out");
    }
  }

  void base(const Placement& optim) const {
    if (!takes_deltas(table_)) {
      refuse(Role::kParam, Phase::kRest, "base",
             concat("table.wire.publish adds deltas to the parameters at rest. These must be on "
                    "the device in ",
                    dtype_name(precision_),
                    ", and gathers must lead to them from table.optim.update (\"",
                    written_.at(Role::kOptim, Phase::kUpdate).text(),
                    "\"): write \"RR@device:", dtype_name(precision_), "\""));
    }
    if (cell(Role::kOptim, Phase::kRest).layout != optim.layout) {
      refuse(Role::kOptim, Phase::kRest, "base",
             concat("with table.wire.publish, masters must rest in the layout of "
                    "table.optim.update: \"",
                    written_.at(Role::kOptim, Phase::kUpdate).text(), "\""));
    }
    const Placement wanted = base_of(table_);
    if (table_.keeps_base() && cell(Role::kParam, Phase::kUpdate) == wanted) return;
    refuse(Role::kParam, Phase::kUpdate, "base",
           concat("deltas are computed where masters are updated, in the dtype of "
                  "table.param.rest: it can only be \"",
                  wanted.text(), "\""));
  }

  // wire: signs have one magnitude for a whole block.
  void signs(const Conditions& conditions) const {
    if (table_.wires.param.has(Code::kSign)) {
      refuse_wire("param", "the sign of a parameter cannot represent its value. Use int8");
    }
    if (!sums_signs(table_, mesh_)) return;
    if (conditions.own_optimizer || conditions.optimizer == OptimizerType::kAdagrad) {
      refuse_wire("grad",
                  "the optimizer may square the gradients, but all signs of a block have the same "
                  "square: use AdamW, Adam, SGD or Lion of the engine");
    }
    const bool adam = conditions.optimizer == OptimizerType::kAdam ||
                      conditions.optimizer == OptimizerType::kAdamW;
    if (adam && !conditions.begins_exact) {
      refuse_wire("grad",
                  "Adam's second moment is updated only in exact steps, because all signs of a "
                  "block have the same square: set comm.exact_first to at least 1 (usually to 15% "
                  "of all steps)");
    }
  }

  [[noreturn]] void refuse_wire(const std::string& name, const std::string& why) const {
    throw ConfigError(concat("[plan::check] table.wire.", name, " is \"", written_.wires.text(name),
                             "\": wire: ", why));
  }

  // own optimizer: the engine cannot move state that it does not know.
  void leaves_state_alone() const {
    const Placement& rest = cell(Role::kOptim, Phase::kRest);
    if (table_.grads_wait_on_disk()) {
      refuse(Role::kGrad, Phase::kHold, "own optimizer",
             "an optimizer of your own reads all gradients at once. Hold them on device or host");
    }
    if (rest.tier != Tier::kDisk && rest == cell(Role::kOptim, Phase::kUpdate)) return;
    refuse(
        Role::kOptim, Phase::kRest, "own optimizer",
        concat("an optimizer of your own keeps its state and needs masters that stay in one place "
               "in memory: this cell and table.optim.update (\"",
               written_.at(Role::kOptim, Phase::kUpdate).text(),
               "\") must be equal, on device or host"));
  }

  const Table written_, table_;
  const Mesh& mesh_;
  const Dtype precision_;
};

}  // namespace

Dtype precision_of(const ModelDesc& model) {
  Dtype precision = Dtype::kFp32;
  for (const UnitDesc& unit : model.units) {
    for (const FlatDesc& flat : unit.flats) {
      if (flat.trainable && flat.dtype != Dtype::kFp32) precision = flat.dtype;
    }
  }
  return precision;
}

void check(const Table& table, const ModelDesc& model, const Mesh& mesh,
           const Conditions& conditions) {
  Checker(table, mesh, precision_of(model)).run(conditions);
}

}  // namespace penstock
