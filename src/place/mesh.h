#pragma once
// Mesh: named axes over the ranks. A plain value, usable from any thread.
#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "penstock/axis.h"

namespace penstock {

struct AxisRow {
  Axis axis;
  const char* name;
  bool shards_state;  // false: a placement may not be S on this axis
};
inline constexpr std::array kAxes = {
    AxisRow{Axis::kPipeline, "pipeline", false},  // stages hold different state
    AxisRow{Axis::kNode, "node", true},           // data-parallel ranks, across nodes
    AxisRow{Axis::kLocal, "local", true},         // data-parallel ranks inside a node
    AxisRow{Axis::kExpert, "expert", true},       // experts of one layer
    AxisRow{Axis::kSequence, "sequence", true},   // tokens of one sample
    AxisRow{Axis::kTensor, "tensor", true},       // parts of one operator
};
inline constexpr size_t kNumAxes = kAxes.size();
static_assert(std::all_of(kAxes.begin(), kAxes.end(), [](const AxisRow& row) {
  return &row == &kAxes[static_cast<size_t>(row.axis)];
}));

// The two axes that form the data axis.
inline constexpr std::array kDataAxes = {Axis::kNode, Axis::kLocal};

// [Note: Shard order] The order in which shards nest, from the outermost axis to the innermost. It
// differs from the order of ranks: shards over `node` are inside those over `local`. So, if the two
// axes have different wires, gradients are summed inside nodes first, and each rank sends only its
// shard of these sums to other nodes. Parameters take the opposite order: they are gathered between
// nodes first, while each rank has only its shard, and then inside nodes. The position of a rank
// among the data ranks of a collective is local * node_size + node.
inline constexpr std::array kShardOrder = {Axis::kPipeline, Axis::kLocal,    Axis::kNode,
                                           Axis::kExpert,   Axis::kSequence, Axis::kTensor};
static_assert(kShardOrder.size() == kNumAxes);
constexpr int nesting(Axis axis) {  // 0: outermost
  return static_cast<int>(std::find(kShardOrder.begin(), kShardOrder.end(), axis) -
                          kShardOrder.begin());
}

const char* axis_name(Axis axis);

struct Mesh {
  std::array<int, kNumAxes> sizes;  // by Axis

  Mesh() { sizes.fill(1); }
  // Mesh::of({{Axis::kNode, 2}, {Axis::kLocal, 4}}); every other axis has size one.
  static Mesh of(std::initializer_list<std::pair<Axis, int>> sizes);

  int size(Axis axis) const { return sizes[static_cast<size_t>(axis)]; }
  int data() const { return size(Axis::kNode) * size(Axis::kLocal); }
  int world() const;
  int ranks_along(const std::vector<Axis>& axes) const;  // number of ranks of group()
  int coordinate(int rank, Axis axis) const;
  // Returns the ranks that differ from `rank` only along `axes`. The position in this list is the
  // shard index ([Note: Shard order]).
  std::vector<int> group(int rank, const std::vector<Axis>& axes) const;
  std::string text() const;  // "node=2 local=4 tensor=2": node, local, and other axes above size 1
  // Parses the form that text() returns. Throws ConfigError.
  static Mesh parse(const std::string& text);
  bool operator==(const Mesh&) const = default;

 private:
  int stride(Axis axis) const;  // difference in rank between neighbours along the axis
};

}  // namespace penstock
