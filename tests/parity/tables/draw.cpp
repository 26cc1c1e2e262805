#include "tests/parity/tables/draw.h"

#include <algorithm>
#include <map>
#include <utility>

#include "src/base/text.h"

namespace penstock::tables {

namespace {

// SplitMix64, which gives the same numbers with every standard library.
class Dice {
 public:
  explicit Dice(uint64_t seed) : state_(seed) {}

  uint64_t next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15ULL);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
  }
  size_t below(size_t count) { return static_cast<size_t>(next() % count); }
  bool chance(int percent) { return below(100) < static_cast<size_t>(percent); }
  template <class T>
  T one_of(const std::vector<T>& choices) {
    return choices[below(choices.size())];
  }

 private:
  uint64_t state_;
};

using CellName = std::pair<Role, Phase>;
using Layouts = decltype(Placement::layout);

const std::vector<CellName>& cell_names() {
  static const std::vector<CellName> kCells = {
      {Role::kParam, Phase::kRest},  {Role::kParam, Phase::kForward},
      {Role::kParam, Phase::kHold},  {Role::kParam, Phase::kBackward},
      {Role::kGrad, Phase::kHold},   {Role::kGrad, Phase::kBackward},
      {Role::kGrad, Phase::kUpdate}, {Role::kOptim, Phase::kRest},
      {Role::kOptim, Phase::kUpdate}};
  return kCells;
}

const std::vector<Layout> kLayouts = {Layout::kReplicated, Layout::kSharded, Layout::kPartial};
const std::vector<Tier> kTiers = {Tier::kDevice, Tier::kHost, Tier::kDisk};

// Changes cells of a preset. cells() leaves out cells that are equal to the preset's in the end.
class Changes {
 public:
  Changes(const Draw& draw, Dice& dice) : preset_(draw.table()), table_(preset_), dice_(dice) {}

  std::vector<Cell> cells() const {
    std::vector<Cell> changed;
    for (const auto& [role, phase] : cell_names()) {
      if (!(table_.at(role, phase) == preset_.at(role, phase)))
        changed.push_back({role, phase, table_.at(role, phase)});
    }
    return changed;
  }

  // Changes one or two components of a random cell, or all of them.
  void blindly() {
    const CellName cell = dice_.one_of(cell_names());
    if (dice_.chance(30)) {
      Placement place;
      for (const Axis axis : kDataAxes) place.on(axis) = layout();
      place.tier = dice_.one_of(kTiers);
      place.dtype = dtype();
      set(cell, place);
    } else {
      mutate(cell);
    }
  }

  void as_a_person_would() {
    switch (dice_.below(8)) {
      case 0:
      case 1:
        return optimizer();
      case 2:
        return optimizer_with_parameters();
      case 3:
        return held_parameters();
      case 4:
        return held_gradients();
      case 5:
        return resting_parameters();
      case 6:
        return optimizer_tier();
      default:
        return mutate(dice_.one_of(cell_names()));
    }
  }

 private:
  const Placement& at(const CellName& cell) const { return table_.at(cell.first, cell.second); }
  void set(const CellName& cell, const Placement& place) {
    table_.set(cell.first, cell.second, place);
  }
  Layout layout() { return dice_.one_of(kLayouts); }
  Dtype dtype() {
    return dice_.chance(5) ? Dtype::kFp16 : dice_.chance(50) ? Dtype::kBf16 : Dtype::kFp32;
  }
  // Draws one of the layouts in `choices`, such as "RS".
  Layouts layouts(const std::vector<const char*>& choices) {
    return Placement::parse(concat(dice_.one_of(choices), "@device:fp32")).layout;
  }

  void mutate(const CellName& cell) {
    Placement place = at(cell);
    for (int times = dice_.chance(30) ? 2 : 1; times > 0; --times) {
      const size_t component = dice_.below(4);
      if (component < kDataAxes.size()) {
        place.on(kDataAxes[component]) = layout();
      } else if (component == 2) {
        place.tier = dice_.one_of(kTiers);
      } else {
        place.dtype = dtype();
      }
    }
    set(cell, place);
  }

