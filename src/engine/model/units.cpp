#include "src/engine/model/units.h"

#include <algorithm>
#include <map>
#include <set>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock::engine {

namespace {

// Finds blocks and large layers in a module tree (see find_units()).
class Finder {
 public:
  Finder(const ModelTree& tree, const UnitsConfig& config) : tree_(tree), config_(config) {
    size_t num_modules = tree.modules.size();
    while (num_modules > 1 && is_tile(tree, num_modules - 1)) --num_modules;
    children_.resize(num_modules);
    bytes_.assign(num_modules, 0);
    num_users_.assign(tree.params.size(), 0);
    for (size_t m = 1; m < num_modules; ++m) children_[tree.modules[m].parent].push_back(m);
    for (size_t m = num_modules; m-- > 0;) {
      for (const int p : tree.modules[m].params) {
        bytes_[m] += tree.params[p].param.nbytes();
        ++num_users_[p];
      }
      if (m > 0) bytes_[tree.modules[m].parent] += bytes_[m];
    }
  }

  std::vector<int> blocks() {
    if (!config_.modules.empty()) {
      named(0);
      check_names();
    } else {
      repeated(0);
      if (blocks_.empty()) by_size(0);
    }
    return blocks_;
  }

  // Returns the large layers outside of the blocks. Must follow blocks().
  std::vector<int> layers() {
    if (!blocks_.empty()) large(0);
    return layers_;
  }

  static bool is_tile(const ModelTree& tree, size_t module) {
    const std::vector<int>& params = tree.modules[module].params;
    return params.size() == 1 && tree.params[params.front()].whole >= 0;
  }

 private:
  void named(int module) {
    for (const int child : children_[module]) {
      const std::string& type = tree_.modules[child].type;
      const auto& wanted = config_.modules;
      if (std::find(wanted.begin(), wanted.end(), type) != wanted.end()) {
        found_.insert(type);
        blocks_.push_back(child);
      } else {
        named(child);
      }
    }
  }

  void check_names() const {
    std::vector<std::string> types;
    for (const ModuleInfo& module : tree_.modules) types.push_back(module.type);
    for (const std::string& name : config_.modules) {
      if (found_.contains(name)) continue;
      if (name == tree_.modules.front().type) {
        throw ConfigError(
            concat("[engine::find_units] units.modules: \"", name,
                   "\" is the class of the model itself, and no module in it has this "
                   "class. Name the classes of its blocks"));
      }
      throw ConfigError(
          concat("[engine::find_units] units.modules: the model has no module of "
                 "class \"",
                 name, "\"; did you mean \"", nearest(name, types), "\"?"));
    }
  }

  void repeated(int module) {
    std::map<std::string, int> count;
    for (const int child : children_[module]) {
      if (is_block(child)) ++count[tree_.modules[child].type];
    }
    for (const int child : children_[module]) {
      const bool repeats = is_block(child) && count[tree_.modules[child].type] >= 2;
      if (repeats && (is_list(module) || !has_blocks(child))) {
        blocks_.push_back(child);
      } else {
        repeated(child);
      }
    }
  }

  bool is_block(int module) const {
    const std::string& type = tree_.modules[module].type;
    return bytes_[module] > 0 && !children_[module].empty() && type != "ModuleList" &&
           type != "ModuleDict";
  }

  bool is_list(int module) const {
    const std::string& type = tree_.modules[module].type;
    return type == "ModuleList" || type == "ModuleDict" || type == "Sequential";
  }

  // Returns whether a list inside the module repeats modules that have grandchildren. Such a module
  // is a stack of blocks and not a block (for example an encoder and a decoder of one class). A
  // block with a list of plain experts stays a block.
  bool has_blocks(int module) const {
    std::map<std::string, int> count;
    for (const int child : children_[module]) {
      if (has_blocks(child)) return true;
      const auto has_children = [&](int part) { return !children_[part].empty(); };
      const auto& parts = children_[child];
      const bool deep = std::any_of(parts.begin(), parts.end(), has_children);
      if (is_list(module) && is_block(child) && deep) ++count[tree_.modules[child].type];
    }
    return std::any_of(count.begin(), count.end(), [](const auto& one) { return one.second >= 2; });
  }

