#include "src/parallel/tensor_rules.h"

#include <fnmatch.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <numeric>
#include <optional>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock::parallel {

namespace {

struct StyleRow {
  const char* name;
  Style style;
  bool takes_sizes;
};
constexpr StyleRow kStyles[] = {
    {"column", Style::kColumn, true},
    {"column_gather", Style::kColumnGather, true},
    {"row", Style::kRow, true},
    {"row_cut", Style::kRowCut, true},
    {"row_tokens", Style::kRowTokens, true},
    {"vocab", Style::kVocab, false},
    {"shared", Style::kShared, true},
    {"partial", Style::kPartial, false},
    {"whole", Style::kWhole, false},
    {"own_rows", Style::kOwnRows, true},
    {"own_columns", Style::kOwnColumns, true},
    {"expert", Style::kExpert, false},
};
// Styles that the front implements; the engine cuts nothing for them.
constexpr const char* kOfFront[] = {"divide", "tokens", "gather_tokens"};

bool is_of_front(const std::string& name) {
  return std::find(std::begin(kOfFront), std::end(kOfFront), name) != std::end(kOfFront);
}

bool is_row(Style style) {
  return style == Style::kRow || style == Style::kRowCut || style == Style::kRowTokens;
}

// Returns whether the style is for a parameter, and the parameter's module itself computes with
// this rank's part.
bool is_own(Style style) { return style == Style::kOwnRows || style == Style::kOwnColumns; }

struct Rule {
  std::string pattern, text;
  const StyleRow* row = nullptr;
  std::vector<int64_t> sizes;  // numbers after the colon
  bool used = false;

  [[noreturn]] void fail(const std::string& what) const {
    throw ConfigError(
        concat("[parallel::apply] \"parallel.rules.", pattern, "\" is \"", text, "\": ", what));
  }
};

Rule parse(const std::string& pattern, const std::string& text) {
  Rule rule{pattern, text, nullptr, {}, false};
  const size_t colon = text.find(':');
  const std::string name = text.substr(0, colon);
  std::vector<std::string> names(std::begin(kOfFront), std::end(kOfFront));
  for (const StyleRow& row : kStyles) {
    names.emplace_back(row.name);
    if (name == row.name) rule.row = &row;
  }
  if (rule.row == nullptr) {
    const std::string near = nearest(name, names);
    rule.fail(concat("no such style; allowed: ", join(names, ", "),
                     near.empty() ? "" : concat("; did you mean \"", near, "\"?")));
  }
  if (colon == std::string::npos) return rule;
  const char* at = text.data() + colon + 1;
  const char* const end = text.data() + text.size();
  while (rule.row->takes_sizes) {
    int64_t size = 0;
    const auto [next, error] = std::from_chars(at, end, size);
    if (error != std::errc() || size < 1) break;
    rule.sizes.push_back(size);
    if (next == end) return rule;
    if (*next != ',') break;
    at = next + 1;
  }
  rule.fail(rule.row->takes_sizes ? "expected whole numbers after the colon, separated by commas"
                                  : concat("\"", name, "\" takes no numbers"));
}

// The weight and bias of a module whose weight is a matrix.
struct Matrix {
  int weight = -1, bias = -1;  // index in the tree; -1: none
  bool embedding = false, transposed = false;
  int64_t out_dim() const { return transposed ? 1 : 0; }
};

std::string last_name(const std::string& name) { return name.substr(name.rfind('.') + 1); }

std::optional<Matrix> matrix_of(const ModelTree& tree, const ModuleInfo& module) {
  Matrix matrix;
  for (const int index : module.params) {
    const ParamInfo& param = tree.params[index];
    // A shared parameter has the name under which it was found first.
    if (param.param.dim() == 2) matrix.weight = index;
    if (param.param.dim() == 1 && last_name(param.name) == "bias") matrix.bias = index;
  }
  if (matrix.weight < 0) return std::nullopt;
  matrix.embedding = module.type.find("Embedding") != std::string::npos;
  matrix.transposed = module.type == "Conv1D";
  const auto num_found = static_cast<size_t>(matrix.bias >= 0 ? 2 : 1);
  if (module.params.size() != num_found) return std::nullopt;
  return matrix;
}

class Cutter {
 public:
  Cutter(const MeshConfig& mesh, ModelTree* tree)
      : count_(mesh.tensor), num_expert_ranks_(mesh.expert), tree_(*tree) {}

