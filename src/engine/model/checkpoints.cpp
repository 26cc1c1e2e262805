// Save and load of a core. This file decides when they are allowed, makes the ranks agree, and
// handles the state that is not a tensor (counts, loss scale, config). src/ckpt reads and writes
// the tensors.
//
// [Note: A load] Rank 0 chooses the newest checkpoint whose manifest and files look complete. The
// other ranks must see the same manifest. All ranks check names and shapes before any state is
// changed. Then they read the data. State::unloaded makes every call fail until the load has
// finished. If any rank finds damaged data, all ranks try the next checkpoint.
#include "penstock/checkpoint.h"

#include <ATen/core/grad_mode.h>
#include <torch/version.h>

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <limits>
#include <map>
#include <string_view>
#include <utility>

#include "penstock/error.h"
#include "penstock/optimizer_kinds.h"
#include "src/base/board.h"
#include "src/base/text.h"
#include "src/ckpt/checksum.h"
#include "src/ckpt/damaged.h"
#include "src/ckpt/load.h"
#include "src/engine/model/checkpoint_tensors.h"
#include "src/engine/model/held_units.h"
#include "src/engine/model/residual_state.h"
#include "src/engine/step/core_state.h"
#include "src/engine/step/planning.h"
#include "src/engine/step/window_agreement.h"
#include "src/plan/strategy.h"

namespace penstock {

namespace {

using ckpt::Json;

// Returns a function from slots to names in a checkpoint. For a tile, the result is a range of rows
// of the user's weight.
ckpt::GlobalOf names_of(const tiles::TiledWeights& tiled) {
  std::map<int, ckpt::Global> of_tile;
  for (const tiles::TiledWeight& one : tiled.all()) {
    const int64_t row = one.whole.size(0) == 0 ? 0 : one.whole.numel() / one.whole.size(0);
    for (size_t i = 0; i < one.units.size(); ++i) {
      of_tile[one.units[i]] = {one.name, one.whole.sizes().vec(), one.first[i] * row};
    }
  }
  return [of_tile = std::move(of_tile)](int unit, const exec::Slot& slot) -> ckpt::Global {
    const auto found = of_tile.find(unit);
    if (found != of_tile.end()) return found->second;
    return {slot.name, slot.whole, 0};
  };
}

std::vector<std::string> moments_of(const Config& config) {
  const OptimizerKind& kind = kind_of(config.optimizer.value_or(OptimizerConfig{}).type);
  return {kind.moments.begin(), kind.moments.end()};
}

Json parse(const std::string& text, const char* what) {
  try {
    return ckpt::parse_json(text, what);
  } catch (const ckpt::Damaged& error) {
    throw ConfigError(error.what());
  }
}

FoundCheckpoint describe(const std::string& path, const ckpt::Manifest& manifest) {
  FoundCheckpoint found;
  found.path = path;
  found.world = manifest.world;
  found.front = manifest.front.dump();
  for (const Json& rank : manifest.ranks) found.of_ranks.push_back(rank.dump());
  for (const ckpt::Tensor& tensor : manifest.tensors) {
    found.tensors.push_back({tensor.role,
                             tensor.name,
                             tensor.shape,
                             0,
                             tensor.rank,
                             {},
                             ckpt::scalar_type(tensor.dtype)});
  }
  return found;
}

// A checkpoint whose manifest and file sizes are right. The data is not checked yet.
struct Candidate {
  std::string path, text;
  ckpt::Manifest manifest{};

