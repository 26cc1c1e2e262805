#include "src/engine/blueprint.h"

#include <fnmatch.h>

#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/plan/choice.h"
#include "src/plan/strategy.h"

namespace penstock::engine {

namespace {

// One flat per unit, dtype and trainability.
std::vector<exec::UnitState> lay_out(const ModelTree& tree, const std::vector<UnitSpec>& specs,
                                     const Config& config, int num_ranks) {
  std::vector<exec::UnitState> units;
  for (const UnitSpec& spec : specs) {
    exec::UnitState unit;
    unit.name = spec.module.empty() ? "the root" : spec.module;
    for (const int index : spec.params) {
      const ParamInfo& info = tree.params[index];
      const int named = info.whole >= 0 ? info.whole : index;
      const Dtype dtype = compute_dtype(config, tree.params[named]);
      const bool trainable = info.param.requires_grad();
      exec::Flat* flat = nullptr;
      for (exec::Flat& one : unit.flats) {
        if (one.dtype == dtype && one.trainable == trainable) flat = &one;
      }
      if (flat == nullptr) flat = &unit.flats.emplace_back(dtype, trainable);
      exec::Slot slot;
      slot.name = info.name;
      slot.param = info.param;
      slot.index = named;
      slot.group = info.group;
      flat->add(slot, unit.name);
    }
    for (exec::Flat& flat : unit.flats) flat.seal(num_ranks);
    units.push_back(std::move(unit));
  }
  return units;
}

ModelDesc describe(const std::vector<exec::UnitState>& units, const std::vector<UnitSpec>& specs) {
  ModelDesc model;
  for (size_t unit = 0; unit < units.size(); ++unit) {
    UnitDesc desc{.name = units[unit].name, .flats = {}, .block = specs[unit].block};
    for (const exec::Flat& flat : units[unit].flats) {
      desc.flats.push_back({flat.numel, flat.dtype, flat.trainable});
    }
    model.units.push_back(desc);
  }
  penstock::assume_order(model, true);
  return model;
}

bool leaves_tiers_open(const Config& config) {
  return config.offload.optimizer == "auto" || config.offload.params == "auto";
}

void leave_tiers_open(Question& question) {
  question.asked.config.offload.optimizer = question.asked.config.offload.params = "auto";
}

Question question_of(const Blueprint& blueprint, const Room& room, bool external_optimizer) {
  const Config& config = blueprint.config;
  return {{config, blueprint.mesh.world(), 0, Machine::cpu(), room},
          {config.strategy},
          external_optimizer};
}

}  // namespace

Dtype compute_dtype(const Config& config, const ParamInfo& param) {
  const at::ScalarType own = param.param.scalar_type();
  if (own != at::kFloat && own != at::kBFloat16 && own != at::kHalf) {
    throw ConfigError(concat("[engine::compute_dtype] parameter \"", param.name, "\" has dtype ",
                             at::toString(own), "; float32, bfloat16 and float16 are supported"));
  }
  for (const auto& [pattern, dtype] : config.dtypes) {
    if (fnmatch(pattern.c_str(), param.name.c_str(), 0) == 0) return parse_dtype(dtype);
  }
  if (config.precision) return parse_dtype(*config.precision);
  if (own == at::kBFloat16) return Dtype::kBf16;
  return own == at::kHalf ? Dtype::kFp16 : Dtype::kFp32;
}

Blueprint draw(const ModelTree& tree, const Config& config) {
  Blueprint drawn;
  drawn.config = config;
  drawn.mesh = mesh_of(config);
  drawn.split = tiles::split_large(
      tree, config.tiling, [&](const ParamInfo& param) { return compute_dtype(config, param); });
  drawn.specs = find_units(drawn.split.tree, config.units);
  drawn.units = lay_out(drawn.split.tree, drawn.specs, config, drawn.mesh.data());
  drawn.model = describe(drawn.units, drawn.specs);
  return drawn;
}

void foresee(Blueprint& blueprint) {
  assume_order(blueprint.model, blueprint.split.tree, blueprint.specs);
  mark_recomputed(blueprint.config, blueprint.model);
}

std::string choose_tiers(Blueprint& blueprint, const Room& room, bool external_optimizer) {
  const bool open = leaves_tiers_open(blueprint.config);
  Question question = question_of(blueprint, room, external_optimizer);
  // A disk that is too full is found when its space is claimed, with its path.
  if (!open) question.asked.room.disk = Room::kNoLimit;
  const std::vector<Alternative> tried = alternatives(question, blueprint.model);
  if (tried.empty()) throw ConfigError(refusal(question, blueprint.model));
  const Alternative& best = tried.front();
  if (!best.fits) {
    leave_tiers_open(question);
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
  leave_tiers_open(question);
  const Config& config = blueprint.config;
  const auto budget = [&](const char* name, int64_t limit, int64_t Alternative::* bytes) {
    const auto advice = [question, bytes, model = blueprint.model, now = config.offload] {
      return penstock::advice(question, model, now, bytes);
    };
    return mem::Budget{limit, name, advice};
  };
  const char* found = config.memory.host_bytes < 0
                          ? "memory found free (memory.host_bytes says otherwise)"
                          : "device and host memory (memory.host_bytes)";
  return {budget("device memory (memory.device_bytes)", room.device, &Alternative::device),
          budget("host memory (memory.host_bytes)", room.host, &Alternative::host),
          budget(found, room.memory, &Alternative::memory)};
}

Table settle(Blueprint& blueprint) {
  const Table table = table_of(blueprint.config, blueprint.model);
  set_chunks(blueprint.config, table.on(blueprint.mesh), blueprint.model);
  return table;
}

std::string fingerprint(const std::vector<exec::UnitState>& units) {
  std::string text;
  for (const exec::UnitState& unit : units) {
    for (const exec::Flat& flat : unit.flats) {
      for (const exec::Slot& slot : flat.slots) {
        text += concat("parameter \"", slot.name, "\" ", slot.param.sizes(), " ",
                       dtype_name(flat.dtype), flat.trainable ? "" : " frozen", " in unit ",
                       unit.name, "\n");
      }
    }
  }
  return text;
}

}  // namespace penstock::engine
