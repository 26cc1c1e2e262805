#include "src/plan/strategy.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "penstock/error.h"
#include "penstock/optimizer_kinds.h"
#include "src/base/text.h"
#include "src/plan/check.h"
#include "src/plan/passes.h"
#include "src/plan/step_queries.h"

namespace penstock {

Section section_named(const std::string& name) {
  std::vector<std::string> names;
  for (const Section section : kSections) {
    if (name == section_name(section)) return section;
    names.emplace_back(section_name(section));
  }
  throw ConfigError(concat("[plan::section_named] there is no section \"", name,
                           "\"; allowed: ", join(names, ", ")));
}

bool trains_locally(const Config& config) { return config.comm.codec == "local"; }

int64_t outer_numel(int64_t numel, int64_t num_nodes) {
  constexpr int64_t kAlign = 512;  // of each node's part
  const int64_t step = kAlign * num_nodes;
  return (numel + step - 1) / step * step;
}

int64_t outer_bytes(const CommConfig& comm, int64_t numel, int64_t num_nodes) {
  const Wire wire = Wire::parse(comm.outer_wire, Rounding::kStochastic);
  const int64_t part = outer_numel(numel, num_nodes) / num_nodes;
  return 2 * (num_nodes - 1) * (wire.lossy() ? wire.encoded_bytes(part) : 4 * part);
}

Mesh mesh_of(const Config& config) {
  const MeshConfig& mesh = config.mesh;
  return Mesh::of({{Axis::kPipeline, mesh.pipeline},
                   {Axis::kNode, trains_locally(config) ? 1 : mesh.node},
                   {Axis::kLocal, mesh.data / mesh.node * mesh.sequence},
                   {Axis::kTensor, mesh.tensor}});
}

// Ranks are numbered with the tensor axis innermost, then sequence, data and pipeline.
int data_rank(const MeshConfig& mesh, int rank) {
  return rank / (mesh.tensor * mesh.sequence) % mesh.data;
}

namespace {

// A value of comm.codec.
struct Codec {
  const char* name;
  const char *param, *grad, *publish;  // wires
  const char* residual;                // tier and dtype; "": none
};
constexpr Codec kCodecs[] = {{"int8", "int8/128", "int8/128", "int8/128", ""},
                             {"fp8", "fp8/128", "int8/128", "int8/128", ""},
                             {"zero++", "int8/128", "int4/128/nearest", "int4/128", "host:bf16"},
                             {"1bit", "int8/128", "sign/128", "int4/128", "device:bf16"}};

const Codec* codec_of(const std::string& name) {
  const auto found = std::find_if(std::begin(kCodecs), std::end(kCodecs),
                                  [&](const Codec& one) { return one.name == name; });
  return found == std::end(kCodecs) ? nullptr : found;
}

// Links between nodes are slow, so only they are encoded. On one node, all exchanges are encoded.
// Parameters need a wire only on axes on which they are sharded at rest.
void set_wires(const Codec& codec, const Mesh& mesh, Table& table) {
  const char* const axis = mesh.size(Axis::kNode) > 1 ? "node:" : "";
  table.wires.set("grad", concat(axis, codec.grad));
  table.wires.set("param", concat(axis, codec.param));
  const Placement rest = table.on(mesh).at(Role::kParam, Phase::kRest);
  for (const Axis data : kDataAxes) {
    if (rest.on(data) != Layout::kSharded) table.wires.param.on(data) = Wire();
  }
}

// Updated parameters travel to rest over the axes on which only the optimizer state is sharded.
// Must follow the config's own cells, on which these axes depend. State on disk passes through
// memory in chunks, which deltas do not allow.
void set_deltas(const Codec& codec, const Mesh& mesh, Table& table) {
  const Table seen = table.on(mesh);
  if (!takes_deltas(seen) || seen.at(Role::kOptim, Phase::kRest).tier == Tier::kDisk) return;
  if (seen.at(Role::kOptim, Phase::kRest).layout != seen.master().layout) return;
  table.wires.set("publish", concat(mesh.size(Axis::kNode) > 1 ? "node:" : "", codec.publish));
  for (const Axis data : kDataAxes) {
    const bool gathers = seen.at(Role::kParam, Phase::kRest).on(data) == Layout::kReplicated &&
                         seen.master().on(data) == Layout::kSharded;
    if (!gathers) table.wires.publish.on(data) = Wire();
  }
}

// Returns whether the config says how updated parameters travel.
bool gives_deltas(const Config& config) {
  const auto row = config.table.find(kWireRow);
  return row != config.table.end() && row->second.contains("publish");
}

void set_base(const Mesh& mesh, Table& table) {
  if (table.keeps_base() || mesh.data() == 1) return;
  if (!table.wires.on(mesh).publish.lossy()) return;
  table.set(Role::kParam, Phase::kUpdate, base_of(table));
}

bool rounds_twice(const std::vector<LossySum>& sums) {
  return sums.size() > 1 || (!sums.empty() && sums.front().kind == MoveKind::kAllReduce);
}

// Must follow the config's own cells, on which the layout depends.
void set_residual(const Codec& codec, const Mesh& mesh, Table& table) {
  if (*codec.residual == '\0' || table.keeps_residual()) return;
  const std::vector<LossySum> sums = lossy_sums(table.on(mesh), mesh);
  if (mesh.data() == 1) table.wires = {};  // nothing is exchanged
  if (sums.empty() || rounds_twice(sums)) return;
  const std::string layout = sums.front().addends.text().substr(0, kDataAxes.size());
  table.set(Role::kResidual, Phase::kRest, Placement::parse(concat(layout, "@", codec.residual)));
}

Dtype quantized_dtype(const std::string& name) {
  return name == "int8" ? Dtype::kInt8 : Dtype::kInt4;
}

// Each rank caches the tokens of its own samples.
void set_cache(const Config& config, Table& table) {
  if (config.offload.cache == "none") return;
  Placement rest = table.at(Role::kAct, Phase::kForward);
  rest.tier = parse_tier(config.offload.cache);
  if (config.quantize.cache != "none") rest.dtype = quantized_dtype(config.quantize.cache);
  table.set(Role::kCache, Phase::kRest, rest);
}

// Parameters that are held as they rest are quantized there, too.
void set_quantized(const Config& config, Table& table) {
  const Placement rest = table.at(Role::kParam, Phase::kRest);
  const Dtype computes = table.at(Role::kParam, Phase::kForward).dtype;
  for (const Phase phase : {Phase::kRest, Phase::kHold}) {
    const Placement& cell = table.at(Role::kParam, phase);
    const bool changes = config.quantize.dtype != "none" && cell.dtype != computes;
    if (!is_quantized(cell.dtype) && !changes) continue;
    throw ConfigError(concat("[plan::table_of] table.param.", phase_name(phase), " is \"",
                             cell.text(), "\". Write the dtype of table.param.forward, ",
                             dtype_name(computes),
                             ", which stands for each parameter's own, and "
                             "set \"quantize.dtype\" for frozen parameters that rest quantized"));
  }
  if (config.quantize.dtype == "none") return;
  Placement quantized = rest;
  quantized.dtype = quantized_dtype(config.quantize.dtype);
  for (const Phase phase : {Phase::kRest, Phase::kHold}) {
    if (table.at(Role::kParam, phase) == rest) table.set(Role::kParam, phase, quantized);
  }
}

}  // namespace

Table table_of(const Config& config, const ModelDesc& model) {
  TableOptions options;
  options.precision = precision_of(model);
  const auto tier_of = [](const std::string& name) {
    return name == "none" ? Tier::kDevice : parse_tier(name);
  };
  options.optim_tier = tier_of(config.offload.optimizer);
  options.param_tier = tier_of(config.offload.params);
  if (config.offload.gradients != "none") options.grad_tier = tier_of(config.offload.gradients);
  options.act_tier = tier_of(config.offload.activations);
  options.accumulate = config.batch.accumulate * config.parallel.virtual_stages > 1;
  if (config.optimizer) options.moments = parse_dtype(config.optimizer->moments_dtype);
  Table table = preset(config.strategy, options);
  const Codec* const codec = codec_of(config.comm.codec);
  if (codec != nullptr) set_wires(*codec, mesh_of(config), table);
  // The config's own cells replace cells of the preset.
  for (const auto& [role_text, phases] : config.table) {
    for (const auto& [phase_text, place] : phases) {
      if (role_text == kWireRow) {
        table.wires.set(phase_text, place);
        continue;
      }
      for (int r = 0; r < kNumRoles; ++r) {
        for (int p = 0; p < kNumPhases; ++p) {
          const auto role = static_cast<Role>(r);
          const auto phase = static_cast<Phase>(p);
          if (role_text != role_name(role) || phase_text != phase_name(phase)) continue;
          table.set(role, phase, Placement::parse(place));
        }
      }
    }
  }
  set_quantized(config, table);
  set_cache(config, table);
  if (codec != nullptr && !gives_deltas(config)) set_deltas(*codec, mesh_of(config), table);
  if (codec != nullptr) set_residual(*codec, mesh_of(config), table);
  set_base(mesh_of(config), table);
  return table;
}

std::string codec_refusal(const Config& config, const ModelDesc& model) {
  const Codec* const codec = codec_of(config.comm.codec);
  if (codec == nullptr || *codec->residual == '\0') return "";
  const Mesh mesh = mesh_of(config);
  const Table table = table_of(config, model);
  if (table.keeps_residual() || !rounds_twice(lossy_sums(table.on(mesh), mesh))) return "";
  return concat("[plan::codec_refusal] \"comm.codec\" is \"", codec->name,
                "\", which keeps the error of one rounding of gradients, but strategy \"",
                config.strategy,
                "\" rounds gradients twice. Use \"zero1\", \"zero2\", \"zero3\" or \"hpz\", or "
                "the codec \"int8\"");
}

void check_outer_steps(const Config& config, const Table& table, bool external_optimizer) {
  if (!trains_locally(config)) return;
  const auto refuse = [](const std::string& setting, const std::string& why) {
    throw ConfigError(
        concat("[plan::check_outer_steps] \"comm.codec\" is \"local\" and ", setting, ", ", why));
  };
  if (external_optimizer) {
    refuse("the optimizer is your own",
           "which has state that outer steps do not know. Use an optimizer of the config");
  }
  if (config.nonfinite == "skip") {
    refuse("\"nonfinite\" is \"skip\"", "but nodes would skip different steps. Use \"error\"");
  }
  if (!config.checkpoint.signals.empty()) {
    refuse("\"checkpoint.signals\" is set",
           "but nodes would see a signal in different steps. Save after outer steps instead");
  }
  const Mesh mesh = mesh_of(config);
  const Table seen = table.on(mesh);
  const Placement& rest = seen.at(Role::kOptim, Phase::kRest);
  if (rest.layout != seen.at(Role::kOptim, Phase::kUpdate).layout) {
    refuse("the cells optim.rest and optim.update have different layouts",
           "but outer steps need masters that rest where they are updated. Use the same layout");
  }
  if (num_shards(rest, mesh) < mesh.data()) {
    refuse(concat("strategy \"", config.strategy, "\" keeps equal masters on the ", mesh.data(),
                  " data ranks of a node"),
           "which would all send them to the other nodes. Use \"zero1\" or another strategy that "
           "shards the optimizer's state over all of them");
  }
}

bool is_exact_step(const CommConfig& comm, int64_t step) {
  return step <= comm.exact_first || (comm.exact_every > 0 && step % comm.exact_every == 0);
}

bool has_exact_steps(const CommConfig& comm) {
  return comm.exact_first > 0 || comm.exact_every > 0;
}

bool can_rest_away(const std::string& strategy) {
  const Table table = preset(strategy, {});
  const Placement& rest = table.at(Role::kParam, Phase::kRest);
  return rest.sharded() && rest.tier == Tier::kDevice;
}

Config adapted(Config config, const std::string& strategy, const std::string& optimizer) {
  if (strategy != config.strategy) {  // its cells are meant for another preset
    std::erase_if(config.table, [](const auto& row) {
      return row.first != kWireRow && row.first != role_name(Role::kResidual);
    });
    const auto wires = config.table.find(kWireRow);
    if (wires != config.table.end()) {
      const Table table = preset(strategy, {});
      const Placement& rest = table.at(Role::kParam, Phase::kRest);
      if (!can_rest_away(strategy)) wires->second.erase("param");
      if (rest.layout == table.master().layout) wires->second.erase("publish");
    }
  }
  config.strategy = strategy;
  config.offload.optimizer = optimizer;
  const bool shards = can_rest_away(strategy), offloads = optimizer != "none";
  if (!shards) config.offload.params = "none";
  const bool needs_host = config.offload.gradients == "disk";
  if ((needs_host && !offloads) || !preset(strategy, {}).at(Role::kGrad, Phase::kHold).sharded())
    config.offload.gradients = "none";
  config.offload.late_update &= shards && offloads;
  return config;
}

void mark_recomputed(const Config& config, ModelDesc& model) {
  const int64_t every = config.activations.checkpoint;
  if (every == 0) return;
  int64_t num_blocks = 0;
  for (size_t unit = 1; unit < model.units.size(); ++unit) {
    if (model.units[unit].block) model.units[unit].recomputed = num_blocks++ % every == 0;
  }
  if (num_blocks > 0) return;
  throw ConfigError(
      "[plan::mark_recomputed] activations.checkpoint: the model has no blocks, and the root "
      "cannot be recomputed: name blocks in units.modules, or lower units.max_bytes");
}

namespace {

int num_shards_of(const FlatDesc& flat, const Placement& place, const Config& config) {
  return num_shards(place, flat.placement.mesh(mesh_of(config)));
}

// Returns the bytes that pass through memory for the first of `count` chunks, which is the largest.
int64_t chunk_bytes(const Config& config, const Table& table, const UnitDesc& unit, int count) {
  const Placement& optim = table.at(Role::kOptim, Phase::kRest);
  const Placement& held = table.at(Role::kGrad, Phase::kHold);
  int64_t bytes = 0;
  for (const FlatDesc& flat : unit.flats) {
    if (!flat.trainable) continue;
    int64_t of_element = 4 + num_moments(config) * dtype_bytes(optim.dtype);
    if (held.tier == Tier::kDisk) of_element += dtype_bytes(table.dtype_in(held, flat.dtype));
    if (table.at(Role::kParam, Phase::kRest).tier == Tier::kDisk)
      of_element += dtype_bytes(flat.dtype);
    bytes +=
        range_of({0, count}, flat.numel / num_shards_of(flat, optim, config)).second * of_element;
  }
  return bytes;
}

}  // namespace

void set_chunks(const Config& config, const Table& table, ModelDesc& model) {
  // Three chunks are in memory: one is read, a second is updated and a third is written.
  const int64_t most = config.offload.window_bytes / 3;
  const Placement& optim = table.at(Role::kOptim, Phase::kRest);
  const bool streams = streams_state(table);
  for (UnitDesc& unit : model.units) {
    unit.num_chunks = 1;
    if (!streams) continue;
    int64_t grains = 1;
    for (const FlatDesc& flat : unit.flats) {
      if (!flat.trainable) continue;
      const int64_t owned = flat.numel / num_shards_of(flat, optim, config);
      grains = std::max(grains, (owned + kChunkGrain - 1) / kChunkGrain);
    }
    const int64_t all = chunk_bytes(config, table, unit, 1);
    unit.num_chunks = static_cast<int>(std::min(grains, all / std::max<int64_t>(1, most) + 1));
    // Chunks are whole grains, so the first estimate may be too coarse.
    while (unit.num_chunks < grains && chunk_bytes(config, table, unit, unit.num_chunks) > most)
      ++unit.num_chunks;
  }
}

// While the forward computes with these units, the others are read ahead.
void set_kept(const Config& config, ModelDesc& model) {
  int64_t left = config.offload.keep_bytes;
  for (const Visit& visit : model.forward) {
    UnitDesc& unit = model.units[static_cast<size_t>(visit.unit)];
    const int64_t bytes = unit_bytes(unit);
    if (unit.kept || bytes == 0 || bytes > left) continue;
    unit.kept = true;
    left -= bytes;
  }
}

void resolve_reduce_dtype(const ModelDesc& model, bool rings, Config* config) {
  if (config->comm.reduce_dtype != "auto") return;
  const Mesh mesh = mesh_of(*config);
  const Table table = table_of(*config, model).on(mesh);
  const bool wide = rings && !table.wires.grad.lossy() && ring_sends_less(mesh, table);
  config->comm.reduce_dtype = wide ? "fp32" : "gradient";
}

Plan with_passes(const Plan& plan, const ModelDesc& model, const Config& config) {
  Plan made = fuse(prefetch(read_ahead(plan), model, config.prefetch_bytes), model,
                   config.comm.bucket_bytes);
  if (config.comm.reduce_dtype != "fp32") return made;
  return sum_as_fp32(made, table_of(config, model).on(mesh_of(config)));
}

int num_moments(const Config& config) {
  return penstock::num_moments(config.optimizer.value_or(OptimizerConfig{}));
}

Plan window_plan(const Config& config, const Table& table, const ModelDesc& model) {
  const Mesh mesh = mesh_of(config);
  Plan window;
  const auto append = [&](Section section) {
    Plan part = with_passes(plan_section(table, model, mesh, section), model, config);
    std::move(part.steps.begin(), part.steps.end(), std::back_inserter(window.steps));
  };
  if (config.inference) {
    append(Section::kEval);
    return window;
  }
  const auto num_micro = static_cast<int>(config.batch.accumulate);
  for (int micro = 0; micro < num_micro; ++micro) {
    window.steps.push_back({.op = Op::kMicro, .micro = micro});
    append(micro == 0 ? Section::kForward : Section::kForwardNext);
    append(micro + 1 < num_micro ? Section::kBackward : Section::kBackwardLast);
  }
  append(Section::kUpdate);
  return window;
}

namespace {

bool has_frozen(const UnitDesc& unit) {
  return std::any_of(unit.flats.begin(), unit.flats.end(),
                     [](const FlatDesc& one) { return !one.trainable; });
}

}  // namespace

void end_frozen_last(const Table& table, ModelDesc& model) {
  if (!table.moves_params()) return;
  std::vector<Visit>& visits = model.backward;
  for (size_t i = visits.size(); i-- > 0;) {
    Visit end = visits[i];
    const bool ends = end.mark == Mark::kWhole || end.mark == Mark::kEnd;
    if (end.unit == 0 || !ends || !has_frozen(model.units[static_cast<size_t>(end.unit)])) continue;
    size_t next = i + 1;
    while (next < visits.size() && visits[next].unit != 0 && visits[next].mark == Mark::kGradient) {
      ++next;
    }
    if (next == i + 1) continue;
    end.mark = Mark::kEnd;
    visits.insert(visits.begin() + static_cast<std::ptrdiff_t>(next), end);
    if (visits[i].mark == Mark::kWhole) {
      visits[i].mark = Mark::kBegin;
    } else {
      visits.erase(visits.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
}

namespace {

Ledger with_peaks_of(const Ledger& other, Ledger ledger) {
  for (size_t tier = 0; tier < ledger.tier.size(); ++tier) {
    for (int64_t MemoryPeak::* part : {&MemoryPeak::param, &MemoryPeak::grad, &MemoryPeak::optim,
                                       &MemoryPeak::buffers, &MemoryPeak::total}) {
      ledger.tier[tier].*part = std::max(ledger.tier[tier].*part, other.tier[tier].*part);
    }
  }
  ledger.in_memory = std::max(ledger.in_memory, other.in_memory);
  return ledger;
}

using Counts = std::map<std::string, int64_t>;

// Adds the counts of `more` micro-batches. `less` has one micro-batch less than `counts`.
void extend(Counts& counts, const Counts& less, int64_t more) {
  for (auto& [name, count] : counts) {
    const auto before = less.find(name);
    count += more * (count - (before == less.end() ? 0 : before->second));
  }
}

Counts at_or_empty(const std::map<std::string, Counts>& counts, const std::string& name) {
  const auto found = counts.find(name);
  return found == counts.end() ? Counts() : found->second;
}

// Adds the anchors and momenta of outer steps, and their traffic per training step.
void add_outer_steps(const Config& config, const Table& table, const ModelDesc& model,
                     Ledger& ledger) {
  int64_t numel = 0, sent = 0;
  for (const UnitDesc& unit : model.units) {
    for (const FlatDesc& flat : unit.flats) {
      if (!flat.trainable) continue;
      const int64_t own = flat.numel / num_shards_of(flat, table.master(), config);
      numel += own;
      sent += outer_bytes(config.comm, own, config.mesh.node);
    }
  }
  MemoryPeak& host = ledger.tier[static_cast<size_t>(Tier::kHost)];
  host.optim += 8 * numel;
  host.total += 8 * numel;
  ledger.in_memory += 8 * numel;
  if (sent > 0) ledger.sent["update"]["node"] += sent / config.comm.outer_every;
}

}  // namespace

Ledger predict(const Config& config, ModelDesc model, bool external_optimizer,
               const PlanOf& plan_of) {
  const Mesh mesh = mesh_of(config);
  const Table table = table_of(config, model).on(mesh);
  set_chunks(config, table, model);
  const bool is_set = std::any_of(model.units.begin(), model.units.end(),
                                  [](const UnitDesc& unit) { return unit.kept; });
  if (!is_set) set_kept(config, model);
  end_frozen_last(table, model);
  const int moments = external_optimizer ? 0 : num_moments(config);
  const auto ledger_of = [&](const Table& wired) {
    const Plan plan = plan_of ? plan_of(wired, model) : window_plan(config, wired, model);
    return simulate(plan, wired, model, mesh,
                    {.moments_per_param = static_cast<double>(moments),
                     .late_update = config.offload.late_update && !table.rests_whole(),
                     .external = external_optimizer});
  };
  Ledger ledger = ledger_of(table);
  if (trains_locally(config)) add_outer_steps(config, table, model, ledger);
  if (!has_exact_steps(config.comm)) return ledger;
  // The peaks also cover exact steps. The traffic is that of the other steps.
  Table exact = table;
  exact.wires = {};
  return with_peaks_of(ledger_of(exact), std::move(ledger));
}

// In a window of more micro-batches than this, each additional micro-batch adds the same traffic.
// The first and the last micro-batch differ from the others, and their neighbours may also differ.
constexpr int64_t kAlike = 3;

Ledger predict_window(const Config& config, ModelDesc model, bool external_optimizer) {
  const int64_t more = config.batch.accumulate - kAlike;
  if (more <= 0) return predict(config, std::move(model), external_optimizer);
  Config few = config;
  few.batch.accumulate = kAlike - 1;
  const Ledger less = predict(few, model, external_optimizer);
  few.batch.accumulate = kAlike;
  Ledger ledger = predict(few, std::move(model), external_optimizer);
  ledger.exchanges += more * (ledger.exchanges - less.exchanges);
  extend(ledger.coded, less.coded, more);
  for (auto& [phase, links] : ledger.sent) extend(links, at_or_empty(less.sent, phase), more);
  for (auto& [phase, links] : ledger.waited) extend(links, at_or_empty(less.waited, phase), more);
  return ledger;
}

}  // namespace penstock