  void open() {
    manifest = ckpt::Manifest::read(path + "/" + ckpt::kManifest, &text);
    for (const ckpt::Tensor& tensor : manifest.tensors) ckpt::scalar_type(tensor.dtype);
    const ckpt::TensorReader reader(path, manifest);
  }
};

std::vector<std::string> candidates(const std::string& path, const std::string& tag) {
  if (!tag.empty()) return {path + "/" + tag};
  if (ckpt::exists(path + "/" + ckpt::kManifest)) return {path};
  std::vector<std::string> found;
  for (const std::string& one : ckpt::tags(path)) found.push_back(path + "/" + one);
  return found;
}

// Returns the state to save or load. If `frozen` is false, leaves out the frozen parameters for
// which `absent` returns true. Frozen parameters have flats of their own.
std::vector<ckpt::Holding> without(std::vector<ckpt::Holding> found, bool frozen,
                                   const std::function<bool(const ckpt::Holding&)>& absent) {
  if (!frozen) {
    std::erase_if(found,
                  [&](const ckpt::Holding& one) { return !one.flat->trainable && absent(one); });
  }
  return found;
}

void say_passed_over(const std::string& path, const std::string& why) {
  std::fprintf(stderr, "penstock: checkpoint \"%s\" is skipped: %s\n", path.c_str(), why.c_str());
}

}  // namespace

// One save() or load().
struct Core::State::Checkpointing {
  Core::State& state;
  const ckpt::GlobalOf names = names_of(*state.tiled);

  std::vector<std::string> share(const std::string& label, const std::string& text) const;
  std::string agree(const std::string& label, const std::string& problem) const {
    return engine::first_problem(*state.executor, label, problem);
  }
  std::string refusal(bool in_window) const;
  void rest() const;
  engine::ResidualState residuals() const {
    return {*state.executor, state.group->rank(), engine::residual_divisor(state.config)};
  }
  Json numbers() const;
  Json about() const;
  void restore(const ckpt::Manifest& manifest) const;
  engine::FlatParts flat_state(const ckpt::Manifest* from = nullptr) const;
  void check_asked(const std::string& path, const std::string& tag,
                   const SaveOptions& options) const;
  std::string save(const std::string& path, const SaveOptions& options);

