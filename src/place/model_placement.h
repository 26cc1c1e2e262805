#pragma once
// ModelPlacement: how the ranks that compute one model together hold a flat. A plain value, usable
// from any thread.
//
// [Note: Model axes] The cells of a table place the copies of a flat over the data axes. The other
// axes are the model axes: along them, ranks hold different flats, or hold one flat in different
// ways. Which of these is a property of the flat, so it is stored with the flat and is the same for
// all its copies. Groups, sums, and the share of the norm follow from it:
//
//   R  the holders have the same parameters and the same gradient; the first holder counts it
//   S  each rank has its own part of the parameters and of the gradient, and counts it
//   P  the holders have the same parameters, and each has an addend of the gradient, until a `sum`
//      line adds the addends up; the first holder counts the sum
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
  // Returns the number of addends of a gradient, over all axes.
  int num_addends(const Mesh& mesh) const;
  // Returns whether the rank with this coordinate on the axis holds the flat.
  bool is_held_by(Axis axis, int coordinate) const;
  // Returns whether this rank counts and saves its values of the flat. One of the holders of equal
  // values does. Requires a rank that holds the flat.
  bool is_counted_by(const Mesh& mesh, int rank) const;
  // Returns whether the parameters of two ranks that hold the flat have the same values.
  bool is_alike(const Mesh& mesh, int rank, int other) const;

  // Returns "tensor=P,pipeline={0,3}P": the axes on which the flat is not whole on all ranks.
  std::string text() const;
  bool operator==(const ModelPlacement&) const = default;

 private:
  std::array<AxisHolding, kNumAxes> axes_{};
};

// Returns the ranks that hold the flat along the axis, among the ranks that differ from `rank` only
// there. `index` is negative if `rank` does not hold it.
Members holders(const ModelPlacement& place, Axis axis, const Mesh& mesh, int rank);

}  // namespace penstock