  // Cuts one module. `rule` is the first rule that matches it.
  Ruled cut(int index, const Rule& rule) {
    const ModuleInfo& module = tree_.modules[index];
    const Style style = rule.row->style;
    if (is_own(style)) {
      rule.fail(concat("\"", module.name, "\" is a module. Name its parameters instead"));
    }
    Ruled ruled{index, style, false, 0, 0};
    if (style == Style::kWhole || style == Style::kPartial) {
      const bool partial = style == Style::kPartial;
      for (const int param : module.params) {
        give(param, {partial ? TensorCut::kPartial : TensorCut::kWhole, 0, {}}, rule);
      }
      return ruled;
    }
    const std::optional<Matrix> matrix = matrix_of(tree_, module);
    if (!matrix) {
      rule.fail(concat("module \"", module.name, "\" is a ", module.type,
                       "; expected a module with one weight of two dims and at most one bias "
                       "(linear, embedding). The model has: ",
                       names_of_matrices(tree_)));
    }
    const at::Tensor& weight = tree_.params[matrix->weight].param;
    ruled.transposed = matrix->transposed;
    const bool takes_out = !is_row(style);
    const int64_t out_dim = matrix->embedding ? 1 : matrix->out_dim();
    ruled.size = weight.size(out_dim);
    if (matrix->embedding) return cut_embedding(*matrix, rule, ruled);
    if (style == Style::kShared) {
      if (rule.sizes.size() != 1 || rule.sizes.front() % count_ != 0) {
        return share_heads(*matrix, rule, ruled);
      }
      ruled.style = Style::kColumn;  // each rank has at least one head
    }
    const int64_t dim = takes_out ? out_dim : 1 - out_dim;
    const Cut cut{TensorCut::kCut, dim, parts(weight.size(dim), module.name, rule)};
    give(matrix->weight, cut, rule);
    if (matrix->bias < 0) return ruled;
    if (takes_out) {
      give(matrix->bias, {TensorCut::kCut, 0, cut.parts}, rule);
    } else {
      const bool addends = style == Style::kRowTokens;
      give(matrix->bias, {addends ? TensorCut::kPartial : TensorCut::kWhole, 0, {}}, rule);
    }
    return ruled;
  }

  // Divides a parameter with one row per expert over the expert ranks.
  void divide_experts(int index, const Rule& rule) {
    const ParamInfo& param = tree_.params[index];
    const int64_t rows = param.param.dim() == 0 ? 0 : param.param.size(0);
    if (rows == 0 || rows % num_expert_ranks_ != 0) {
      rule.fail(concat("\"", param.name, "\" has ", rows,
                       " rows, which cannot be divided evenly over ", num_expert_ranks_,
                       " expert ranks (mesh.expert)"));
    }
    give(index, {TensorCut::kCut, 0, {rows}, Axis::kExpert}, rule);
  }

  // Cuts one parameter, or states that it is whole. `rule` is the first rule that matches it.
  void cut_param(int index, const Rule& rule) {
    const ParamInfo& param = tree_.params[index];
    const Style style = rule.row->style;
    if (style == Style::kExpert) return divide_experts(index, rule);
    if (is_own(style)) {
      const int64_t dim = style == Style::kOwnColumns ? 1 : 0;
      if (param.param.dim() <= dim) {
        rule.fail(concat("\"", param.name, "\" has ", param.param.dim(), " dims, so it has no dim ",
                         dim, " to cut"));
      }
      return give(index, {TensorCut::kCut, dim, parts(param.param.size(dim), param.name, rule)},
                  rule);
    }
    if (style != Style::kPartial && style != Style::kWhole) {
      rule.fail(concat("\"", param.name,
                       "\" is a parameter; allowed: \"partial\", \"whole\", \"own_rows\", "
                       "\"own_columns\" or \"expert\". For other styles name its module"));
    }
    give(index, {style == Style::kPartial ? TensorCut::kPartial : TensorCut::kWhole, 0, {}}, rule);
  }

