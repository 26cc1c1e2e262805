#pragma once
// StageLanes: the messages between the stages of a pipeline. Separate threads send and receive
// them, so messages travel while stages compute. Used only by the model's thread.
//
// [Note: No deadlock] Each direction between two ranks is a lane on both sides. The lane sends or
// receives the messages in the order in which the sender's schedule makes them. A send waits only
// for the matching receive. This rank posts each receive at the latest when it needs the message
// (usually earlier). So lanes add no waits to those of the schedule, which always ends.
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
             const ParallelConfig& config, const device::Device& computes);

  int index() const { return members_.index; }
  int count() const { return members_.size(); }
  int num_stages() const { return num_stages_; }
  const std::vector<StagePiece>& pieces() const { return pieces_; }

  void set_step(int64_t step) { step_ = step; }
  void record(const std::shared_ptr<trace::Recorder>& recorder);
  std::vector<Action> begin(int num_micro, bool trains);
  parallel::TensorMessage receive(const Action& action);
  void send(const Action& action, parallel::TensorMessage made);
  void end();
  // Returns whether a window began and has not ended.
  bool open() const { return open_; }
  // See PipelineRanks::set_buffers() and bring_buffers().
  void set_buffers(std::vector<StageBuffer> buffers) { buffers_ = std::move(buffers); }
  void bring_buffers(const Share& share);
  // Ends the threads. No exchange may be in progress.
  void close();

 private:
  // One direction to or from a neighbouring stage.
  struct NeighbourLane {
    NeighbourLane(const std::shared_ptr<Group>& group, int from, int to, const std::string& name,
                  const device::Device& computes)
        : messages(group, from, {to}, name, computes),
          lane("penstock-stage", computes, device::LaneKind::kThread) {}
    parallel::Messages messages;
    device::Lane lane;
    std::deque<Action> expected{};  // messages without a posted receive, in order
  };
  struct Arriving {
    parallel::TensorMessage message;
    device::Fence fence;
  };
  void post(NeighbourLane& way, size_t count);
  Schedule schedule_of(int num_micro, bool trains) const;

  const std::shared_ptr<Group> group_;
  const Members members_;
  const device::Device& computes_;
  const int num_stages_, virtual_stages_;
  const std::string schedule_;
  std::vector<StagePiece> pieces_;
  std::vector<StageBuffer> buffers_;
  int64_t step_ = 1;
  bool open_ = false;
  std::map<Action, std::shared_ptr<Arriving>> arriving_;
  std::vector<device::Fence> sent_;
  std::unique_ptr<NeighbourLane> receives_forward_, sends_forward_, receives_backward_,
      sends_backward_;
};

}  // namespace penstock::engine
