#include "src/place/groups.h"

#include <algorithm>

namespace penstock {

Members Members::all(int rank, int size) {
  Members members{{}, rank};
  for (int one = 0; one < size; ++one) members.ranks.push_back(one);
  return members;
}

namespace {

unsigned bit(Axis axis) { return 1U << static_cast<unsigned>(axis); }

std::vector<Axis> axes_in(unsigned set) {
  std::vector<Axis> axes;
  for (const AxisRow& row : kAxes)
    if ((set & bit(row.axis)) != 0) axes.push_back(row.axis);
  return axes;
}

Members ascending(const Mesh& mesh, int rank, const std::vector<Axis>& axes) {
  Members members{mesh.group(rank, axes)};
  std::sort(members.ranks.begin(), members.ranks.end());
  const auto own = std::find(members.ranks.begin(), members.ranks.end(), rank);
  members.index = static_cast<int>(own - members.ranks.begin());
  return members;
}

}  // namespace

Members owners(const Placement& place, const Mesh& mesh, int rank) {
  Members owners{std::vector<int>(static_cast<size_t>(num_shards(place, mesh)), -1), -1};
  const std::vector<int> holders = ascending(mesh, rank, {Axis::kNode, Axis::kLocal}).ranks;
  // Holders are visited in descending order, so that the lowest holder of a shard is written last.
  for (auto holder = holders.rbegin(); holder != holders.rend(); ++holder) {
    owners.ranks[static_cast<size_t>(shard_index(place, mesh, *holder))] = *holder;
  }
  const auto own = std::find(owners.ranks.begin(), owners.ranks.end(), rank);
  if (own != owners.ranks.end()) owners.index = static_cast<int>(own - owners.ranks.begin());
  return owners;
}

Groups::Groups(const Mesh& mesh, int rank) : members_(size_t{1} << kNumAxes) {
  for (const AxisRow& row : kAxes)
    if (mesh.size(row.axis) > 1) used_axes_ |= bit(row.axis);
  for (unsigned set = 0; set < members_.size(); ++set) {
    if ((set & ~used_axes_) != 0) continue;
    std::vector<int> ranks = mesh.group(rank, axes_in(set));
    const auto own = std::find(ranks.begin(), ranks.end(), rank) - ranks.begin();
    members_[set] = {std::move(ranks), static_cast<int>(own)};
  }
  everyone_ = ascending(mesh, rank, axes_in(used_axes_));
  stage_ = ascending(mesh, rank, axes_in(used_axes_ & ~bit(Axis::kPipeline)));
}

const Members& Groups::of(const std::vector<Axis>& axes) const {
  unsigned set = 0;
  for (const Axis axis : axes) set |= bit(axis);
  return members_[set & used_axes_];
}

}  // namespace penstock
