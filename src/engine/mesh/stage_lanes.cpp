#include "src/engine/mesh/stage_lanes.h"

#include <ATen/core/grad_mode.h>

#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock::engine {

namespace {

// The names of the lanes' channels.
constexpr const char* kForward = "stage forward";
constexpr const char* kBackward = "stage backward";

// Returns the label of the message that `action` needs.
comm::Label label_of(const Action& action) {
  return concat(action.forward ? "inputs" : "output gradients", " of stage ", action.stage,
                ", micro-batch ", action.micro);
}

void put_in(const at::Tensor& buffer, const at::Tensor& values) {
  const at::NoGradGuard no_gradients;
  const bool alike = buffer.sizes() == values.sizes() && buffer.dtype() == values.dtype();
  if (alike) {
    buffer.copy_(values);
  } else {
    buffer.set_data(values.to(buffer.device()));
  }
}

}  // namespace

StageLanes::StageLanes(const std::shared_ptr<Group>& group, const Members& members,
                       const Stages& stages, const ParallelConfig& config,
                       const device::Device& computes)
    : group_(group),
      members_(members),
      computes_(computes),
      num_stages_(stages.count),
      virtual_stages_(config.virtual_stages),
      schedule_(config.schedule) {
  for (const StageModule& piece : stages.pieces) pieces_.push_back({piece.module, piece.stage});
  // Lanes may connect, which waits for the other end. All ranks connect in the order of the pairs
  // of neighbours, so no ranks wait for each other in a circle.
  const int size = members.size();
  const auto way = [&](int from, int to, const char* name) {
    const std::vector<int>& ranks = members.ranks;
    const int hop = name == kForward ? 1 : -1;
    const bool is_used = to == from + hop || config.virtual_stages > 1;  // not around the ends
    return std::make_unique<NeighbourLane>(group, ranks[static_cast<size_t>(from)],
                                           ranks[static_cast<size_t>(to)], name,
                                           is_used ? computes : device::Device::host());
  };
  for (int before = 0; before < size; ++before) {
    const int after = (before + 1) % size;
    if (members.index == before) {
      sends_forward_ = way(before, after, kForward);
      receives_backward_ = way(after, before, kBackward);
    }
    if (members.index == after) {
      receives_forward_ = way(before, after, kForward);
      sends_backward_ = way(after, before, kBackward);
    }
  }
}

void StageLanes::record(const std::shared_ptr<trace::Recorder>& recorder) {
  const auto watch = [&](NeighbourLane& way, const char* row) {
    way.lane.record(recorder, row);
    way.messages.record(recorder);
  };
  watch(*receives_forward_, "from the stage before");
  watch(*sends_forward_, "to the next stage");
  watch(*receives_backward_, "from the next stage");
  watch(*sends_backward_, "to the stage before");
}

// An evaluation uses the forwards of the schedule "gpipe".
Schedule StageLanes::schedule_of(int num_micro, bool trains) const {
  const PipelineShape shape{members_.size(), virtual_stages_, num_micro};
  Schedule schedule = make_schedule(trains ? schedule_ : "gpipe", shape);
  for (std::vector<Action>& actions : schedule.ranks) {
    if (!trains) std::erase_if(actions, [](const Action& action) { return !action.forward; });
  }
  return schedule;
}

void StageLanes::post(NeighbourLane& way, size_t count) {
  for (; count > 0 && !way.expected.empty(); --count) {
    const Action action = way.expected.front();
    way.expected.pop_front();
    auto arriving = std::make_shared<Arriving>();
    const comm::Label label = label_of(action);
    const trace::AtLine at(label.text);
    arriving->fence = way.lane.submit([&way, arriving, label, step = step_] {
      way.messages.set_step(step);
      arriving->message = way.messages.receive(label);
    });
    arriving_[action] = std::move(arriving);
  }
}

