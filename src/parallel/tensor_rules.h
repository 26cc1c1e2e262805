#pragma once
// Rules map names of modules to cuts of parameters. They decide which modules are cut over the
// tensor ranks, and how. The functions are pure, so every rank gets the same result.
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "penstock/core.h"

namespace penstock::parallel {

// How a rule treats a module. The letters are the states of the module's input -> output
// ([Note: Tensor axis], tensor_operators.h).
enum class Style : uint8_t {
  kColumn,        // R -> V: rows of the weight are cut
  kColumnGather,  // R -> I: kColumn, and the output is gathered
  kRow,           // V -> I: columns of the weight are cut
  kRowCut,        // I -> I: kRow, on the rank's share of the input
  kRowTokens,     // V -> V: kRow, but a rank gets only its tokens; the bias's gradient is partial
  kVocab,         // any number of rows; embedding: rows are cut; linear: like kColumnGather
  kShared,        // R -> V: the weight is whole, and a rank computes the head that it needs
  kPartial,       // V -> V: the weight is whole, and its gradient is summed over the ranks
  kWhole,         // equal on every rank; the rule only states that this is intended
  kOwnRows,       // for a parameter: dim 0 is cut, and its module computes with the part directly
  kOwnColumns,    // like kOwnRows, but dim 1 is cut
  kExpert,        // dim 0 of all parameters is cut over the expert ranks
};

const char* style_name(Style style);

struct Ruled {
  int module = 0;  // index in the tree
  Style style = Style::kWhole;
  bool transposed = false;  // the weight is [in, out] (transformers' Conv1D)
  int64_t heads = 0;        // kShared: number of heads
  int64_t size = 0;  // size of the whole output; for an embedding with kVocab: number of rows
};

// Sets the cuts of the tree's parameters. A rule is (pattern of module names, style). Styles:
// "column", "column:3" (three equal parts, [Q|K|V]), "column:64,16,16" (parts of these sizes),
// "column_gather", "row", "row_cut" and "row_tokens" (parts as for "column" are allowed), "vocab",
// "shared:2" (2 heads; fewer heads than ranks), "partial", "whole". The front's own styles are
// skipped: "divide" or "divide:2" (attributes of modules), "tokens" and "gather_tokens" (for
// modules that enclose the cut ones). A pattern may also name a parameter; the style must then
// be "partial", "whole", "own_rows" or "own_columns" (parts as for "column" are allowed). "expert"
// is for parameters with one row per expert, or their module. The first rule that matches applies.
// Throws ConfigError for rules that match nothing, are impossible, or contradict each other on a
// shared parameter. An axis of one rank cuts nothing.
std::vector<Ruled> apply(const std::vector<std::pair<std::string, std::string>>& rules,
                         const MeshConfig& mesh, ModelTree* tree);

// Returns the names of the Linear and Embedding modules, for error texts.
std::string names_of_matrices(const ModelTree& tree);

}  // namespace penstock::parallel
