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

// Returns the key of a message, by the action that needs it. Both parts of a split backward need
// the same message.
Action key_of(const Action& action) { return {action.stage, action.forward, action.micro}; }

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
                       const Stages& stages, const device::Device& computes)
    : group_(group), members_(members), computes_(computes), num_stages_(stages.count) {
  for (const StageModule& piece : stages.pieces) pieces_.push_back({piece.module, piece.stage});
  connect(!computes.is_host() && group->device_groups());
}

// The constructor of Messages may connect, and then waits for the other rank. All ranks connect in
// the order of the pairs of neighbours, so no ranks wait for each other in a circle.
void StageLanes::connect(bool one_lane_for_both) {
  const int size = members_.size();
  const auto add_lane = [&](const char* row) { return &lanes_.emplace_back(computes_, row); };
  const auto way = [&](int from, int to, const char* name, StageLane* lane) {
    const std::vector<int>& ranks = members_.ranks;
    const int hop = name == kForward ? 1 : -1;
    const bool is_used = to == from + hop || num_stages_ > size;  // not around the ends
    const device::Device& where = is_used ? computes_ : device::Device::host();
    const int sender = ranks[static_cast<size_t>(from)], receiver = ranks[static_cast<size_t>(to)];
    return std::unique_ptr<Way>(
        new Way{{group_, sender, {receiver}, name, where}, from == members_.index, lane});
  };
  StageLane* shared = nullptr;
  for (int before = 0; before < size; ++before) {
    const int after = (before + 1) % size;
    if (members_.index != before && members_.index != after) continue;
    const bool is_first = members_.index == before;
    if (one_lane_for_both && (shared == nullptr || size > 2)) {
      shared = add_lane(is_first ? "with the next stage" : "with the stage before");
    }
    const auto lane = [&](const char* row) { return shared != nullptr ? shared : add_lane(row); };
    if (is_first) {
      sends_forward_ = way(before, after, kForward, lane("to the next stage"));
      receives_backward_ = way(after, before, kBackward, lane("from the next stage"));
    } else {
      receives_forward_ = way(before, after, kForward, lane("from the stage before"));
      sends_backward_ = way(after, before, kBackward, lane("to the stage before"));
    }
  }
}

void StageLanes::record(const std::shared_ptr<trace::Recorder>& recorder) {
  for (StageLane& lane : lanes_) lane.lane.record(recorder, lane.row);
  for (const bool forward : {true, false}) {
    sends(forward).messages.record(recorder);
    receives(forward).messages.record(recorder);
  }
}

// Posts the lane's next receive. Returns whether there is one before the next send.
bool StageLanes::post(StageLane& lane) {
  if (lane.expected.empty() || lane.expected.front().way->sends) return false;
  const auto [action, way] = lane.expected.front();
  lane.expected.pop_front();
  auto arriving = std::make_shared<Arriving>();
  const comm::Label label = label_of(action);
  const trace::AtLine at(label.text);
  arriving->fence = lane.lane.submit([way = way, arriving, label, step = step_] {
    way->messages.set_step(step);
    arriving->message = way->messages.receive(label);
  });
  arriving_[action] = std::move(arriving);
  return true;
}

void StageLanes::begin(const Schedule& schedule) {
  if (open_) {
    throw RuntimeFault(
        "[engine::train_batch] an error ended the previous batch, and messages between stages are "
        "still in flight. Call close() on this engine");
  }
  const int size = members_.size(), index = members_.index;
  open_ = true;
  num_sent_ = bytes_sent_ = 0;
  sent_.clear();
  arriving_.clear();
  for (StageLane& lane : lanes_) lane.expected.clear();
  const auto expect = [](Way& way, const Action& needs) {
    way.lane->expected.push_back({needs, &way});
  };
  for (const Action& made : in_rounds(schedule)) {
    const Action needs{next_stage(made, num_stages_), made.forward, made.micro};
    if (needs.stage < 0) continue;
    if (made.stage % size == index) expect(sends(made.forward), needs);
    if (needs.stage % size == index) expect(receives(made.forward), needs);
  }
}

// See [Note: No deadlock] for the order of the posted receives.
parallel::TensorMessage StageLanes::receive(const Action& action) {
  StageLane& lane = *receives(action.forward).lane;
  while (!arriving_.contains(key_of(action)) && post(lane)) {
  }
  const auto found = arriving_.find(key_of(action));
  PENSTOCK_ASSERT(found != arriving_.end(), concat("no message is expected for ", action.text()));
  const std::shared_ptr<Arriving> arriving = std::move(found->second);
  arriving_.erase(found);
  arriving->fence.wait();
  post(lane);  // the next message arrives while this stage computes
  for (const at::Tensor& tensor : arriving->message.tensors) {
    if (!tensor.defined() || tensor.is_cpu()) continue;
    computes_.used_on(tensor.storage().data_ptr(), computes_.current());  // the lane allocated it
  }
  return std::move(arriving->message);
}

void StageLanes::send(const Action& action, parallel::TensorMessage made) {
  Way& way = sends(action.forward);
  StageLane& lane = *way.lane;
  while (post(lane)) {
  }
  const Action needs{next_stage(action, num_stages_), action.forward, action.micro};
  PENSTOCK_ASSERT(!lane.expected.empty() && lane.expected.front().needs == needs,
                  concat("the message for ", needs.text(), " is not next"));
  lane.expected.pop_front();
  ++num_sent_;
  bytes_sent_ += static_cast<int64_t>(made.text.size());
  for (const at::Tensor& tensor : made.tensors) {
    if (tensor.defined()) bytes_sent_ += static_cast<int64_t>(tensor.nbytes());
  }
  const comm::Label label = label_of(needs);
  const trace::AtLine at(label.text);
  sent_.push_back(lane.lane.submit([&way, label, step = step_, message = std::move(made)] {
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

parallel::TensorMessage StageLanes::share_outputs(parallel::TensorMessage own) {
  const int owner = (num_stages_ - 1) % members_.size();
  if (!outputs_) {
    std::vector<int> others = members_.ranks;
    others.erase(others.begin() + owner);
    outputs_ = std::make_unique<parallel::Messages>(
        group_, members_.ranks[static_cast<size_t>(owner)], others, "outputs", computes_);
  }
  outputs_->set_step(step_);
  const comm::Label label("outputs of the last stage");
  if (owner != members_.index) return outputs_->receive(label);
  outputs_->send(label, own);
  return own;
}

void StageLanes::close() {
  outputs_.reset();
  arriving_.clear();
  lanes_.clear();
  for (std::unique_ptr<Way>* way :
       {&sends_forward_, &receives_forward_, &sends_backward_, &receives_backward_}) {
    way->reset();
  }
}

}  // namespace penstock::engine
