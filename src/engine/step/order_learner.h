#pragma once
// OrderLearner: learns the order in which a model's units run in step one. All ranks then agree on
// this order. Pure, except for the collective that agree() gets.
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "src/engine/step/unit_order.h"
#include "src/plan/model_desc.h"
#include "src/plan/plan.h"

namespace penstock::engine {

class OrderLearner {
 public:
  // Facts about the model that decide what is recorded.
  struct Scope {
    // Units have events in forward. If not, only gradients show the order.
    bool units_are_entered = false;
    bool moves_params = false;  // if so, all ranks must run units in the same order
    bool interleaves = false;   // a backward may follow forwards of other micro-batches (pipelines)
    std::function<bool(int unit)> is_tile;
  };
  // A collective that returns every rank's text, in rank order.
  using ShareText =
      std::function<std::vector<std::string>(const std::string& label, const std::string& text)>;

  // `assumed`: the model in the order that the plan of step one assumes.
  OrderLearner(ModelDesc assumed, Scope scope);

  // Forgets the order, which is then learned again.
  void restart(const ModelDesc& assumed) {
    const bool stays_whole = stays_whole_;
    *this = OrderLearner(assumed, scope_);
    stays_whole_ = stays_whole;
  }
  bool done() const { return done_; }  // agree() was called, so nothing more is recorded

  // Begins a forward. A new training forward replaces the recorded one, so the last training
  // forward before the backward counts.
  void begin_forward(bool trains);
  void end_forward() { in_forward_ = false; }
  void begin_backward();

  // Returns whether a backward that returns to units needs keep_whole(). It does if parameters move
  // and the ranks have not agreed on an order that every rank saw.
  bool may_return() const;
  // Makes the assumed backward keep all units whole to its end. This is needed because a backward
  // may go through several forwards, and ranks may return to different units.
  void keep_whole();
  const ModelDesc& assumed() const { return assumed_; }

  // A unit begins or ends in pass kForward or kBackward.
  void begin(Op pass, int unit);
  void end(Op pass, int unit);
  void add(Op pass, const Visit& visit);  // the visit of a tile

  // Adds a spanning unit, which stays whole for entire passes because it is read outside its
  // module.
  void span(int unit) { spanning_.push_back(unit); }
  const std::vector<int>& spanning() const { return spanning_; }
  bool spans(int unit) const;
  // Returns whether parameters move and the unit was already entered in the recorded forward.
  bool enters_again(int unit) const;

  // [all ranks] If every rank saw the same order, returns the model in that order. Otherwise
  // returns it in the assumed order. `off_plan`: number of events of this rank that the assumed
  // order did not foresee. Throws RuntimeFault with the first difference if three conditions hold:
  // the ranks saw different orders, parameters move, and the assumed order does not fit every rank.
  ModelDesc agree(int64_t off_plan, const ShareText& share);

 private:
  bool records(Op pass) const { return pass == Op::kForward ? in_forward_ : !done_; }
  OrderRecord& record_of(Op pass) { return pass == Op::kForward ? forward_ : backward_; }
  std::vector<Visit> all_of(const OrderRecord& record, const std::vector<Visit>& assumed) const;
  std::vector<Visit> seen_forward() const;
  std::vector<Visit> seen_backward() const;
  void add_spanning(std::vector<Visit>& visits) const;

  ModelDesc assumed_;
  Scope scope_;
  OrderRecord forward_, backward_;
  std::vector<int> spanning_;
  bool in_forward_ = false;   // a forward is being recorded
  bool stays_whole_ = false;  // the assumed backward returns to units
  bool done_ = false;
  bool saw_the_same_ = false;  // agree() returned an order that every rank saw
};

}  // namespace penstock::engine
