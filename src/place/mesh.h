#pragma once
// Mesh: named axes over the ranks. A pure value; any thread.
#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace penstock {

// Axes in nesting order: the first splits outermost, so on data axes the position of a shard is
// the data-parallel rank. `node` x `local` together are the data axis.
enum class Axis : uint8_t { kNode, kLocal, kTensor };
inline constexpr int kNumAxes = 3;
// Axes a Placement may shard state over (tensor splits the model itself, see ModelDesc).
inline constexpr int kNumDataAxes = 2;

const char* axis_name(Axis axis);

struct Mesh {
  int node = 1;
  int local = 1;
  int tensor = 1;

  int size(Axis axis) const;
  int data() const { return node * local; }
  int world() const { return node * local * tensor; }
  // rank = (node * local_size + local) * tensor_size + tensor
  int coordinate(int rank, Axis axis) const;
  // Ranks that differ from `rank` only along `axes`, ascending (so group position = shard
  // position).
  std::vector<int> group(int rank, const std::vector<Axis>& axes) const;
  std::string text() const;  // "node=2 local=4 tensor=1"
  bool operator==(const Mesh&) const = default;
};

}  // namespace penstock