  // The cells that a unit's update reads and writes.
  void optimizer_to(const Layouts& layout) {
    for (const CellName& cell : {kGradUpdate, kOptimRest, kOptimUpdate}) {
      Placement place = at(cell);
      place.layout = layout;
      set(cell, place);
    }
  }
  void optimizer() {
    optimizer_to(layouts({"RR", "RS", "SR", "SS"}));
    if (dice_.chance(40)) optimizer_tier();
  }
  void optimizer_with_parameters() {
    const auto layout = layouts({"RR", "RS", "SS"});
    optimizer_to(layout);
    Placement rest = at(kParamRest);
    rest.layout = layout;
    set(kParamRest, rest);
  }
  void optimizer_tier() {
    const Tier rest = dice_.one_of(kTiers);
    const Tier works = rest == Tier::kDisk ? Tier::kHost : rest;
    const std::pair<CellName, Tier> moves[] = {
        {kGradUpdate, works}, {kOptimRest, rest}, {kOptimUpdate, works}};
    for (const auto& [cell, tier] : moves) {
      Placement place = at(cell);
      place.tier = tier;
      set(cell, place);
    }
  }
  void held_parameters() {
    Placement hold = at(kParamHold);
    hold.layout = layouts({"RR", "RS", "SR", "SS"});
    if (dice_.chance(40)) hold.tier = dice_.one_of(kTiers);
    set(kParamHold, hold);
  }
  void held_gradients() {
    Placement hold = at(kGradHold);
    hold.layout = layouts({"PP", "PS", "SP", "RS", "RR", "SS", "PR", "RP"});
    if (dice_.chance(30)) hold.tier = dice_.one_of(kTiers);
    if (dice_.chance(30)) hold.dtype = Dtype::kFp32;
    set(kGradHold, hold);
  }
  void resting_parameters() {
    Placement rest = at(kParamRest);
    if (dice_.chance(50)) rest.layout = layouts({"RR", "RS", "SS"});
    if (dice_.chance(50)) rest.tier = dice_.one_of(kTiers);
    if (dice_.chance(30)) rest.dtype = Dtype::kFp32;
    set(kParamRest, rest);
    if (dice_.chance(60)) set(kParamHold, rest);
  }

  static constexpr CellName kParamRest{Role::kParam, Phase::kRest};
  static constexpr CellName kParamHold{Role::kParam, Phase::kHold};
  static constexpr CellName kGradHold{Role::kGrad, Phase::kHold};
  static constexpr CellName kGradUpdate{Role::kGrad, Phase::kUpdate};
  static constexpr CellName kOptimRest{Role::kOptim, Phase::kRest};
  static constexpr CellName kOptimUpdate{Role::kOptim, Phase::kUpdate};

  const Table preset_;
  Table table_;
  Dice& dice_;
};

std::vector<Cell> changed_cells(const Draw& draw, Dice& dice) {
  constexpr size_t kMost = 4;
  const bool blind = dice.chance(33);
  const size_t wanted = blind ? 1 + dice.below(kMost) : 1 + dice.below(2);
  std::vector<Cell> cells;
  while (cells.empty() || cells.size() > kMost) {
    Changes changes(draw, dice);
    for (size_t i = 0; i < wanted; ++i) blind ? changes.blindly() : changes.as_a_person_would();
    cells = changes.cells();
  }
  return cells;
}

// Leaves out presets that name tiers, because another preset with changed cells equals them.
std::vector<std::string> strategies() {
  std::vector<std::string> names = preset_names();
  std::erase_if(names, [](const std::string& name) {
    return preset(name, {}).at(Role::kParam, Phase::kRest).tier != Tier::kDevice;
  });
  return names;
}

// Draws only tiers that the preset and the config allow.
void draw_offload(Draw& draw, Dice& dice) {
  TableOptions& options = draw.options;
  if (!dice.chance(40)) return;
  const Table table = preset(draw.strategy, {});
  const bool rests_sharded = table.at(Role::kParam, Phase::kRest).sharded();
  if (dice.chance(70)) options.optim_tier = dice.chance(50) ? Tier::kHost : Tier::kDisk;
  if (rests_sharded && dice.chance(50))
    options.param_tier = dice.chance(50) ? Tier::kHost : Tier::kDisk;
  if (options.optim_tier == Tier::kDevice) return;
  if (table.at(Role::kGrad, Phase::kHold).sharded() && dice.chance(30))
    options.grad_tier = Tier::kDisk;
  draw.late_update = rests_sharded && dice.chance(20);
}

