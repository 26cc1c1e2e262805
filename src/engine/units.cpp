#include "src/engine/units.h"

#include <algorithm>
#include <map>
#include <set>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock::engine {

namespace {

class Finder {
 public:
  Finder(const ModelTree& tree, const UnitsConfig& config) : tree_(tree), config_(config) {
    size_t num_modules = tree.modules.size();
    while (num_modules > 1 && is_tile(tree, num_modules - 1)) --num_modules;
    children_.resize(num_modules);
    bytes_.assign(num_modules, 0);
    for (size_t m = 1; m < num_modules; ++m) children_[tree.modules[m].parent].push_back(m);
    for (size_t m = num_modules; m-- > 0;) {
      for (const int p : tree.modules[m].params) bytes_[m] += tree.params[p].param.nbytes();
      if (m > 0) bytes_[tree.modules[m].parent] += bytes_[m];
    }
  }

  std::vector<int> units() {
    if (!config_.modules.empty()) {
      named(0);
      check_names();
    } else {
      repeated(0);
      if (units_.empty()) by_size(0);
    }
    return units_;
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
        units_.push_back(child);
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
      if (is_block(child) && count[tree_.modules[child].type] >= 2) {
        units_.push_back(child);
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

  void by_size(int module) {
    if (module == 0 && bytes_[0] <= config_.max_bytes) return;
    for (const int child : children_[module]) {
      if (bytes_[child] == 0) continue;
      if (bytes_[child] <= config_.max_bytes || children_[child].empty()) {
        units_.push_back(child);
      } else {
        by_size(child);
      }
    }
  }

  const ModelTree& tree_;
  const UnitsConfig& config_;
  std::vector<std::vector<int>> children_;
  std::vector<int64_t> bytes_;
  std::vector<int> units_;
  std::set<std::string> found_;
};

}  // namespace

std::vector<UnitSpec> find_units(const ModelTree& tree, const UnitsConfig& config) {
  if (tree.params.empty()) {
    throw ConfigError(
        "[engine::find_units] the model has no parameters: there is nothing to train");
  }
  std::vector<int> modules = Finder(tree, config).units();
  const auto place = [&tree](int m) { return Finder::is_tile(tree, m) ? tree.modules[m].parent : m; };
  for (size_t m = 1; m < tree.modules.size(); ++m) {
    if (Finder::is_tile(tree, m)) modules.push_back(static_cast<int>(m));
  }
  std::stable_sort(modules.begin(), modules.end(),
                   [&](int a, int b) { return place(a) < place(b); });
  std::vector<UnitSpec> specs{{"", tree.modules[0].type, {}}};
  std::vector<int> unit_of_module(tree.modules.size(), 0);
  for (const int module : modules) {
    unit_of_module[module] = static_cast<int>(specs.size());
    specs.push_back({tree.modules[module].name, tree.modules[module].type, {}});
  }
  // Parents come first, so one pass hands each unit down to what it contains.
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
    if (wholes.contains(static_cast<int>(p))) continue;  // its tiles stand for it
    specs[std::max(0, unit_of_param[p])].params.push_back(static_cast<int>(p));
  }
  // A unit that gave all its parameters to the root moves nothing.
  specs.erase(std::remove_if(specs.begin() + 1, specs.end(),
                             [](const UnitSpec& spec) { return spec.params.empty(); }),
              specs.end());
  return specs;
}

}  // namespace penstock::engine