  struct Load;
};

// Returns the state of flats to save, or to fill from a checkpoint.
engine::FlatParts Core::State::Checkpointing::flat_state(const ckpt::Manifest* from) const {
  engine::FlatParts parts = from == nullptr ? residuals().parts() : residuals().to_fill(*from);
  if (state.outer) std::ranges::move(state.outer->momenta(), std::back_inserter(parts));
  return parts;
}

std::vector<std::string> Core::State::Checkpointing::share(const std::string& label,
                                                           const std::string& text) const {
  return engine::share_text(*state.executor, label, text);
}

// Returns an error text if nothing can be saved now. Otherwise returns "".
std::string Core::State::Checkpointing::refusal(bool in_window) const {
  const auto seen = state.window->seen();
  if (state.window->armed()) {
    return "[engine::save] save() was called while a backward runs, or after one that raised an "
           "error. Save after the backward, or drop its gradients with zero_grad()";
  }
  if (seen > 0 && !in_window) {
    return concat(
        "[engine::save] save() was called in the middle of a window, so the gradients of ", seen,
        " of ", state.config.batch.accumulate,
        " backwards would be lost. Save after step() (force=True closes a window early), "
        "drop the gradients with zero_grad(), or pass in_window=True to save without them");
  }
  if (const int64_t left = state.outer ? state.outer->steps_left() : 0; left > 0) {
    return concat(
        "[engine::save] save() was called between outer steps, when each node has its own "
        "weights. Save after the next outer step, in step ",
        state.steps + left);
  }
  if (std::any_of(state.progress.begin(), state.progress.end(),
                  [](const auto& unit) { return unit.written > 0; })) {
    return "[engine::save] save() was called inside gathered(write=True), but values written there "
           "become the weights only when the block ends. Save after the block";
  }
  return "";
}

// Drops the window and the working copies before the state is replaced.
void Core::State::Checkpointing::rest() const {
  state.driver->abandon(true);
  state.drop_gradients();
}

// [all ranks] Returns the counts of the engine. The counts of parameters are collected from all
// stages.
Json Core::State::Checkpointing::numbers() const {
  Json updates = Json::object(), squared = Json::object();
  const std::vector<exec::UnitState>& units = state.executor->units();
  for (size_t unit = 0; unit < units.size(); ++unit) {
    for (const exec::Flat& flat : units[unit].flats) {
      if (!flat.trainable) continue;
      for (const exec::Slot& slot : flat.slots) {
        const std::string name = names(static_cast<int>(unit), slot).name;
        updates[name] = slot.updates;
        if (slot.squared != slot.updates) squared[name] = slot.squared;
      }
    }
  }
  if (state.model_ranks.stages) {
    for (const std::string& theirs : share("save numbers", Json{updates, squared}.dump())) {
      const Json both = Json::parse(theirs);
      updates.update(both[0]);
      squared.update(both[1]);
    }
  }
  return {{"steps", state.steps},
          {"skipped", state.skipped},
          {"loss_scale",
           {{"active", state.loss_scale.active()},
            {"value", state.loss_scale.value()},
            {"good_steps", state.loss_scale.good_steps()},
            {"tolerated", state.loss_scale.tolerated()}}},
          {"updates", updates},
          {"squared", squared}};
}

Json Core::State::Checkpointing::about() const {
  std::string plans;
  for (const Section section : kSections) plans += state.driver->plan({section}).text();
  return {{"penstock", PENSTOCK_VERSION},        {"torch", TORCH_VERSION},
          {"strategy", state.config.strategy},   {"mesh", state.executor->mesh().text()},
          {"plan", ckpt::hex(hash_text(plans))}, {"config", Json::parse(state.config.json())}};
}

void Core::State::Checkpointing::restore(const ckpt::Manifest& manifest) const {
  const ckpt::JsonReader numbers(manifest.state, "the manifest's state");
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  state.steps = numbers.whole("steps", 0, kMost);
  Planning{state}.follow_wires();
  state.skipped = numbers.whole("skipped", 0, kMost);
  state.executor->set_step(state.steps + 1);
  state.model_ranks.set_step(state.steps + 1);
  const ckpt::JsonReader scale(numbers.object("loss_scale"), "the manifest's loss_scale");
  const Json& value = scale.at("value");
  if (!value.is_number()) scale.fail("\"value\" is not a number");
  if (scale.at("active") == true) {
    const bool counts =
        numbers.object("loss_scale").contains("tolerated");  // not in older versions
    state.loss_scale.restore(value.get<double>(), scale.whole("good_steps", 0, kMost),
                             counts ? scale.whole("tolerated", 0, kMost) : 0);
  }
  const auto counts_of = [&](const char* key) {
    std::map<std::string, int64_t> counts;
    if (!manifest.state.contains(key)) return counts;  // "squared" is not in older versions
    for (const auto& [name, count] : numbers.object(key).items()) {
      counts[name] = numbers.number(count, 0, kMost);
    }
    return counts;
  };
  const std::map<std::string, int64_t> updates = counts_of("updates"),
                                       squared = counts_of("squared");
  for (exec::UnitState& unit : state.executor->units()) {
    for (exec::Flat& flat : unit.flats) {
      for (exec::Slot& slot : flat.slots) {
        const auto index = static_cast<int>(&unit - state.executor->units().data());
        const std::string name = names(index, slot).name;
        const auto found = updates.find(name);
        slot.updates = found == updates.end() ? 0 : found->second;
        const auto fewer = squared.find(name);
        slot.squared = fewer == squared.end() ? slot.updates : fewer->second;
      }
    }
  }
}

// One load(): tries candidates until one is read without damage ([Note: A load]).
struct Core::State::Checkpointing::Load {
  const Checkpointing& shared;
  const std::string& path;
  const LoadOptions& options;
  Core::State& state = shared.state;
  std::vector<std::string> passed_over{};
  std::string last{};  // why the last candidate was skipped

  FoundCheckpoint run() {
    while (true) {
      const Candidate chosen = choose();
      if (chosen.path.empty()) return {};
      const FoundCheckpoint found = describe(chosen.path, chosen.manifest);
      const std::string damage = read(chosen, found);
      if (damage.empty()) return found;
      if (state.group->rank() == 0) say_passed_over(chosen.path, damage);
      passed_over.push_back(chosen.path);
      last = damage;
    }
  }