std::vector<Action> StageLanes::begin(int num_micro, bool trains) {
  if (open_) {
    throw RuntimeFault(
        "[engine::train_batch] the previous batch was cut short by an error, and messages between "
        "stages are still in flight. close() this engine");
  }
  const Schedule schedule = schedule_of(num_micro, trains);
  const int size = members_.size(), index = members_.index;
  open_ = true;
  sent_.clear();
  arriving_.clear();
  receives_forward_->expected.clear();
  receives_backward_->expected.clear();
  // The messages that this rank will receive, in the order in which the neighbours make them.
  for (const Action& made : schedule.ranks[static_cast<size_t>((index + size - 1) % size)]) {
    if (made.forward && made.stage + 1 < num_stages_) {
      receives_forward_->expected.push_back({made.stage + 1, true, made.micro});
    }
  }
  for (const Action& made : schedule.ranks[static_cast<size_t>((index + 1) % size)]) {
    if (!made.forward && made.stage > 0) {
      receives_backward_->expected.push_back({made.stage - 1, false, made.micro});
    }
  }
  return schedule.ranks[static_cast<size_t>(index)];
}

// See [Note: No deadlock] for the order of the posted receives.
parallel::TensorMessage StageLanes::receive(const Action& action) {
  NeighbourLane& way = action.forward ? *receives_forward_ : *receives_backward_;
  while (!arriving_.contains(action) && !way.expected.empty()) post(way, 1);
  const auto found = arriving_.find(action);
  PENSTOCK_ASSERT(found != arriving_.end(), concat("no message is expected for ", action.text()));
  const std::shared_ptr<Arriving> arriving = std::move(found->second);
  arriving_.erase(found);
  arriving->fence.wait();
  post(way, 1);  // the next message arrives while this stage computes
  for (const at::Tensor& tensor : arriving->message.tensors) {
    if (!tensor.defined() || tensor.is_cpu()) continue;
    computes_.used_on(tensor.storage().data_ptr(), computes_.current());  // the lane allocated it
  }
  return std::move(arriving->message);
}

void StageLanes::send(const Action& action, parallel::TensorMessage made) {
  NeighbourLane& way = action.forward ? *sends_forward_ : *sends_backward_;
  const Action needs{action.stage + (action.forward ? 1 : -1), action.forward, action.micro};
  const comm::Label label = label_of(needs);
  const trace::AtLine at(label.text);
  sent_.push_back(way.lane.submit([&way, label, step = step_, message = std::move(made)] {
    way.messages.set_step(step);
    way.messages.send(label, message);
  }));
}

void StageLanes::end() {
  for (const device::Fence& fence : sent_) fence.wait();
  sent_.clear();
  open_ = false;
}

void StageLanes::bring_buffers(const Share& share) {
  std::string names;
  for (const StageBuffer& buffer : buffers_) names += concat(buffer.name, " ", buffer.stage, "\n");
  const std::string different = first_difference(share_text("names of buffers", names, share));
  if (!different.empty()) {
    throw RuntimeFault(concat(
        "[engine::stages] the model's buffers on some ranks differ from those on rank 0, so "
        "stages cannot exchange them. Build the modules with the same buffers on every rank (",
        different, ")"));
  }
  // Each rank of the pipeline sends the buffers of its stages to the other ranks, one rank at a
  // time.
  for (int owner = 0; owner < members_.size(); ++owner) {
    parallel::TensorMessage own;
    std::vector<StageBuffer> theirs;
    for (const StageBuffer& buffer : buffers_) {
      if (buffer.stage % members_.size() != owner) continue;
      if (owner == members_.index) own.tensors.push_back(buffer.values.cpu());
      theirs.push_back(buffer);
    }
    std::vector<int> others = members_.ranks;
    others.erase(others.begin() + owner);
    parallel::Messages messages(group_, members_.ranks[static_cast<size_t>(owner)], others,
                                "stage buffers");
    const comm::Label label = concat("buffers of stage ", owner);
    if (owner == members_.index) {
      messages.send(label, own);
      continue;
    }
    const parallel::TensorMessage got = messages.receive(label);
    for (size_t i = 0; i < theirs.size(); ++i) put_in(theirs[i].values, got.tensors[i]);
  }
}

void StageLanes::close() {
  arriving_.clear();
  for (std::unique_ptr<NeighbourLane>* way :
       {&sends_forward_, &receives_forward_, &sends_backward_, &receives_backward_}) {
    way->reset();
  }
}

}  // namespace penstock::engine
