#pragma once
// Rules: which modules the ranks of the tensor axis cut, and how. From names to cuts of parameters;
// pure, so every rank comes to the same.
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "penstock/core.h"

namespace penstock::parallel {

// What a rule makes of a module. Letters are those of [Note: Tensor axis] (tensor_operators.h):
// what comes in -> what comes out.
enum class Style : uint8_t {
  kColumn,        // R -> V: rows of the weight are cut
  kColumnGather,  // R -> I: as kColumn, and the output is gathered
  kRow,           // V -> I: columns of the weight are cut
  kRowCut,        // I -> I: as kRow, of its share of the input
  kRowTokens,     // V -> V: as kRow, and of the sum a rank has its tokens; a bias has addends
  kVocab,         // embedding: rows are cut, of any number; linear: as kColumnGather, so
  kShared,        // R -> V: the weight is whole, and a rank computes the head that it needs
  kPartial,       // V -> V: the weight is whole, its gradient is added up over the ranks
  kWhole,         // the same on every rank, which says that it is meant to be
};

const char* style_name(Style style);

struct Ruled {
  int module = 0;  // in the tree
  Style style = Style::kWhole;
  bool transposed = false;  // the weight is [in, out] (transformers' Conv1D)
  int64_t heads = 0;        // of kShared
  int64_t size = 0;         // of the whole output; of an embedding of kVocab, its rows
};

// Gives parameters of the tree their cuts. A rule is (pattern of module names, style): "column",
// "column:3" (three equal parts, [Q|K|V]), "column:64,16,16" (parts of these sizes),
// "column_gather", "row", "row_cut" and "row_tokens" (with parts likewise), "vocab", "shared:2" (so
// many heads, fewer than ranks), "partial", "whole", and what is the front's: "divide" or
// "divide:2" (attributes of modules), "tokens" and "gather_tokens" (modules around others). A
// pattern may also name a parameter, to be "partial" or "whole". The first rule that matches
// counts. Throws ConfigError for rules that match nothing, cannot be, or contradict each other on a
// shared parameter.
std::vector<Ruled> apply(const std::vector<std::pair<std::string, std::string>>& rules, int count,
                         ModelTree* tree);

// Linears and embeddings, for messages.
std::string names_of_matrices(const ModelTree& tree);

}  // namespace penstock::parallel
