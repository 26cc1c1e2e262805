#pragma once
// ModelPlacement: how the ranks that compute one model together hold a flat. A plain value, usable
// from any thread.
//
// [Note: Model axes] The cells of a table place the copies of a flat over the data axes. The other
// axes are the model axes: along them, ranks hold different flats, or hold one flat in different
// ways. The layout along a model axis is a property of the flat: it is stored with the flat and is
// the same for all its copies. It determines the groups, the sums, and which ranks count a gradient
// in the norm:
//
//   R  the holders have the same parameters and the same gradient; the first holder counts it
//   S  each rank has its own part of the parameters and of the gradient, and counts that part
//   P  the holders have the same parameters, and each has an addend of the gradient, until a `sum`
//      line adds the addends up; the first holder counts the sum
//
// [Note: Expert ranks] Expert ranks are data ranks: each computes with its own samples. The axis
// `expert` is the innermost part of the axis `local`. Most flats are placed over all of `local`, as
// if there were no expert ranks. A flat with expert=S has other parameters on each expert rank, so
// it is placed over the mesh in which `expert` is an axis of its own: its shards, gathers and
// averages are those of the data ranks with the same part. In a backward, all expert ranks send
// samples to a part, and so its gradient is already the sum over expert ranks.
#include <array>
#include <string>
#include <vector>

#include "src/place/groups.h"
#include "src/place/mesh.h"
#include "src/place/placement.h"

namespace penstock {

// The model axes, innermost first. Sums over several axes run in this order.
inline constexpr std::array kModelAxes = {Axis::kTensor, Axis::kSequence, Axis::kExpert,
                                          Axis::kPipeline};
static_assert(kDataAxes.size() + kModelAxes.size() == kNumAxes);

// How the ranks along one axis hold a flat.
struct AxisHolding {
  Layout layout = Layout::kReplicated;
  std::vector<int> holders{};  // their coordinates on the axis, in ascending order; empty: all
  bool operator==(const AxisHolding&) const = default;
};

class ModelPlacement {
 public:
  const AxisHolding& on(Axis axis) const { return axes_[static_cast<size_t>(axis)]; }
  AxisHolding& on(Axis axis) { return axes_[static_cast<size_t>(axis)]; }

  bool is_sharded(Axis axis) const { return on(axis).layout == Layout::kSharded; }
  bool is_partial(Axis axis) const { return on(axis).layout == Layout::kPartial; }
  bool is_sharded() const;  // on any axis

  int num_holders(Axis axis, const Mesh& mesh) const;
  // Divides the flat over the expert ranks, `count` neighbours on the axis `local`.
  void divide_experts(int count);
  // Returns the mesh over which the flat's copies are placed, and on which its gradient is averaged
  // over the data axes ([Note: Expert ranks]). `run`: the mesh without expert ranks.
  Mesh mesh(const Mesh& run) const;

  // Returns the number of data ranks whose samples are all in the gradient that one rank's backward
  // leaves. The average over the data ranks of mesh() must be divided by this number.
  int num_summed() const { return num_experts_; }

  // Returns the number of addends of a gradient, over all axes.
  int num_addends(const Mesh& mesh) const;
  // Returns whether the rank with this coordinate on the axis holds the flat.
  bool is_held_by(Axis axis, int coordinate) const;
  // Returns whether `rank`, which must hold the flat, counts and saves its values of the flat.
  // Exactly one of the holders of equal values does.
  bool is_counted_by(const Mesh& mesh, int rank) const;
  // Returns whether `rank`, which must hold the flat, is the first of its data ranks.
  bool is_first(const Mesh& run, int rank) const;
  // Returns whether the parameters of two ranks that hold the flat have the same values.
  bool is_alike(const Mesh& run, int rank, int other) const;

  // Returns "tensor=P,pipeline={0,3}P": the axes on which the flat is not whole on all ranks.
  std::string text() const;
  bool operator==(const ModelPlacement&) const = default;

 private:
  std::array<AxisHolding, kNumAxes> axes_{};
  int num_experts_ = 1;  // number of expert ranks with different parts
};

// Returns the ranks that hold the flat, among the ranks that differ from `rank` only along `axis`.
// `index` is negative if `rank` does not hold the flat.
Members holders(const ModelPlacement& place, Axis axis, const Mesh& mesh, int rank);

}  // namespace penstock