  // On rank 0: finds the first candidate that looks complete. Returns an error text if there is
  // none.
  std::string look(Candidate& chosen) {
    std::vector<std::string> found;
    try {
      found = candidates(path, options.tag);
    } catch (const RuntimeFault& error) {
      return error.what();
    }
    for (const std::string& one : found) {
      if (std::count(passed_over.begin(), passed_over.end(), one) > 0) continue;
      try {
        chosen.path = one;
        chosen.open();
        return "";
      } catch (const RuntimeFault& error) {
        last = error.what();
        chosen.path.clear();
        if (options.tag.empty()) say_passed_over(one, last);
      }
    }
    if (options.missing_ok && last.empty()) return "";
    return concat("[engine::load] there is no checkpoint that can be loaded in \"", path, "\"",
                  options.tag.empty() ? "" : concat(", tag \"", options.tag, "\""),
                  last.empty() ? "" : concat(" (", last, ")"));
  }

  // [all ranks] Rank 0 chooses a checkpoint, and the other ranks must see the same one. The path is
  // "" if there is none.
  Candidate choose() {
    const int rank = state.group->rank();
    Candidate chosen;
    std::string problem = shared.agree("load where", rank == 0 ? look(chosen) : "");
    if (!problem.empty()) throw RuntimeFault(problem);
    const std::string there = shared.share("load path", chosen.path).front();
    if (there.empty()) return {};
    try {
      if (rank != 0) {
        chosen.path = there;
        chosen.open();
      }
    } catch (const RuntimeFault& error) {
      problem = error.what();
    }
    const std::vector<std::string> hashes =
        shared.share("load manifest", ckpt::hex(hash_text(chosen.text)));
    if (problem.empty() && hashes[rank] != hashes.front()) {
      problem = "its checkpoint differs from that of rank 0. Every rank needs the same folder";
    }
    problem = shared.agree("load sees", problem);
    if (!problem.empty()) throw RuntimeFault(concat("[engine::load] \"", there, "\": ", problem));
    return chosen;
  }

  // Returns the tensors to read in addition to the inventory.
  std::vector<ckpt::Extra> extras(const Candidate& chosen, const FoundCheckpoint& found,
                                  const engine::FlatParts& parts) const {
    std::vector<ckpt::Extra> all = engine::to_read(parts, chosen.manifest, shared.names);
    if (!options.tensors) return all;
    std::ranges::move(engine::wanted_of(options.tensors(found), chosen.manifest,
                                        state.group->rank(), state.group->size()),
                      std::back_inserter(all));
    return all;
  }

