#include "src/exec/walk.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "src/optim/kernels.h"

namespace penstock::exec {

Walk::Walk(Route route, const Mesh& mesh, const Groups& groups, mem::Tiers& tiers)
    : route_(std::move(route)), mesh_(mesh), tiers_(tiers) {
  for (const Pass& pass : route_.passes) members_.push_back(&groups.of(pass.axes));
}

int64_t Walk::numel_at(const Travel& travel, const Placement& place) const {
  return travel.numel / num_shards(place, mesh_);
}

Dtype Walk::dtype_before(const Travel& travel, size_t pass) const {
  return pass == 0 ? travel.first : dtype_after(travel, pass - 1);
}

Dtype Walk::dtype_after(const Travel& travel, size_t pass) const {
  return route_.dtype_after(pass, travel.first, travel.last);
}

char* Walk::input(size_t travel, size_t pass) const {
  return pass == 0 ? travels_[travel].from : stops_[travel][pass - 1];
}

// Whether the pass itself adds to what is at the end; else arrive() does.
bool Walk::adds_here(const Travel& travel, size_t pass) const {
  const PassKind kind = route_.passes[pass].kind;
  return travel.adds && pass + 1 == route_.passes.size() &&
         (kind == PassKind::kLocal || kind == PassKind::kReduceScatter);
}

char* Walk::scratch(Tier tier, int64_t bytes) {
  leases_.push_back(tiers_.arena(tier).take(std::max<int64_t>(1, bytes), mem::Account::kBuffers));
  return leases_.back().data();
}

void Walk::add(const Travel& travel) {
  const std::vector<Pass>& passes = route_.passes;
  std::vector<char*>& stops = stops_.emplace_back(passes.size());
  travels_.push_back(travel);
  int64_t receives = 0;
  // The last pass that has an output of its own writes to the end, if nothing is to be added there.
  bool ends = !travel.adds;
  for (size_t i = passes.size(); i-- > 0;) {
    const Pass& pass = passes[i];
    const int64_t bytes = numel_at(travel, pass.to) * dtype_bytes(dtype_after(travel, i));
    if (pass.sums()) {
      const int64_t here = numel_at(travel, pass.from) * dtype_bytes(dtype_before(travel, i));
      const int64_t size = members_[i]->size();
      receives = std::max(receives, here / size * (size - 1));
    }
    if (pass.kind == PassKind::kAllReduce) continue;  // in place
    if (ends || adds_here(travel, i)) {
      stops[i] = travel.to;
    } else if (route_.into_next(i)) {
      stops[i] = stops[i + 1] + members_[i + 1]->index * bytes;
    } else {
      stops[i] = scratch(pass.to.tier, bytes);
    }
    ends = false;
  }
  for (size_t i = 0; i < passes.size(); ++i) {
    if (passes[i].kind == PassKind::kAllReduce) stops[i] = i == 0 ? travel.from : stops[i - 1];
  }
  received_.push_back(receives > 0 ? scratch(Tier::kDevice, receives) : nullptr);
}

void Walk::run(comm::Channel& channel, const comm::Label& label, size_t first) const {
  for (const Travel& travel : travels_) {
    if (tiers_.disk) tiers_.disk->wait(travel.arriving);
  }
  for (size_t i = first; i < route_.passes.size(); ++i) {
    switch (route_.passes[i].kind) {
      case PassKind::kLocal:
        local(i);
        break;
      case PassKind::kAllGather:
        gather(i, channel, label);
        break;
      case PassKind::kReduceScatter:
      case PassKind::kAllReduce:
        reduce(i, channel, label);
        break;
    }
  }
  arrive();
}

void Walk::local(size_t index) const {
  const Pass& pass = route_.passes[index];
  for (size_t t = 0; t < travels_.size(); ++t) {
    const Travel& travel = travels_[t];
    const Dtype before = dtype_before(travel, index), after = dtype_after(travel, index);
    const int64_t numel = numel_at(travel, pass.from) / pass.parts;
    const char* from = input(t, index) + pass.part * numel * dtype_bytes(before);
    if (from == stops_[t][index] && before == after) continue;
    optim::take(stops_[t][index], after, from, before, numel, adds_here(travel, index));
  }
}

void Walk::gather(size_t index, comm::Channel& channel, const comm::Label& label) const {
  const Pass& pass = route_.passes[index];
  std::vector<comm::GatherBuffer> buffers;
  for (size_t t = 0; t < travels_.size(); ++t) {
    const int64_t bytes =
        numel_at(travels_[t], pass.from) * dtype_bytes(dtype_after(travels_[t], index));
    char* own = stops_[t][index] + members_[index]->index * bytes;
    if (own != input(t, index)) std::memcpy(own, input(t, index), bytes);
    buffers.push_back({stops_[t][index], bytes});
  }
  channel.all_gather(label, *members_[index], buffers);
}

void Walk::reduce(size_t index, comm::Channel& channel, const comm::Label& label) const {
  const Pass& pass = route_.passes[index];
  const float scale = 1.0F / static_cast<float>(members_[index]->size());
  std::vector<comm::ReduceBuffer> buffers;
  for (size_t t = 0; t < travels_.size(); ++t) {
    const Travel& travel = travels_[t];
    buffers.push_back({input(t, index), received_[t], stops_[t][index], dtype_before(travel, index),
                       dtype_after(travel, index), numel_at(travel, pass.from), scale,
                       adds_here(travel, index)});
  }
  if (pass.kind == PassKind::kAllReduce) {
    channel.all_reduce(label, *members_[index], buffers);
  } else {
    channel.reduce_scatter(label, *members_[index], buffers);
  }
}

// What no pass has written to its end.
void Walk::arrive() const {
  for (size_t t = 0; t < travels_.size(); ++t) {
    const Travel& travel = travels_[t];
    const char* at = route_.passes.empty() ? travel.from : stops_[t].back();
    if (at == travel.to) continue;
    optim::take(travel.to, travel.last, at, travel.last, numel_at(travel, route_.to), travel.adds);
  }
}

}  // namespace penstock::exec
