#pragma once
// StageLanes: the messages between the stages of a pipeline. Separate threads send and receive
// them, so messages travel while stages compute. Used only by the model's thread.
//
// [Note: No deadlock] A lane carries its messages in the order of in_rounds(), which both ends
// know. A message waits only for the lane's earlier messages and for the rank at the other end.
// This rank posts a receive at the latest when it needs the message or sends a later message of the
// lane. Each message comes from an action, and waits only for messages from earlier actions of
// in_rounds(). So lanes add no circular waits. Through host memory, each direction between two
// ranks is a lane. On a device, both directions are one lane: NCCL requires that two ranks launch
// the collectives of all their communicators in one order ([Note: Launch order]). These two ranks
// have no other collectives in flight during a window: gradients of weights that stages share are
// summed after it.
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "src/device/lane.h"
#include "src/engine/mesh/pipeline_ranks.h"
#include "src/engine/mesh/stage_split.h"
#include "src/engine/step/unit_order.h"
#include "src/parallel/tensor_messages.h"
#include "src/place/groups.h"
#include "src/plan/pipeline_schedule.h"

namespace penstock::engine {

class StageLanes {
 public:
  // [pipeline] `members`: the ranks of this rank's pipeline. `computes` must outlive this object.
  StageLanes(const std::shared_ptr<Group>& group, const Members& members, const Stages& stages,
             const device::Device& computes);

  int index() const { return members_.index; }
  int count() const { return members_.size(); }
  int num_stages() const { return num_stages_; }
  const std::vector<StagePiece>& pieces() const { return pieces_; }

  void set_step(int64_t step) { step_ = step; }
  void record(const std::shared_ptr<trace::Recorder>& recorder);
  // Throws RuntimeFault if messages of the previous window are still in flight.
  void begin(const Schedule& schedule);
  parallel::TensorMessage receive(const Action& action);
  void send(const Action& action, parallel::TensorMessage made);
  void end();
  // Returns the mean size of the messages that this rank sent in the last window.
  int64_t message_bytes() const { return num_sent_ > 0 ? bytes_sent_ / num_sent_ : 0; }
  // Returns whether a window began and has not ended.
  bool open() const { return open_; }
  // See PipelineRanks::set_buffers() and bring_buffers().
  void set_buffers(std::vector<StageBuffer> buffers) { buffers_ = std::move(buffers); }
  void bring_buffers(const Share& share);
  // [pipeline] Returns the message of the last stage's rank; `own` counts on this rank only.
  parallel::TensorMessage share_outputs(parallel::TensorMessage own);
  // Ends the threads. No exchange may be in progress.
  void close();

 private:
  struct Way;
  struct Expected {
    Action needs;  // the action that needs the message
    Way* way;
  };
  struct StageLane {
    StageLane(const device::Device& computes, const char* row_name)
        : lane("penstock-stage", computes, device::LaneKind::kThread), row(row_name) {}
    device::Lane lane;
    const char* row;                  // in a trace
    std::deque<Expected> expected{};  // messages not submitted yet, in order
  };
  // One direction to or from a neighbouring stage.
  struct Way {
    parallel::Messages messages;
    bool sends;
    StageLane* lane;
  };
  struct Arriving {
    parallel::TensorMessage message;
    device::Fence fence;
  };
  void connect(bool one_lane_for_both);
  Way& sends(bool forward) const { return forward ? *sends_forward_ : *sends_backward_; }
  Way& receives(bool forward) const { return forward ? *receives_forward_ : *receives_backward_; }
  bool post(StageLane& lane);

  const std::shared_ptr<Group> group_;
  const Members members_;
  const device::Device& computes_;
  const int num_stages_;
  std::vector<StagePiece> pieces_;
  std::vector<StageBuffer> buffers_;
  int64_t step_ = 1;
  bool open_ = false;
  std::map<Action, std::shared_ptr<Arriving>> arriving_;
  std::vector<device::Fence> sent_;
  int64_t num_sent_ = 0, bytes_sent_ = 0;  // in the last window
  std::unique_ptr<Way> receives_forward_, sends_forward_, receives_backward_, sends_backward_;
  std::deque<StageLane> lanes_;
  std::unique_ptr<parallel::Messages> outputs_;  // from the last stage to the others
};

}  // namespace penstock::engine