  // [all ranks] Reads a checkpoint. Returns the damage that any rank found, or "". If read()
  // throws, nothing was changed.
  std::string read(const Candidate& chosen, const FoundCheckpoint& found) {
    const int rank = state.group->rank();
    exec::Executor& executor = *state.executor;
    const std::vector<std::string> moments = moments_of(state.config);
    const ckpt::TensorLoadOptions wanted{options.optimizer, options.tied};
    ckpt::Target target{executor, state.tiers, shared.names, {}, {}};
    const engine::ResidualState residuals = shared.residuals();
    engine::FlatParts parts;
    std::string problem;
    try {
      engine::refuse_in_pass(state.passes, "load");
      if (state.driver->holds()) {
        throw RuntimeFault(
            "[engine::load] load() was called inside gathered(). Leave the block before you call "
            "load()");
      }
      executor.updates().finish();
      if (options.optimizer) parts = shared.flat_state(&chosen.manifest);
      target.extras = extras(chosen, found, parts);
      const auto lacks = [&](const ckpt::Holding& one) {
        return std::ranges::all_of(one.flat->slots, [&](const exec::Slot& slot) {
          return !ckpt::has_parameter(chosen.manifest, wanted, shared.names(one.unit, slot).name);
        });
      };
      target.holdings = without(ckpt::holdings(executor, rank, moments), options.frozen, lacks);
      target.elsewhere = engine::names_away(executor);
      ckpt::check(chosen.manifest, target, moments, wanted);
      for (const ckpt::Holding& one : target.holdings) executor.traffic().claim_write(*one.buffer);
      if (rank == 0 && !wanted.tied.empty()) {
        ckpt::TensorReader first(chosen.path, chosen.manifest);
        ckpt::check_tied(first, chosen.manifest, wanted);
      }
    } catch (const std::exception& error) {
      problem = error.what();
    }
    problem = shared.agree("load names", problem);
    if (!problem.empty()) throw ConfigError(problem);
    shared.rest();
    state.unloaded =
        concat("[engine::load] the load of \"", chosen.path,
               "\" did not finish, so the weights are neither the old ones nor those of the "
               "checkpoint. Load another checkpoint, or close() the engine");
    ckpt::TensorReader reader(chosen.path, chosen.manifest);
    const at::NoGradGuard no_grad;
    if (state.outer) options.optimizer ? state.outer->restart() : state.outer->forget_anchors();
    const std::string damage = ckpt::fill(reader, chosen.manifest, target, wanted);
    state.bytes_read = reader.bytes_read();
    const std::string first = shared.agree("load read", damage);
    if (!first.empty()) return first;
    if (options.optimizer) {
      residuals.take(parts);
      if (rank == 0)
        engine::say_lost(chosen.path, chosen.manifest, residuals.used(), state.outer.has_value());
      shared.restore(chosen.manifest);
    }
    state.unloaded.clear();
    return "";
  }
};

std::string FoundCheckpoint::client_state() const {
  return Json::parse(front).value("client_state", Json()).dump();
}

const CheckpointTensor* FoundCheckpoint::find(const std::string& role,
                                              const std::string& name) const {
  for (const CheckpointTensor& one : tensors) {
    if (one.role == role && one.name == name) return &one;
  }
  return nullptr;
}

// [all ranks] Throws ConfigError on every rank if one rank cannot save now, or if ranks were given
// different arguments.
void Core::State::Checkpointing::check_asked(const std::string& path, const std::string& tag,
                                             const SaveOptions& options) const {
  std::string problem = options.problem.empty() ? refusal(options.in_window) : options.problem;
  if (problem.empty() && !ckpt::is_tag(tag)) {
    problem = concat("[engine::save] the tag \"", tag,
                     "\" cannot name a folder: it must not be empty, begin with a dot, contain a "
                     "slash or be \"latest\"");
  }
  const std::vector<std::string> asked =
      share("save", concat(path, "\n", tag, "\n", options.wait, options.frozen, options.in_window));
  for (size_t other = 0; other < asked.size(); ++other) {
    if (!problem.empty() || asked[other] == asked.front()) continue;
    problem = concat("[engine::save] rank 0 and rank ", other,
                     " called save() with different arguments. Pass the same arguments on every "
                     "rank");
  }
  problem = agree("save when", problem);
  if (!problem.empty()) throw ConfigError(problem);
}

std::string Core::State::Checkpointing::save(const std::string& path, const SaveOptions& options) {
  state.check_open("save");
  take_turn(state.group->board(), "save", "called save()");
  const int rank = state.group->rank();
  const std::string before = state.saver.finish();  // only one save runs at a time
  if (!before.empty()) state.save_failure = before;
  state.border->look_at_params();
  const std::string tag = options.tag.empty() ? concat("step-", state.steps) : options.tag;
  check_asked(path, tag, options);
  state.executor->updates().finish();
  ckpt::Contents contents;
  ckpt::MergeStep merge;
  std::unique_ptr<ckpt::Save> save;
  std::string folder, problem;
  std::vector<ckpt::Extra> extras = engine::extras_of(options.tensors, *state.executor, rank);
  engine::add_saved(flat_state(), state.executor->mesh(), rank, names, &extras);
  const Json now = numbers();
  try {
    contents = {about(), now, parse(options.front, "what the front keeps"),
                parse(options.of_rank, "what the front keeps of a rank"), std::move(extras)};
    contents.room_bytes = std::min(contents.room_bytes, state.config.offload.window_bytes);
    if (state.executor->table().keeps_base()) exec::take_every_edit(*state.executor);
    save = std::make_unique<ckpt::Save>(
        *state.executor, state.tiers, rank,
        without(
            ckpt::holdings(*state.executor, rank, moments_of(state.config), !state.lent.empty()),
            options.frozen, [](const ckpt::Holding&) { return true; }),
        names, std::move(contents));
    state.bytes_written = save->bytes();
    if (rank == 0) {
      merge.draft = std::make_unique<ckpt::Draft>(path, tag);
      folder = merge.draft->path();
    }
  } catch (const std::exception& error) {
    problem = error.what();
  }
  problem = agree("save begins", problem);
  if (!problem.empty()) throw RuntimeFault(problem);
  folder = share("save folder", folder).front();
  try {
    if (!ckpt::exists(folder)) {
      throw RuntimeFault(concat("[engine::save] this rank does not see \"", folder,
                                "\", which rank 0 made. Every rank needs the same folder"));
    }
    save->open(folder);
    save->capture(!options.wait);
  } catch (const std::exception& error) {
    problem = error.what();
  }
  problem = agree("save captured", problem);
  if (!problem.empty()) throw RuntimeFault(problem);
  merge.world = state.group->size();
  merge.behind = !options.wait;
  merge.starting = options.starting;
  merge.keep = state.config.checkpoint.keep;
  merge.timeout =
      std::chrono::milliseconds(static_cast<int64_t>(state.config.comm.timeout_s * 1000));
  state.saver.start(std::move(save), std::move(merge));
  return path + "/" + tag;
}

std::string Checkpoints::save(const std::string& path, const SaveOptions& options) {
  state_->check_open("save");
  const auto save = [&] {
    const std::string made = Core::State::Checkpointing{*state_}.save(path, options);
    if (options.wait) wait();
    return made;
  };
  if (!state_->outer) return save();
  // The state is that of the first node.
  const auto check = [&] {
    Core::State::Checkpointing{*state_}.check_asked(
        path, options.tag.empty() ? "step" : options.tag, options);
  };
  return state_->outer->on_first_node("save", concat(path, " ", options.tag), check, save);
}

void Checkpoints::ask(int urgency) { state_->save_wanted = std::max(state_->save_wanted, urgency); }

int Checkpoints::asked() { return std::exchange(state_->save_agreed, 0); }

void Checkpoints::wait() {
  state_->check_open("save");
  const std::string problem =
      engine::first_problem(*state_->executor, "save ends", state_->saver.finish());
  if (!problem.empty()) throw RuntimeFault(problem);
}

std::string Checkpoints::failure() {
  const std::string now = state_->saver.poll();
  const std::string before = std::exchange(state_->save_failure, "");
  return before.empty() ? now : before;
}

FoundCheckpoint Checkpoints::load(const std::string& path, const LoadOptions& options) {
  if (state_->closed) {
    throw RuntimeFault(concat("[engine::load] the engine is closed", state_->closed_by));
  }
  take_turn(state_->group->board(), "load", "called load()");
  // The last save may still be writing the checkpoint to load.
  const std::string before = state_->saver.finish();
  if (!before.empty()) state_->save_failure = before;
  const Core::State::Checkpointing shared{*state_};
  const auto load = [&] { return Core::State::Checkpointing::Load{shared, path, options}.run(); };
  if (!state_->outer) return load();
  return state_->outer->alike({load, [&] { return state_->steps; }}, &state_->unloaded);
}

void Checkpoints::taken(const std::string& problem) {
  const std::string first = engine::first_problem(*state_->executor, "load taken", problem);
  if (first.empty()) return;
  state_->unloaded = concat("[engine::load] a part of the checkpoint could not be applied (", first,
                            ") after the weights were loaded. Load again, or close() the engine");
  throw RuntimeFault(state_->unloaded);
}

bool Checkpoints::any(const std::string& path) { return !candidates(path, "").empty(); }

int64_t Checkpoints::bytes_held() const {
  state_->check_open("save");
  int64_t bytes = 0;
  for (const ckpt::Holding& holding :
       ckpt::holdings(*state_->executor, state_->group->rank(), moments_of(state_->config))) {
    bytes += holding.buffer->bytes();
  }
  return bytes;
}
int64_t Checkpoints::bytes_read() const { return state_->bytes_read; }
int64_t Checkpoints::bytes_written() const { return state_->bytes_written; }

}  // namespace penstock
