#pragma once
// Mesh: named axes over the ranks. A plain value, usable from any thread.
#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

namespace penstock {

// Axes in nesting order: ranks that differ only in the last axis are neighbours; ranks of different
// stages are farthest apart. A new axis needs one name here and one row below.
enum class Axis : uint8_t { kPipeline, kNode, kLocal, kExpert, kSequence, kTensor };

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

// The two axes that form the data axis. They are adjacent in the nesting, so a rank's position on
// both is node * local_size + local.
inline constexpr std::array kDataAxes = {Axis::kNode, Axis::kLocal};

const char* axis_name(Axis axis);

struct Mesh {
  std::array<int, kNumAxes> sizes;  // in nesting order

  Mesh() { sizes.fill(1); }
  // Mesh::of({{Axis::kNode, 2}, {Axis::kLocal, 4}}); every other axis has size one.
  static Mesh of(std::initializer_list<std::pair<Axis, int>> sizes);

  int size(Axis axis) const { return sizes[static_cast<size_t>(axis)]; }
  int data() const { return size(Axis::kNode) * size(Axis::kLocal); }
  int world() const;
  int coordinate(int rank, Axis axis) const;
  // Returns the ranks that differ from `rank` only along `axes`, in ascending order. The position
  // in this list is the shard index.
  std::vector<int> group(int rank, const std::vector<Axis>& axes) const;
  std::string text() const;  // "node=2 local=4 tensor=2": node, local, and each axis above size one
  // Parses the form that text() returns. Throws ConfigError.
  static Mesh parse(const std::string& text);
  bool operator==(const Mesh&) const = default;

 private:
  int stride(Axis axis) const;  // distance in rank between neighbours along the axis
};

}  // namespace penstock