  // A module that shares a cut parameter needs a rule. Otherwise the module would use this rank's
  // part as if it were the whole parameter.
  void check_shared(const std::vector<Ruled>& ruled) const {
    for (size_t index = 0; index < tree_.modules.size(); ++index) {
      const bool known = std::any_of(ruled.begin(), ruled.end(), [&](const Ruled& one) {
        return one.module == static_cast<int>(index) && one.style != Style::kWhole;
      });
      if (known) continue;
      for (const int param : tree_.modules[index].params) {
        if (tree_.params[param].cut.kind != TensorCut::kCut) continue;
        const Rule& rule = *given_.at(param).rule;
        if (is_own(rule.row->style) || rule.row->style == Style::kExpert) continue;
        rule.fail(concat("it cuts parameter \"", tree_.params[param].name, "\", which module \"",
                         tree_.modules[index].name, "\" also uses. Give that module a rule, too"));
      }
    }
  }

  bool knows(int param) const { return given_.count(param) > 0; }

  void give(int index, const Cut& cut, const Rule& rule) {
    const ParamInfo& param = tree_.params[index];
    const auto [at, added] = given_.emplace(index, Given{&rule, cut});
    const auto& [known, its] = at->second;
    if (!added && its != cut) {
      rule.fail(concat("parameter \"", param.name, "\" is shared, and \"parallel.rules.",
                       known->pattern, "\" (\"", known->text, "\") cuts it differently"));
    }
    if (ranks_along(cut.axis) > 1) tree_.params[index].cut = cut;
  }

 private:
  // An embedding with one column per head (T5's position bias) is cut by columns, so each rank gets
  // the columns of its heads.
  Ruled cut_embedding(const Matrix& matrix, const Rule& rule, Ruled ruled) {
    const ModuleInfo& module = tree_.modules[ruled.module];
    const at::Tensor& weight = tree_.params[matrix.weight].param;
    if (ruled.style == Style::kVocab) {
      ruled.size = weight.size(0);
      give(matrix.weight, {TensorCut::kCut, 0, {weight.size(0)}}, rule);
    } else if (ruled.style == Style::kColumn || ruled.style == Style::kColumnGather) {
      give(matrix.weight, {TensorCut::kCut, 1, parts(weight.size(1), module.name, rule)}, rule);
    } else {
      rule.fail(concat("\"", module.name,
                       "\" is an embedding; allowed: \"vocab\", \"column\" or "
                       "\"column_gather\""));
    }
    return ruled;
  }

  Ruled share_heads(const Matrix& matrix, const Rule& rule, Ruled ruled) {
    if (rule.sizes.size() != 1 || count_ % rule.sizes.front() != 0 ||
        ruled.size % rule.sizes.front() != 0) {
      rule.fail(concat("\"shared:heads\" needs a number of heads that divides the ", count_,
                       " tensor ranks and the ", ruled.size, " rows of \"",
                       tree_.modules[ruled.module].name, "\""));
    }
    ruled.heads = rule.sizes.front();
    for (const int param : {matrix.weight, matrix.bias}) {
      if (param >= 0) give(param, {TensorCut::kPartial, 0, {}}, rule);
    }
    return ruled;
  }

