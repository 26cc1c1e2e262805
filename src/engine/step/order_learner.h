#pragma once
// OrderLearner: the order in which a model's units run, learned in step one and agreed on by all
// ranks. Pure but for the collective that it is given.
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
  // What the order is learned for.
  struct Scope {
    bool units_are_entered = false;  // in forward too; else only gradients tell of them
    bool moves_params = false;       // so that ranks may not run units in different orders
    std::function<bool(int unit)> is_tile;
  };
  // Every rank's text, in rank order.
  using ShareText =
      std::function<std::vector<std::string>(const std::string& label, const std::string& text)>;

  // `assumed`: the model in the order that serves step one.
  OrderLearner(ModelDesc assumed, Scope scope);

  // Everything is learned again.
  void restart(const ModelDesc& assumed) { *this = OrderLearner(assumed, scope_); }
  bool done() const { return done_; }  // agree() was called: what comes now is not recorded

  // Of a backward, the last training forward before it counts.
  void begin_forward(bool trains);
  void end_forward() { in_forward_ = false; }
  void begin_backward();

  // A unit of the pass kForward or kBackward.
  void begin(Op pass, int unit);
  void end(Op pass, int unit);
  void add(Op pass, const Visit& visit);  // a tile's

  // Units that are read outside their module: whole for entire passes.
  void span(int unit) { spanning_.push_back(unit); }
  const std::vector<int>& spanning() const { return spanning_; }
  bool spans(int unit) const;
  // Whether it moves and was entered before in the forward that is recorded.
  bool enters_again(int unit) const;

  // [all ranks] The model in the order that was seen, where it was the same on every rank; else in
  // the assumed one. `off_plan`: events of this rank that the assumed order did not foresee. Throws
  // RuntimeFault (with the first difference) where that order did not serve all ranks either.
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
  bool in_forward_ = false;  // that is recorded
  bool done_ = false;
};

}  // namespace penstock::engine
