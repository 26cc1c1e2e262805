#pragma once
// Driver: matches the events of eager code with the lines of the plan. Used only by the model's
// thread (by autograd's thread while a backward runs).
//
// [Note: Driving a plan] An event names a compute line, and the driver runs all lines of the
// section before that line. These include lines of units that this rank skips, so ranks that take
// different branches still issue the same collectives in the same order. Gradient moves wait in a
// queue, in plan order, until the gradients of their units are complete. The remaining lines run
// when the section ends. For an event that the plan does not foresee, the moves run on demand
// (require, release). The results are the same, but the moves do not start early. If only some
// ranks have such an event, their collectives do not match, and the timeout error names both
// collectives.
#include <array>
#include <compare>
#include <deque>
#include <map>
#include <optional>
#include <vector>

#include "src/engine/step/activation_memory.h"
#include "src/exec/executor.h"
#include "src/plan/planner.h"

namespace penstock::engine {

inline constexpr int kNoAction = -1;

// The name of a section's plan. In a pipeline, several plans replace that plan: one per action of a
// window (section kForward or kBackward, `action` is the action's number), and one per stage for
// the forward of an evaluation (section kEval, `action` is the stage).
struct PlanName {
  Section section;
  int action = kNoAction;
  auto operator<=>(const PlanName&) const = default;
};

class Driver {
 public:
  // `memory`: is told of the events of training sections. `kept`: by unit, whether it stays whole
  // from the first forward on.
  Driver(exec::Executor& executor, ActivationMemory& memory, std::vector<bool> kept);

  void set_plan(const PlanName& name, const Plan& plan);
  // Begins the next section of the window. Finishes the previous section if an exception cut it
  // short. `action`: see PlanName.
  void begin(Section section, int action = kNoAction);
  // Must be called when a unit starts to compute. The unit's parameters are whole on return.
  void enter(Op op, int unit);
  // Must be called when the unit's forward has ended or its gradients are complete.
  void leave(Op op, int unit);
  // Must be called when a use of a tile in backward has ended, but the tile will be entered again
  // before its gradients arrive.
  void pause(int unit);
  // Keeps the unit whole until the next backward section ends. Must be called when
  // torch.autograd.grad() went through the unit, because the resulting graph may be differentiated
  // again.
  void pin(int unit);
  // Keeps the units whole for gathered(), until let_go() has been called as often as hold().
  void hold(const std::vector<int>& units);
  void let_go(const std::vector<int>& units);
  int held(int unit) const { return held_[static_cast<size_t>(unit)]; }
  bool holds() const;  // returns whether any unit is held
  // Runs the remaining lines of the section, in plan order.
  void finish();
  // Returns, by unit, whether a gradient of the last backward arrived on this rank after its move
  // had run (for example in a block that was recomputed twice).
  std::vector<bool> late() const;
  // [all ranks] Runs the gradient moves of section `backward` again for the units in `late`.
  void move_late(const std::vector<bool>& late, Section backward);
  // Drops the section and frees gathered parameters after an error in user code. `replaces`: the
  // parameters at rest will be replaced, so units that are kept are freed, too, until the next
  // forward. All ranks must then call it.
  void abandon(bool replaces = false);

  // Returns whether the section in progress has collectives that have not begun.
  bool owes() const;
  // Returns the section that has begun and not ended, if there is one.
  std::optional<Section> section() const {
    return running_ ? std::optional(section_) : std::nullopt;
  }
  Plan plan(const PlanName& name) const;
  int64_t off_plan_events() const { return off_plan_; }
  // Returns the text of a unit's forward or backward in timeline events.
  const std::string& text_of(Op op, int unit) const {
    return *computes_[op == Op::kBackward ? 1 : 0][static_cast<size_t>(unit)];
  }
  // Returns the innermost unit that is computing, or the root if there is none.
  int computing() const;

 private:
  size_t find(Op op, int unit, bool end) const;
  void run_to(size_t end);
  void bring_back();
  void run_moves();  // runs the lines before the next compute line
  void run(const exec::PlannedStep& planned);
  void pass(size_t line);
  void pump();  // runs queued gradient moves whose units are complete
  bool complete(const exec::PlannedStep& planned) const;
  void release(int unit);
  void compute_ends(Op op, int unit);

  exec::Executor& executor_;
  ActivationMemory& memory_;
  trace::Recorder& recorder_;
  std::array<std::vector<trace::Text>, 2>
      computes_;                   // texts of forward and backward events, by unit
  std::vector<int64_t> began_ns_;  // by unit: time of enter(); 0: not entered
  int64_t backward_ns_ = 0;        // time when the last unit of this backward ended
  std::map<PlanName, std::vector<exec::PlannedStep>> plans_;
  const std::vector<exec::PlannedStep>* steps_ = nullptr;
  Section section_ = Section::kForward;
  size_t next_ = 0;
  bool running_ = false;
  bool carries_ = false;    // parameters are in `hold`: the next forward is not the window's first
  bool lost_hold_ = false;  // an evaluation within the window dropped the parameters from `hold`
  bool finishing_ = false;
  std::vector<int> active_;       // by unit: enter() calls without leave()
  std::vector<bool> done_;        // by unit: gradients complete
  std::vector<bool> drop_later_;  // by unit: the plan dropped the unit while it was active
  std::vector<bool> unforeseen_;  // by unit: gathered on demand, off plan
  std::vector<bool> pinned_;      // by unit: see pin()
  std::vector<int> held_;         // by unit: see hold()
  const std::vector<bool> kept_;  // by unit
  std::vector<bool> late_;        // by unit: its gradient was late when the last backward ended
  std::deque<const exec::PlannedStep*> owed_;  // queued gradient moves
  int64_t off_plan_ = 0;
};

}  // namespace penstock::engine