  std::vector<int64_t> parts(int64_t size, const std::string& name, const Rule& rule) const {
    std::vector<int64_t> parts = rule.sizes;
    if (parts.empty() || rule.row->style == Style::kShared) parts = {size};
    if (rule.sizes.size() == 1 && rule.row->style != Style::kShared) {
      const int64_t number = rule.sizes.front();
      if (size % number != 0) {
        rule.fail(concat("\"", name, "\" has size ", size, ", which cannot be divided into ",
                         number, " equal parts"));
      }
      parts.assign(static_cast<size_t>(number), size / number);
    }
    if (std::accumulate(parts.begin(), parts.end(), int64_t{0}) != size) {
      rule.fail(concat("\"", name, "\" has size ", size, ", which is not the sum of its parts"));
    }
    for (const int64_t part : parts) {
      if (part % count_ == 0 || rule.row->style == Style::kVocab) continue;
      rule.fail(concat("\"", name, "\" has ", parts.size() > 1 ? "a part of size " : "size ", part,
                       ", which is not divisible by ", count_, " tensor ranks (mesh.tensor)"));
    }
    return parts;
  }

  int ranks_along(Axis axis) const { return axis == Axis::kExpert ? num_expert_ranks_ : count_; }

  struct Given {
    const Rule* rule;
    Cut cut;
  };
  const int count_;  // of tensor ranks
  const int num_expert_ranks_;
  ModelTree& tree_;
  std::map<int, Given> given_;  // by parameter
};

bool matches(const Rule& rule, const std::string& name) {
  return fnmatch(rule.pattern.c_str(), name.c_str(), 0) == 0;
}

bool fits_params(Style style) {
  return style == Style::kWhole || style == Style::kPartial || style == Style::kExpert ||
         is_own(style);
}

// Returns the first rule for parameters that matches, or the end of the rules.
const Rule* first_match(const std::vector<Rule>& rules, const std::string& param) {
  const auto found = std::find_if(rules.begin(), rules.end(), [&](const Rule& rule) {
    return fits_params(rule.row->style) && matches(rule, param);
  });
  return rules.data() + (found - rules.begin());
}

}  // namespace

const char* style_name(Style style) {
  return std::find_if(std::begin(kStyles), std::end(kStyles),
                      [&](const StyleRow& row) { return row.style == style; })
      ->name;
}

std::string names_of_matrices(const ModelTree& tree) {
  std::vector<std::string> names;
  for (const ModuleInfo& module : tree.modules) {
    if (matrix_of(tree, module)) names.push_back(module.name);
  }
  constexpr size_t kMany = 20;
  const bool more = names.size() > kMany;
  if (more) names.resize(kMany);
  return concat(names.empty() ? "none" : join(names, ", "), more ? ", ..." : "");
}

std::vector<Ruled> apply(const std::vector<std::pair<std::string, std::string>>& rules,
                         const MeshConfig& mesh, ModelTree* tree) {
  std::vector<Rule> parsed;
  for (const auto& [pattern, text] : rules) {
    if (!is_of_front(text.substr(0, text.find(':')))) parsed.push_back(parse(pattern, text));
  }
  Cutter cutter(mesh, tree);
  std::vector<Ruled> ruled;
  for (size_t index = 0; index < tree->modules.size(); ++index) {
    for (Rule& rule : parsed) {
      if (!matches(rule, tree->modules[index].name)) continue;
      if (rule.row->style == Style::kExpert) {
        for (const int param : tree->modules[index].params) {
          // An earlier rule may name the parameter.
          if (first_match(parsed, tree->params[static_cast<size_t>(param)].name) < &rule) continue;
          cutter.divide_experts(param, rule);
          rule.used = true;
        }
        break;
      }
      rule.used = true;
      ruled.push_back(cutter.cut(static_cast<int>(index), rule));
      break;
    }
  }
  for (size_t index = 0; index < tree->params.size(); ++index) {
    for (Rule& rule : parsed) {
      if (!matches(rule, tree->params[index].name)) continue;
      rule.used = true;
      if (cutter.knows(static_cast<int>(index))) break;  // its module's rule takes precedence
      cutter.cut_param(static_cast<int>(index), rule);
      break;
    }
  }
  cutter.check_shared(ruled);
  for (const Rule& rule : parsed) {
    if (!rule.used) rule.fail("no module or parameter matches this pattern");
  }
  return ruled;
}

}  // namespace penstock::parallel