  void by_size(int module) {
    if (module == 0 && bytes_[0] <= config_.max_bytes) return;
    for (const int child : children_[module]) {
      if (bytes_[child] == 0) continue;
      if (bytes_[child] <= config_.max_bytes || children_[child].empty()) {
        blocks_.push_back(child);
      } else {
        by_size(child);
      }
    }
  }

  void large(int module) {
    for (const int child : children_[module]) {
      if (std::find(blocks_.begin(), blocks_.end(), child) != blocks_.end()) continue;
      large(child);
      if (!children_[child].empty()) continue;
      if (own_bytes(child) >= config_.layer_bytes) layers_.push_back(child);
    }
  }

  // Returns the bytes of the parameters that only this module uses; the root keeps shared
  // parameters. Returns 0 for a layer in tiles, because its tiles are units already.
  int64_t own_bytes(int module) const {
    const ModuleInfo& info = tree_.modules[module];
    int64_t bytes = 0;
    for (const int p : info.params) {
      if (num_users_[p] == 1) bytes += static_cast<int64_t>(tree_.params[p].param.nbytes());
    }
    const bool tiled = std::any_of(tree_.params.begin(), tree_.params.end(), [&](const auto& one) {
      return one.whole >= 0 && one.whole == info.rows;
    });
    return tiled ? 0 : bytes;
  }

  const ModelTree& tree_;
  const UnitsConfig& config_;
  std::vector<std::vector<int>> children_;
  std::vector<int64_t> bytes_;
  std::vector<int> num_users_;  // by parameter: number of modules that own it
  std::vector<int> blocks_, layers_;
  std::set<std::string> found_;
};

// Writes the assumed order of visits. It visits the modules in order. A unit is open while its
// descendants are visited.
class OrderWriter {
 public:
  OrderWriter(const ModelTree& tree, const std::vector<UnitSpec>& specs)
      : tree_(tree), specs_(specs) {
    for (size_t unit = 0; unit < specs.size(); ++unit) {
      unit_named_[specs[unit].module] = static_cast<int>(unit);
    }
    for (const ParamInfo& info : tree.params) {
      if (info.whole >= 0) tiles_[info.whole].push_back(unit_named_.at(info.name));
    }
  }

  void write(ModelDesc& model) {
    forward_.push_back({0, Mark::kBegin});
    backward_.push_back({0, Mark::kEnd});
    for (size_t m = 1; m < tree_.modules.size(); ++m) {
      if (Finder::is_tile(tree_, m)) break;
      const ModuleInfo& module = tree_.modules[m];
      if (open_ > 0 && !inside(static_cast<int>(m), open_module_)) close();
      const auto unit = unit_named_.find(module.name);
      if (unit != unit_named_.end()) open(unit->second, static_cast<int>(m));
      const auto tiles = tiles_.find(module.rows);
      if (tiles == tiles_.end()) continue;
      for (const int tile : tiles->second) {
        forward_.push_back({tile, Mark::kWhole});
        backward_.push_back({tile, backward_of(module)});
      }
    }
    if (open_ > 0) close();
    forward_.push_back({0, Mark::kEnd});
    backward_.push_back({0, Mark::kBegin});
    std::reverse(backward_.begin(), backward_.end());
    model.forward = std::move(forward_);
    model.backward = std::move(backward_);
  }

 private:
  // The backward of an embedding does not read its weight.
  static Mark backward_of(const ModuleInfo& module) {
    return module.rows >= 0 && module.type == "Embedding" ? Mark::kGradient : Mark::kWhole;
  }