void draw_loop(Loop& loop, Dice& dice) {
  loop.accumulate = dice.one_of<int>({1, 1, 1, 2, 2, 3});
  for (bool* part : {&loop.look_early, &loop.evaluate, &loop.twice, &loop.incomplete, &loop.read,
                     &loop.read_inside, &loop.write})
    *part = dice.chance(20);
  loop.incomplete &= loop.accumulate > 1;
}

const char* or_none(Tier tier) { return tier == Tier::kDevice ? "none" : tier_name(tier); }

std::string offload_json(const Draw& draw) {
  const TableOptions& options = draw.options;
  return concat(R"({"optimizer": ")", or_none(options.optim_tier), R"(", "params": ")",
                or_none(options.param_tier), "\"",
                options.grad_tier ? R"(, "gradients": "disk")" : "",
                draw.late_update ? R"(, "late_update": true)" : "", "}");
}

std::string cells_json(const std::vector<Cell>& cells) {
  std::map<std::string, std::vector<std::string>> by_role;
  for (const Cell& cell : cells)
    by_role[role_name(cell.role)].push_back(
        concat("\"", phase_name(cell.phase), "\": \"", cell.place.text(), "\""));
  std::vector<std::string> roles;
  for (const auto& [role, phases] : by_role)
    roles.push_back(concat("\"", role, "\": {", join(phases, ", "), "}"));
  return concat("{", join(roles, ", "), "}");
}

}  // namespace

std::string Cell::name() const { return concat("table.", role_name(role), ".", phase_name(phase)); }

Table Draw::table() const {
  Table table = preset(strategy, options);
  for (const Cell& cell : cells) table.set(cell.role, cell.phase, cell.place);
  return table;
}

bool Draw::narrow() const {
  return options.precision != Dtype::kFp32 ||
         std::any_of(cells.begin(), cells.end(),
                     [](const Cell& cell) { return cell.place.dtype != Dtype::kFp32; });
}

std::string Draw::config() const {
  return concat(R"({"strategy": ")", strategy, R"(", "precision": ")",
                dtype_name(options.precision), R"(", "mesh": {"node": )", nodes,
                R"(}, "batch": {"accumulate": )", loop.accumulate, R"(}, "clip": 0.5, )",
                R"("optimizer": {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.1}, )",
                R"("units": {"modules": ["Block"]}, "prefetch_bytes": )", prefetch_bytes,
                R"(, "comm": {"bucket_bytes": )", bucket_bytes, R"(, "reduce_dtype": ")",
                sums_as_fp32 ? "fp32" : "gradient", R"("}, "offload": )", offload_json(*this),
                R"(, "table": )", cells_json(cells), "}");
}

std::string Draw::text() const {
  const std::pair<bool, const char*> parts[] = {{loop.look_early, "look_early"},
                                                {loop.evaluate, "evaluate"},
                                                {loop.twice, "twice"},
                                                {loop.incomplete, "incomplete"},
                                                {loop.read, "read"},
                                                {loop.read_inside, "read_inside"},
                                                {loop.write, "write"},
                                                {loop.save, "save"}};
  std::string text = concat("draw ", seed, ": ", strategy, " on ", world, " ranks");
  for (const Cell& cell : cells) text += concat(", ", cell.name(), " ", cell.place.text());
  for (const auto& [is, name] : parts)
    if (is) text += concat(", ", name);
  return concat(text, "\n", config());
}

Draw draw(uint64_t seed) {
  Dice dice(seed);
  Draw draw;
  draw.seed = seed;
  draw.world = dice.one_of<int>({1, 2, 2, 2, 4, 4, 4, 4});
  draw.strategy = dice.one_of(strategies());
  const bool by_node = draw.strategy == "hpz" || draw.strategy == "mics";
  draw.nodes = draw.world > 1 && dice.chance(by_node ? 85 : 50) ? 2 : 1;
  draw.options.precision = dice.chance(40) ? Dtype::kBf16 : Dtype::kFp32;
  draw_loop(draw.loop, dice);
  draw.loop.save = seed % 2 == 1;  // from the seed, so that the draws of older seeds stay the same
  draw.sums_as_fp32 = seed % 3 == 1;
  draw.options.accumulate = draw.loop.accumulate > 1;
  draw_offload(draw, dice);
  draw.prefetch_bytes = dice.one_of<int64_t>({0, 1000, 1 << 20});
  draw.bucket_bytes = dice.one_of<int64_t>({0, 1000, 1 << 20});
  draw.cells = changed_cells(draw, dice);
  return draw;
}

}  // namespace penstock::tables
