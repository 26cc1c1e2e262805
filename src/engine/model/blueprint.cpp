#include "src/engine/model/blueprint.h"

#include <fnmatch.h>

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/device/device.h"
#include "src/plan/cost/strategy_choice.h"
#include "src/plan/pipeline_schedule.h"
#include "src/plan/step_queries.h"
#include "src/plan/strategy.h"

namespace penstock::engine {

namespace {

Layout layout_of(TensorCut cut) {
  switch (cut) {
    case TensorCut::kWhole:
      return Layout::kReplicated;
    case TensorCut::kCut:
      return Layout::kSharded;
    case TensorCut::kPartial:
      return Layout::kPartial;
  }
  throw Bug("[engine::layout_of] unknown cut");
}

bool trains(const Config& config, const ParamInfo& info) {
  return info.param.requires_grad() && !config.inference;
}

// Returns how the ranks of the model axes hold a parameter, from its cut and the stages that use
// it.
ModelPlacement placement_of(const ParamInfo& info, int index, const Stages& stages,
                            const Mesh& mesh, const Config& config) {
  ModelPlacement place;
  if (info.cut.axis == Axis::kExpert) {
    place.divide_experts(config.mesh.expert);
  } else {
    place.on(info.cut.axis).layout = layout_of(info.cut.kind);
  }
  const int pipeline = mesh.size(Axis::kPipeline);
  if (pipeline == 1) return place;
  std::set<int> ranks;
  for (const int stage : stages.of_param[static_cast<size_t>(index)]) {
    ranks.insert(rank_of_stage(stage, pipeline));
  }
  AxisHolding& held = place.on(Axis::kPipeline);
  held.holders.assign(ranks.begin(), ranks.end());
  if (ranks.size() > 1 && trains(config, info)) held.layout = Layout::kPartial;
  return place;
}

// Returns whether a parameter rests quantized: whether it is frozen and has one of the names of
// quantize.params. Without names: whether it is a matrix of a block.
bool rests_quantized(const Config& config, const UnitSpec& spec, const ParamInfo& info) {
  if (config.quantize.dtype == "none" || trains(config, info)) return false;
  const std::vector<std::string>& names = config.quantize.params;
  if (names.empty()) return spec.block && info.param.dim() >= 2;
  return std::any_of(names.begin(), names.end(), [&](const std::string& pattern) {
    return fnmatch(pattern.c_str(), info.name.c_str(), 0) == 0;
  });
}

exec::Slot slot_of(const ParamInfo& info, int named, const Mesh& over, int rank) {
  exec::Slot slot;
  slot.name = info.name;
  slot.param = info.param;
  slot.index = named;
  slot.group = info.group;
  slot.cut = info.cut;
  slot.whole = slot.sizes = info.param.sizes().vec();
  if (slot.is_cut()) {
    const Axis axis = slot.cut.axis;
    const int index = over.coordinate(rank, axis), count = over.size(axis);
    slot.ranges = info.cut.ranges(index, count);
    slot.sizes.at(info.cut.dim) = info.cut.size(index, count);
    slot.room = info.param.numel() / std::max<int64_t>(1, info.param.size(info.cut.dim)) *
                info.cut.size(0, count);
  }
  return slot;
}

// Makes one flat per unit, dtype, trainability, placement over the model axes and form at rest.
std::vector<exec::UnitState> lay_out(const ModelTree& tree, const std::vector<UnitSpec>& specs,
                                     const Config& config, const Stages& stages, const Mesh& mesh,
                                     int rank) {
  std::vector<exec::UnitState> units;
  int num_slots = 0;
  for (const UnitSpec& spec : specs) {
    exec::UnitState unit;
    unit.name = spec.module.empty() ? "the root" : spec.module;
    for (const int index : spec.params) {
      const ParamInfo& info = tree.params[index];
      const int named = info.whole >= 0 ? info.whole : index;
      const Dtype dtype = compute_dtype(config, tree.params[named]);
      const bool trainable = trains(config, info);
      const ModelPlacement placement = placement_of(info, index, stages, mesh, config);
      const bool quantized = rests_quantized(config, spec, tree.params[named]);
      exec::Flat* flat = nullptr;
      for (exec::Flat& one : unit.flats) {
        const bool alike = one.dtype == dtype && one.trainable == trainable;
        if (alike && one.placement == placement && one.quantized == quantized) flat = &one;
      }
      if (flat == nullptr) {
        flat = &unit.flats.emplace_back(dtype, trainable, placement, quantized);
        flat->number = static_cast<int>(unit.flats.size()) - 1;
      }
      flat->add(slot_of(info, named, placement.mesh(mesh), rank), unit.name);
    }
    for (exec::Flat& flat : unit.flats) {
      flat.seal(mesh.data() * flat.placement.num_addends(mesh));
      for (exec::Slot& slot : flat.slots) slot.number = num_slots++;
    }
    units.push_back(std::move(unit));
  }
  return units;
}

// Moves flats of other pipeline ranks to UnitState::away, which has names and shapes but no memory.
void keep_own(std::vector<exec::UnitState>& units, int pipeline) {
  for (exec::UnitState& unit : units) {
    std::vector<exec::Flat> own;
    for (exec::Flat& flat : unit.flats) {
      const bool mine = flat.placement.is_held_by(Axis::kPipeline, pipeline);
      (mine ? own : unit.away).push_back(std::move(flat));
    }
    unit.flats = std::move(own);
    for (exec::Flat& flat : unit.away) {
      for (exec::Slot& slot : flat.slots) {
        slot.guard =
            concat("[exec::guard] parameter \"", slot.name, "\" is in stage ",
                   flat.placement.on(Axis::kPipeline).holders.front(),
                   " of the pipeline, and this "
                   "rank is in stage ",
                   pipeline,
                   ". Read it inside `with engine.gathered():`. In a forward, use it through a "
                   "module that shares it (head.weight = tokens.weight).");
      }
    }
  }
}

ModelDesc describe(const std::vector<exec::UnitState>& units, const std::vector<UnitSpec>& specs) {
  ModelDesc model;
  for (size_t unit = 0; unit < units.size(); ++unit) {
    UnitDesc desc{.name = units[unit].name, .flats = {}, .block = specs[unit].block};
    for (const exec::Flat& flat : units[unit].flats) {
      desc.flats.push_back(
          {flat.numel, flat.dtype, flat.trainable, flat.placement, flat.quantized});
    }
    model.units.push_back(desc);
  }
  penstock::assume_order(model, true);
  return model;
}

bool leaves_tiers_open(const Config& config) {
  return config.offload.optimizer == "auto" || config.offload.params == "auto";
}

bool is_on_host(const Blueprint& blueprint) { return device_of(blueprint.split.tree).is_cpu(); }

Question question_of(const Blueprint& blueprint, const Room& room, bool external_optimizer) {
  const Config& config = blueprint.config;
  const Machine machine = is_on_host(blueprint) ? Machine::cpu() : Machine();
  return {
      {config, blueprint.mesh.world(), 0, machine, room}, {config.strategy}, external_optimizer};
}

// Throws ConfigError if "quantize" has no effect.
void check_quantized(const Config& config, const std::vector<exec::UnitState>& units) {
  if (config.quantize.dtype == "none") return;
  std::vector<std::string> names, unused;
  for (const exec::UnitState& unit : units) {
    for (const exec::Flat& flat : unit.flats) {
      for (const exec::Slot& slot : flat.slots) {
        if (flat.quantized) names.push_back(slot.name);
      }
    }
  }
  for (const std::string& pattern : config.quantize.params) {
    const bool used = std::any_of(names.begin(), names.end(), [&](const std::string& name) {
      return fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
    });
    if (!used) unused.push_back(concat("\"", pattern, "\""));
  }
  if (!unused.empty() && !names.empty()) {
    throw ConfigError(concat("[engine::draw] quantize.params has ", join(unused, ", "),
                             ", which no frozen parameter has"));
  }
  if (!names.empty()) return;
  throw ConfigError(
      concat("[engine::draw] \"quantize.dtype\" is \"", config.quantize.dtype,
             "\", but no parameter is quantized. Only frozen parameters are: set \"inference\", "
             "or requires_grad=False. ",
             config.quantize.params.empty()
                 ? "Without quantize.params they must be matrices in blocks of the model; give "
                   "name patterns for others"
                 : concat("The patterns are ", join(config.quantize.params, ", "))));
}

// Throws ConfigError for settings that do not work with tensor ranks yet.
void check_tensor(const ModelTree& tree, const Config& config) {
  const auto fail = [&](const std::string& what) {
    throw ConfigError(concat("[engine::draw] \"mesh.tensor\" is ", config.mesh.tensor, ": ", what));
  };
  if (config.parallel.rules.empty()) {
    fail(concat(
        "\"parallel.rules\" is empty, so no layer is cut. Give a style to each layer that is "
        "to be cut (docs/parallel.md). Layers that can be cut: ",
        parallel::names_of_matrices(tree)));
  }
  if (config.tiling.any()) fail("\"tiling\" is not supported with tensor ranks yet; remove it");
}

// Throws ConfigError for settings that do not work with expert ranks. `tree` has its cuts.
void check_experts(const ModelTree& tree, const Config& config) {
  const auto fail = [&](const std::string& what) {
    throw ConfigError(concat("[engine::draw] \"mesh.expert\" is ", config.mesh.expert, ": ", what));
  };
  if (config.tiling.any()) fail("\"tiling\" is not supported with expert ranks yet; remove it");
  std::vector<std::string> stacked;
  for (const ParamInfo& param : tree.params) {
    if (param.cut.axis == Axis::kExpert) return;
    if (param.param.dim() >= 3) stacked.push_back(concat("\"", param.name, "\""));
  }
  fail(
      concat("no rule in \"parallel.rules\" has the style \"expert\", so no parameter is divided "
             "over the expert ranks. Give it to the parameters with one row per expert, or to "
             "their module. Parameters of three dims: ",
             stacked.empty() ? "none" : join(stacked, ", ")));
}

bool keeps_whole(const Config& config) {
  return config.optimizer && config.optimizer->layout == "whole";
}

// Throws ConfigError if parameters are cut before they get into shards.
void check_whole(const Config& config) {
  const char* cuts = config.tiling.max_bytes > 0 ? "tiling.max_bytes"
                     : config.mesh.tensor > 1    ? "mesh.tensor"
                     : config.mesh.pipeline > 1  ? "mesh.pipeline"
                     : config.mesh.expert > 1    ? "mesh.expert"
                                                 : nullptr;
  if (!keeps_whole(config) || cuts == nullptr) return;
  throw ConfigError(
      concat("[engine::draw] the optimizer needs whole parameters "
             "(\"optimizer.layout\" \"whole\"), but \"",
             cuts,
             "\" divides the model. Leave it out, or use AdamW, Adam, SGD, "
             "Adagrad or Lion"));
}

// Calls `fail` for settings that do not work with split backwards.
void check_split(const Config& config, const std::function<void(const std::string&)>& fail) {
  const auto refuse = [&](const std::string& what) {
    fail(concat("\"parallel.schedule\": \"zero_bubble\" is not supported with ", what,
                "; use \"1f1b\""));
  };
  if (config.mesh.tensor > 1) refuse("\"mesh.tensor\" yet");
  if (config.mesh.sequence > 1) refuse("\"mesh.sequence\" yet");
  // Each part of the backward would compute the forward again.
  if (config.activations.checkpoint > 0) refuse("\"activations.checkpoint\"");
}

// Throws ConfigError for settings that do not work with pipelines yet.
void check_pipeline(const Config& config) {
  const auto fail = [&](const std::string& what) {
    throw ConfigError(
        concat("[engine::draw] \"mesh.pipeline\" is ", config.mesh.pipeline, ": ", what));
  };
  if (config.tiling.any()) fail("\"tiling\" is not supported in pipelines yet; remove it");
  if (config.parallel.schedule == "zero_bubble") check_split(config, fail);
  if (leaves_tiers_open(config)) {
    fail(
        "\"auto\" cannot choose tiers for stages of different sizes. Set \"offload.optimizer\" and "
        "\"offload.params\"");
  }
  const bool trains = !config.inference;
  if (trains && config.batch.accumulate < config.mesh.pipeline &&
      config.parallel.schedule != "gpipe") {
    fail(concat("\"batch.accumulate\" is ", config.batch.accumulate,
                ", fewer micro-batches than pipeline ranks, so some ranks would always ",
                "be idle. Raise it to a multiple of ", config.mesh.pipeline,
                ", or use the schedule \"gpipe\""));
  }
}

}  // namespace

namespace {

std::optional<Dtype> ruled_dtype(const Config& config, const std::string& name) {
  for (const auto& [pattern, dtype] : config.dtypes) {
    if (fnmatch(pattern.c_str(), name.c_str(), 0) == 0) return parse_dtype(dtype);
  }
  return std::nullopt;
}

}  // namespace

at::ScalarType buffer_dtype(const Config& config, const ModelTree& tree, const BufferInfo& buffer) {
  const at::ScalarType own = buffer.buffer.scalar_type();
  if (!at::isFloatingType(own)) return own;
  if (const auto ruled = ruled_dtype(config, buffer.name)) return device::scalar_type(*ruled);
  if (buffer.follows < 0) return own;
  return device::scalar_type(
      compute_dtype(config, tree.params.at(static_cast<size_t>(buffer.follows))));
}

c10::Device device_of(const ModelTree& tree) {
  if (tree.device) return *tree.device;
  return tree.params.empty() ? c10::Device(at::kCPU) : tree.params.front().param.device();
}

Dtype compute_dtype(const Config& config, const ParamInfo& param) {
  const at::ScalarType own = param.param.scalar_type();
  if (own != at::kFloat && own != at::kBFloat16 && own != at::kHalf) {
    throw ConfigError(concat(
        "[engine::compute_dtype] parameter \"", param.name, "\" has dtype ", at::toString(own),
        ", but the engine supports float32, bfloat16 and float16. Convert it with "
        "model.float() (which drops an imaginary part). If it does not train, make it a buffer: "
        "module.register_buffer(name, values)"));
  }
  if (const auto ruled = ruled_dtype(config, param.name)) return *ruled;
  if (config.precision) return parse_dtype(*config.precision);
  if (own == at::kBFloat16) return Dtype::kBf16;
  return own == at::kHalf ? Dtype::kFp16 : Dtype::kFp32;
}

// Places trained parameters so that no shard of the optimizer's state has a part of one.
void lay_out_whole(Blueprint& drawn) {
  const Table table = table_of(drawn.config, describe(drawn.units, drawn.specs)).on(drawn.mesh);
  const int num_shards = penstock::num_shards(table.master(), drawn.mesh);
  std::vector<int64_t> loads(static_cast<size_t>(num_shards), 0);
  int num_slots = 0;
  for (exec::UnitState& unit : drawn.units) {
    for (exec::Flat& flat : unit.flats) {
      if (flat.trainable && num_shards > 1) flat.seal_whole(drawn.mesh.data(), loads);
      for (exec::Slot& slot : flat.slots) slot.number = num_slots++;
    }
  }
}

// The order matters. Rules cut parameters, then large weights are split into tiles, then units are
// found among modules and tiles, then stages get their modules.
Blueprint draw(const ModelTree& given, const Config& config, int rank) {
  Blueprint drawn;
  drawn.config = config;
  drawn.mesh = mesh_of(config);
  ModelTree tree = given;
  const int tensor = drawn.mesh.size(Axis::kTensor);
  check_whole(config);
  if (tensor > 1) check_tensor(tree, config);
  std::vector<parallel::Ruled> ruled = parallel::apply(config.parallel.rules, config.mesh, &tree);
  if (tensor > 1) drawn.ruled = std::move(ruled);
  if (config.mesh.expert > 1) check_experts(tree, config);
  drawn.split = tiles::split_large(
      tree, config.tiling, [&](const ParamInfo& param) { return compute_dtype(config, param); });
  const int pipeline = drawn.mesh.size(Axis::kPipeline);
  if (pipeline > 1) check_pipeline(config);
  const ModelTree& split = drawn.split.tree;
  drawn.specs = find_units(split, pipeline > 1 ? Stages::units(config.units) : config.units);
  if (pipeline > 1) {
    drawn.stages = find_stages(split, drawn.specs, config);
  }
  const int at = drawn.mesh.coordinate(rank, Axis::kPipeline);
  drawn.units = lay_out(split, drawn.specs, config, drawn.stages, drawn.mesh, rank);
  if (keeps_whole(config)) lay_out_whole(drawn);
  check_quantized(config, drawn.units);
  // The fingerprint is made before keep_own(), because it must be equal on all stages.
  drawn.print = fingerprint(drawn.units);
  if (pipeline > 1) keep_own(drawn.units, at);
  drawn.model = describe(drawn.units, drawn.specs);
  const c10::Device where = device_of(drawn.split.tree);
  drawn.model.on_accelerator = !where.is_cpu() && !where.is_meta();
  return drawn;
}

void foresee(Blueprint& blueprint) {
  ModelDesc& model = blueprint.model;
  assume_order(model, blueprint.split.tree, blueprint.specs);
  // A unit of another stage has no flats and no events on this rank.
  const auto is_away = [&](const Visit& visit) {
    return visit.unit > 0 && model.units[static_cast<size_t>(visit.unit)].flats.empty();
  };
  std::erase_if(model.forward, is_away);
  std::erase_if(model.backward, is_away);
  mark_recomputed(blueprint.config, blueprint.model);
  // A device computes faster than it receives, so the next unit is always prefetched, whatever its
  // size.
  int64_t& ahead = blueprint.config.prefetch_bytes;
  if (ahead == 0 || is_on_host(blueprint)) return;
  for (const UnitDesc& unit : model.units) ahead = std::max(ahead, unit_bytes(unit));
}

std::string choose_tiers(Blueprint& blueprint, const Room& room, bool external_optimizer) {
  const bool open = leaves_tiers_open(blueprint.config);
  Question question = question_of(blueprint, room, external_optimizer);
  // A full disk is reported when the space is claimed, because that error names the path.
  if (!open) question.asked.room.disk = Room::kNoLimit;
  const std::vector<Alternative> tried = alternatives(question, blueprint.model);
  if (tried.empty()) throw ConfigError(refusal(question, blueprint.model));
  const Alternative& best = tried.front();
  // The error lists alternatives: other tiers with this strategy, and all strategies.
  if (!best.fits) {
    open_all(question);
    question.asked.room = room;
    std::vector<Alternative> others = alternatives(question, blueprint.model);
    question.strategies = preset_names();
    for (const Alternative& other : alternatives(question, blueprint.model)) {
      others.push_back(other);
    }
    refuse(best, others, question.asked.room);
  }
  if (!open) return "";
  blueprint.config = with(blueprint.config, best);
  return concat("offload chosen: optimizer \"", best.optimizer, "\", params \"", best.params,
                "\"; each rank has ", room.text(), "\n", choice_text(tried));
}

Budgets budgets_of(const Blueprint& blueprint, const Room& room, bool external_optimizer) {
  Question question = question_of(blueprint, room, external_optimizer);
  open_all(question);
  const Config& config = blueprint.config;
  const auto budget = [&](const char* name, int64_t limit, int64_t Alternative::* bytes) {
    const auto advice = [question, bytes, model = blueprint.model, now = config.offload] {
      return penstock::advice(question, model, now, bytes);
    };
    return mem::Budget{limit, name, advice};
  };
  const char* found = config.memory.host_bytes < 0
                          ? "free memory at initialize() (memory.host_bytes overrides it)"
                          : "device and host memory (memory.host_bytes)";
  const char* host = config.memory.host_bytes < 0 ? found : "host memory (memory.host_bytes)";
  return {budget("device memory (memory.device_bytes)", room.device, &Alternative::device),
          budget(host, room.host, &Alternative::host),
          budget(found, room.memory, &Alternative::memory)};
}

namespace {

// Throws ConfigError if offload.keep_bytes has no effect, or one that nobody wants.
void check_kept(const Config& config, const Table& table, const ModelDesc& model) {
  const int64_t bytes = config.offload.keep_bytes;
  if (bytes == 0) return;
  const auto fail = [&](const std::string& why) {
    throw ConfigError(concat("[engine::settle] \"offload.keep_bytes\" is ", bytes, why));
  };
  if (table.wires.param.lossy()) {
    fail(
        ", but parameters travel by a lossy wire, so kept and other units would have values of "
        "different precision. Use the plain wire, or leave this key out");
  }
  int64_t smallest = INT64_MAX;
  for (const UnitDesc& unit : model.units) {
    if (unit.kept) return;
    if (unit_bytes(unit) > 0) smallest = std::min(smallest, unit_bytes(unit));
  }
  if (smallest < INT64_MAX) fail(concat(", but the smallest unit has ", smallest, " bytes"));
}

}  // namespace

Table settle(Blueprint& blueprint) {
  const Table table = table_of(blueprint.config, blueprint.model);
  for (const UnitDesc& unit : blueprint.model.units) {
    const bool tied = std::any_of(unit.flats.begin(), unit.flats.end(), [](const FlatDesc& flat) {
      return flat.placement.is_partial(Axis::kPipeline);
    });
    if (!tied || !table.grads_wait_on_disk()) continue;
    throw ConfigError(concat("[engine::settle] \"", unit.name,
                             "\" has weights that several pipeline stages share (tied), so their "
                             "gradients cannot be on disk. Set \"offload.gradients\": \"host\""));
  }
  end_frozen_last(table.on(blueprint.mesh), blueprint.model);
  set_chunks(blueprint.config, table.on(blueprint.mesh), blueprint.model);
  set_kept(blueprint.config, blueprint.model);
  check_kept(blueprint.config, table, blueprint.model);
  return table;
}

void check_stages(const ModelTree& tree, const Config& config, const Room& room,
                  bool external_optimizer) {
  const Mesh mesh = mesh_of(config);
  const int stages = mesh.size(Axis::kPipeline);
  for (int stage = 0; stage < stages && stages > 1; ++stage) {
    // The pipeline axis is outermost, so this is the first rank of the stage.
    Blueprint one = draw(tree, config, mesh.world() / stages * stage);
    foresee(one);
    choose_tiers(one, room, external_optimizer);
    settle(one);
  }
}

namespace {

std::string text_of(const Cut& cut) {
  if (cut.kind == TensorCut::kWhole) return "";
  if (cut.kind == TensorCut::kPartial) return " partial";
  if (cut.axis != Axis::kTensor) return concat(" cut over ", axis_name(cut.axis));
  return concat(" cut along ", cut.dim, " in ", cut.parts.size());
}

}  // namespace

std::string fingerprint(const std::vector<exec::UnitState>& units) {
  std::string text;
  for (const exec::UnitState& unit : units) {
    for (const exec::Flat& flat : unit.flats) {
      for (const exec::Slot& slot : flat.slots) {
        text += concat("parameter \"", slot.name, "\" ", at::IntArrayRef(slot.whole), " ",
                       dtype_name(flat.dtype), flat.trainable ? "" : " frozen",
                       flat.quantized ? " quantized" : "", text_of(slot.cut), " in unit ",
                       unit.name, "\n");
      }
    }
  }
  return text;
}

}  // namespace penstock::engine
