#include "src/engine/mesh/stage_split.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <set>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock::engine {

namespace {

[[noreturn]] void refuse(const std::string& why) {
  throw ConfigError("[engine::find_stages] " + why);
}

// Finds the pieces of a model and the parameters that every stage has.
class StageFinder {
 public:
  StageFinder(const ModelTree& tree, const std::vector<UnitSpec>& specs, int64_t layer_bytes)
      : tree_(tree), layer_bytes_(layer_bytes) {
    for (size_t unit = 1; unit < specs.size(); ++unit) units_.insert(specs[unit].module);
    children_.resize(tree.modules.size());
    for (size_t m = 1; m < tree.modules.size(); ++m) {
      children_[static_cast<size_t>(tree.modules[m].parent)].push_back(m);
    }
    walk(0);
  }

  const std::vector<size_t>& pieces() const { return pieces_; }
  // Returns the parameters that belong directly to modules that enclose pieces.
  const std::set<int>& enclosing() const { return enclosing_; }

  // Returns the number of weights by which one token is multiplied.
  int64_t work(size_t module) const {
    int64_t sum = 0;
    const ModuleInfo& info = tree_.modules[module];
    for (const int p : info.params) {
      sum += info.type == "Embedding" ? 0 : tree_.params[p].param.numel();
    }
    for (const size_t child : children_[module]) sum += work(child);
    return sum;
  }

  void collect(size_t module, std::set<int>* params) const {
    for (const int p : tree_.modules[module].params) params->insert(p);
    for (const size_t child : children_[module]) collect(child, params);
  }

 private:
  void walk(size_t module) {
    const ModuleInfo& info = tree_.modules[module];
    int64_t bytes = 0;
    for (const int p : info.params) bytes += static_cast<int64_t>(tree_.params[p].param.nbytes());
    const bool layer =
        children_[module].empty() && (info.keeps || (bytes > 0 && bytes >= layer_bytes_));
    if (module > 0 && (layer || units_.contains(info.name))) return pieces_.push_back(module);
    enclosing_.insert(info.params.begin(), info.params.end());
    for (const size_t child : children_[module]) walk(child);
  }

  const ModelTree& tree_;
  const int64_t layer_bytes_;
  std::set<std::string> units_;
  std::vector<std::vector<size_t>> children_;
  std::vector<size_t> pieces_;
  std::set<int> enclosing_;  // parameter indices
};

// Returns the first piece of each stage except the first stage. The split minimizes the sum of the
// squared work of the stages, by dynamic programming. Returns an empty list if too few pieces may
// begin a stage.
std::vector<size_t> balance(const std::vector<int64_t>& work, const std::vector<bool>& may_begin,
                            int count) {
  const size_t size = work.size();
  std::vector<double> before(size + 1, 0.0);
  for (size_t i = 0; i < size; ++i) before[i + 1] = before[i] + static_cast<double>(work[i]);
  constexpr double kNever = std::numeric_limits<double>::infinity();
  const auto stages = static_cast<size_t>(count);
  std::vector<std::vector<double>> least(stages + 1, std::vector<double>(size + 1, kNever));
  std::vector<std::vector<size_t>> begin(stages + 1, std::vector<size_t>(size + 1, 0));
  least[0][0] = 0.0;
  for (size_t s = 1; s <= stages; ++s) {
    for (size_t end = s; end <= size; ++end) {
      for (size_t first = s - 1; first < end; ++first) {
        if (s > 1 && !may_begin[first]) continue;
        const double own = before[end] - before[first];
        const double sum = least[s - 1][first] + own * own;
        if (sum < least[s][end]) {
          least[s][end] = sum;
          begin[s][end] = first;
        }
      }
    }
  }
  std::vector<size_t> begins;
  if (least[stages][size] == kNever) return begins;
  for (size_t s = stages, end = size; s > 1; --s) {
    end = begin[s][end];
    begins.insert(begins.begin(), end);
  }
  return begins;
}

bool begins_with(const std::string& piece, const std::string& module) {
  return piece == module || piece.starts_with(module + ".");
}

std::vector<size_t> find_begins(const std::vector<std::string>& names,
                                const std::vector<std::string>& begins, int count) {
  if (static_cast<int>(begins.size()) + 1 != count) {
    refuse(concat("\"parallel.stages\" names ", begins.size(),
                  " modules that begin stages, but for ", count, " stages it must name ",
                  count - 1));
  }
  std::vector<size_t> found;
  for (const std::string& module : begins) {
    const auto piece = std::find_if(names.begin(), names.end(), [&](const std::string& name) {
      return begins_with(name, module);
    });
    if (piece == names.end()) {
      refuse(concat("\"parallel.stages\": no stage can begin with \"", module,
                    "\"; did you mean \"", nearest(module, names), "\"?"));
    }
    const auto place = static_cast<size_t>(piece - names.begin());
    if (place <= (found.empty() ? 0 : found.back())) {
      refuse(concat(
          "\"parallel.stages\": \"", module,
          "\" does not come after the module listed before it. List modules in model order, ",
          "without the model's first module, \"", names.front(), "\""));
    }
    found.push_back(place);
  }
  return found;
}

}  // namespace

UnitsConfig Stages::units(const UnitsConfig& config) {
  UnitsConfig every = config;
  every.max_bytes = 1;
  return every;
}

Stages find_stages(const ModelTree& tree, const std::vector<UnitSpec>& specs,
                   const Config& config) {
  const std::vector<std::string>& begins = config.parallel.stages;
  const int count = config.mesh.pipeline * config.parallel.virtual_stages;
  const StageFinder walker(tree, specs, config.units.layer_bytes);
  std::vector<std::string> names;
  std::vector<int64_t> work;
  std::vector<bool> may_begin;
  for (const size_t module : walker.pieces()) {
    names.push_back(tree.modules[module].name);
    // An Embedding takes no input from a previous stage, so it cannot begin a stage.
    may_begin.push_back(tree.modules[module].type != "Embedding");
    work.push_back(walker.work(module));
  }
  const std::vector<size_t> firsts =
      begins.empty() ? balance(work, may_begin, count) : find_begins(names, begins, count);
  if (static_cast<int>(firsts.size()) + 1 < count) {
    refuse(concat("the pipeline has ", count,
                  " stages, but the model has too few modules that can begin one. Its ",
                  names.size(),
                  " blocks and layers of at least \"units.layer_bytes\" are: ", join(names, ", ")));
  }
  Stages stages;
  stages.count = count;
  std::vector<std::set<int>> of_param(tree.params.size());
  for (size_t i = 0; i < names.size(); ++i) {
    const auto stage =
        static_cast<int>(std::upper_bound(firsts.begin(), firsts.end(), i) - firsts.begin());
    stages.pieces.push_back({names[i], stage});
    std::set<int> params;
    walker.collect(walker.pieces()[i], &params);
    for (const int p : params) of_param[static_cast<size_t>(p)].insert(stage);
  }
  std::vector<int> every(static_cast<size_t>(count));
  std::iota(every.begin(), every.end(), 0);
  for (size_t p = 0; p < of_param.size(); ++p) {
    const bool all = walker.enclosing().contains(static_cast<int>(p));
    stages.of_param.emplace_back(of_param[p].begin(), of_param[p].end());
    if (all) stages.of_param.back() = every;
  }
  return stages;
}

}  // namespace penstock::engine