  bool inside(int module, int outer) const {
    while (module > outer) module = tree_.modules[module].parent;
    return module == outer;
  }

  void open(int unit, int module) {
    open_ = unit;
    open_module_ = module;
    forward_.push_back({unit, Mark::kBegin});
    backward_.push_back({unit, Mark::kEnd});
  }

  void close() {
    if (forward_.back().unit == open_) {
      const bool block = specs_[open_].block;
      forward_.back().mark = Mark::kWhole;
      backward_.back().mark = block ? Mark::kWhole : backward_of(tree_.modules[open_module_]);
    } else {
      forward_.push_back({open_, Mark::kEnd});
      backward_.push_back({open_, Mark::kBegin});
    }
    open_ = 0;
  }

  const ModelTree& tree_;
  const std::vector<UnitSpec>& specs_;
  std::map<std::string, int> unit_named_;
  std::map<int, std::vector<int>> tiles_;  // by parameter: units of its tiles
  std::vector<Visit> forward_, backward_;
  int open_ = 0, open_module_ = 0;
};

}  // namespace

void assume_order(ModelDesc& model, const ModelTree& tree, const std::vector<UnitSpec>& specs) {
  OrderWriter(tree, specs).write(model);
}

std::vector<UnitSpec> find_units(const ModelTree& tree, const UnitsConfig& config) {
  if (tree.params.empty()) {
    throw ConfigError(
        "[engine::find_units] the model has no parameters: there is nothing to train");
  }
  Finder finder(tree, config);
  std::vector<int> modules = finder.blocks();
  const std::set<int> blocks(modules.begin(), modules.end());
  const std::vector<int> layers = finder.layers();
  modules.insert(modules.end(), layers.begin(), layers.end());
  const auto place = [&tree](int m) {
    return Finder::is_tile(tree, m) ? tree.modules[m].parent : m;
  };
  for (size_t m = 1; m < tree.modules.size(); ++m) {
    if (Finder::is_tile(tree, m)) modules.push_back(static_cast<int>(m));
  }
  std::stable_sort(modules.begin(), modules.end(),
                   [&](int a, int b) { return place(a) < place(b); });
  std::vector<UnitSpec> specs{{"", tree.modules[0].type, {}, false}};
  std::vector<int> unit_of_module(tree.modules.size(), 0);
  for (const int module : modules) {
    unit_of_module[module] = static_cast<int>(specs.size());
    const ModuleInfo& info = tree.modules[module];
    specs.push_back({info.name, info.type, {}, blocks.contains(module)});
  }
  // Parents come first, so one pass gives each module the unit that encloses it.
  for (size_t m = 1; m < tree.modules.size(); ++m) {
    if (unit_of_module[m] == 0) unit_of_module[m] = unit_of_module[tree.modules[m].parent];
  }
  constexpr int kUnseen = -1;
  std::vector<int> unit_of_param(tree.params.size(), kUnseen);
  std::set<int> wholes;
  for (const ParamInfo& info : tree.params) wholes.insert(info.whole);
  for (size_t m = 0; m < tree.modules.size(); ++m) {
    for (const int p : tree.modules[m].params) {
      const int unit = unit_of_module[m];
      unit_of_param[p] = unit_of_param[p] == kUnseen || unit_of_param[p] == unit ? unit : 0;
    }
  }
  for (size_t p = 0; p < tree.params.size(); ++p) {
    if (wholes.contains(static_cast<int>(p))) continue;  // its tiles have units
    specs[std::max(0, unit_of_param[p])].params.push_back(static_cast<int>(p));
  }
  // A unit without parameters is removed. All of its modules' parameters are shared and belong to
  // the root.
  specs.erase(std::remove_if(specs.begin() + 1, specs.end(),
                             [](const UnitSpec& spec) { return spec.params.empty(); }),
              specs.end());
  return specs;
}

}  // namespace penstock::engine
