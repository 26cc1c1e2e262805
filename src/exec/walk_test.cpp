// Walks between all placements, over two meshes at once, with ranks that are threads.
#include "src/exec/walk.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "src/base/text.h"
#include "src/comm/channel.h"
#include "src/comm/on_ranks.h"

namespace penstock::exec::walk_test {
namespace {

constexpr int64_t kNumel = 16 * 128;
const Mesh kRun = Mesh::of({{Axis::kNode, 2}, {Axis::kLocal, 4}});

// The full values of a flat. Ranks with different parts of a model have different values.
at::Tensor values_of(const Mesh& mesh, int rank) {
  return at::arange(kNumel, at::kFloat) + 1000.0 * (1 + mesh.coordinate(rank, Axis::kExpert));
}

// This rank's copy of the values. The average of the addends of a partial sum is the value.
at::Tensor copy_of(const Placement& place, const Mesh& mesh, int rank) {
  at::Tensor full = values_of(mesh, rank);
  for (const Axis axis : kDataAxes) {
    if (place.on(axis) != Layout::kPartial) continue;
    full.mul_(1.0 + 0.25 * (mesh.coordinate(rank, axis) - (mesh.size(axis) - 1) / 2.0));
  }
  const int64_t numel = kNumel / num_shards(place, mesh);
  return full.narrow(0, shard_index(place, mesh, rank) * numel, numel).clone();
}

std::vector<Placement> placements(const std::string& letters) {
  std::vector<Placement> found;
  for (const char node : letters) {
    for (const char local : letters) {
      found.push_back(Placement::parse(std::string({node, local}) + "@device:fp32"));
    }
  }
  return found;
}

double apart(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).abs().max().item<double>() / b.abs().max().item<double>();
}

// Moves copies of two flats in one walk: one over the mesh of the run, one over a mesh in which two
// neighbours have different values.
void move(Group& group, const Placement& from, const Placement& to, bool consumes) {
  ModelPlacement experts;
  experts.divide_experts(2);
  const FlatMesh run(kRun, group.rank()), own(experts.mesh(kRun), group.rank());
  mem::Tiers tiers;
  comm::Channel channel(group, "walk");
  Walk walk({from, hops(from, to), consumes}, run, group.rank(), tiers);
  std::vector<at::Tensor> sources, targets;
  for (const FlatMesh* over : {&run, &own, &run}) {
    const at::Tensor& source = sources.emplace_back(copy_of(from, over->mesh, group.rank()));
    const at::Tensor& target =
        targets.emplace_back(at::zeros({kNumel / num_shards(to, over->mesh)}, at::kFloat));
    walk.add(*over, {source.data_ptr(), target.data_ptr(), Dtype::kFp32, Dtype::kFp32, kNumel});
  }
  walk.run(channel, concat(from.text(), " to ", to.text()));
  for (size_t i = 0; i < targets.size(); ++i) {
    const FlatMesh& over = i == 1 ? own : run;
    EXPECT_LT(apart(targets[i], copy_of(to, over.mesh, group.rank())), 1e-6)
        << from.text() << " to " << to.text() << ", flat " << i << ", rank " << group.rank();
    if (consumes) continue;
    EXPECT_EQ(apart(sources[i], copy_of(from, over.mesh, group.rank())), 0.0) << "changed";
  }
  walk.let_go();
}

TEST(Walk, MovesFlatsOfTwoMeshesBetweenAllPlacements) {
  int count = 0;
  const auto errors = comm::on_ranks(kRun.world(), [&](Group& group) {
    for (const Placement& from : placements("RSP")) {
      for (const Placement& to : placements("RS")) {
        if (from == to) continue;
        for (const bool consumes : {true, false}) {
          move(group, from, to, consumes);
          count += group.rank() == 0 ? 1 : 0;
        }
      }
    }
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
  EXPECT_EQ(count, 64);
}

TEST(Walk, MeetsAlsoWithoutBuffers) {
  const auto errors = comm::on_ranks(kRun.world(), [&](Group& group) {
    const FlatMesh run(kRun, group.rank());
    mem::Tiers tiers;
    comm::Channel channel(group, "walk");
    const Placement from = Placement::parse("SS@device:fp32");
    const Placement to = Placement::parse("RR@device:fp32");
    Walk walk({from, hops(from, to)}, run, group.rank(), tiers);
    EXPECT_EQ(walk.route().to, to);
    EXPECT_FALSE(walk.meets_on_device());
    walk.run(channel, "empty");
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

}  // namespace
}  // namespace penstock::exec::walk_test
