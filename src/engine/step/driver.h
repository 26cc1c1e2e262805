#pragma once
// Driver: matches the events of eager code with the steps of the plan.
//
// [Note: Driving a plan] A section's steps are run up to the compute line that an event names.
// Lines that this rank skips are run on the way, in plan order, so ranks that take different
// branches still issue the same collectives. Gradient moves wait in a queue of their own until the
// unit's gradients are complete, again in plan order; what is left runs when the section ends. An
// event the plan does not foresee is served on demand (require / release), which is always right
// but not early; if only some ranks do so, their collectives stop matching and the timeout names
// both.
#include <array>
#include <deque>
#include <map>
#include <vector>

#include "src/exec/executor.h"
#include "src/plan/planner.h"

namespace penstock::engine {

class Driver {
 public:
  explicit Driver(exec::Executor& executor);

  void set_plan(Section section, const Plan& plan);
  // The window's next section; finishes the one before where an exception cut it short.
  void begin(Section section);
  // A unit starts to compute: its parameters are whole when this returns.
  void enter(Op op, int unit);
  // It ended (forward), or its gradients are complete (backward).
  void leave(Op op, int unit);
  // It ended (backward) and is entered again before its gradients come: a tile that is recomputed.
  void pause(int unit);
  // Whole from now to the end of the next backward section, on demand: torch.autograd.grad() went
  // through the unit, and what it built may be differentiated again.
  void pin(int unit);
  // Whole until let_go(), as often as held, whatever runs meanwhile: users look at them.
  void hold(const std::vector<int>& units);
  void let_go(const std::vector<int>& units);
  int held(int unit) const { return held_[static_cast<size_t>(unit)]; }
  bool holds() const;  // any unit
  // Runs everything left of the section, in plan order.
  void finish();
  // Units with a gradient on this rank that came after its move in the last backward (a block that
  // was recomputed twice); and the moves of that backward again, on all ranks alike.
  std::vector<bool> late() const;
  void move_late(const std::vector<bool>& late, Section backward);
  // After an error in the user's code: forget the section, free what is gathered.
  void abandon();

  Section section() const { return section_; }
  Plan plan(Section section) const;
  int64_t off_plan_events() const { return off_plan_; }
  // What events of the timeline call a unit's forward or backward.
  const std::string& text_of(Op op, int unit) const {
    return *computes_[op == Op::kBackward ? 1 : 0][static_cast<size_t>(unit)];
  }
  // The innermost unit that computes; the root where none does.
  int computing() const;

 private:
  size_t find(Op op, int unit, bool end) const;
  void run_to(size_t end);
  void bring_back();
  void run_moves();  // up to the next compute line
  void run(const exec::PlannedStep& planned);
  void pass(size_t line);
  void note_late();
  void pump();  // gradient moves whose units are complete
  bool complete(const exec::PlannedStep& planned) const;
  void release(int unit);
  void compute_ends(Op op, int unit);

  exec::Executor& executor_;
  trace::Recorder& recorder_;
  std::array<std::vector<trace::Text>, 2>
      computes_;                   // what computes, forward and backward; by unit
  std::vector<int64_t> began_ns_;  // by unit: when it was entered, 0 = not
  int64_t backward_ns_ = 0;        // when the last unit of this backward ended
  std::map<Section, std::vector<exec::PlannedStep>> plans_;
  const std::vector<exec::PlannedStep>* steps_ = nullptr;
  Section section_ = Section::kForward;
  size_t next_ = 0;
  bool running_ = false;
  bool carries_ = false;    // parameters are in `hold`: a forward is the window's next
  bool lost_hold_ = false;  // they were, and a backward of the window may come
  bool finishing_ = false;
  std::vector<int> active_;                    // by unit: how many times entered and not left
  std::vector<bool> done_;                     // by unit: gradients complete
  std::vector<bool> drop_later_;               // by unit: the plan dropped it while it was active
  std::vector<bool> unforeseen_;               // by unit: gathered on demand
  std::vector<bool> pinned_;                   // by unit: see pin()
  std::vector<int> held_;                      // by unit: see hold()
  std::vector<bool> late_;                     // by unit: when the last backward ended
  std::deque<const exec::PlannedStep*> owed_;  // gradient moves that wait
  int64_t off_plan_ = 0;
};

}  // namespace penstock::engine
