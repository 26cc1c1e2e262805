#pragma once
// LayerExchanges: what layers exchange with the tensor and sequence ranks while they compute. Step
// one records the exchanges. The ranks then agree on the record, which becomes part of the model
// that is planned. Later exchanges are compared with the plan. Used by the same threads as
// Core::State. Pure, except for the collective that agree() gets.
#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "src/comm/channel.h"
#include "src/engine/step/order_learner.h"
#include "src/plan/model_desc.h"

namespace penstock::engine {

class LayerExchanges {
 public:
  // `units`: the unit for each label. Contains only labels whose exchanges belong to a module.
  // `in_stages`: forwards of several micro-batches may come before a backward (pipelines).
  LayerExchanges(size_t num_units, std::map<const std::string*, int> units, bool in_stages);

  // A training forward begins. Forwards without a backward between them count as one, because one
  // backward goes through all of them. In pipelines, each forward counts separately.
  void begin_forward();
  void begin_backward();
  // Adds an exchange of pass kForward or kBackward. `computing`: the unit that computes, to which
  // the exchange belongs if its label has no unit.
  void add(Op pass, const comm::Label& label, int computing, const LayerExchange& made);
  // While set, exchanges are ignored, because they only check rules.
  void ignore(bool ignores) { ignores_ = ignores; }

  bool recording() const { return recording_; }
  void restart();  // records from the beginning

  // [ranks of the stage] Ends the recording. If these ranks made different exchanges, no exchanges
  // are planned.
  void agree(const OrderLearner::ShareText& share);
  void put_into(ModelDesc& model) const;

  std::string text() const;  // one line for explain()

 private:
  using ByUnit = std::vector<std::vector<LayerExchange>>;
  struct PassExchanges {
    ByUnit by_unit;            // recorded in step one, then planned
    std::vector<size_t> next;  // by unit: number of exchanges in this pass so far
  };
  PassExchanges& of(Op pass) { return passes_[pass == Op::kBackward ? 1 : 0]; }
  std::string record_text() const;
  void clear();  // forgets all exchanges

  std::map<const std::string*, int> units_;
  bool in_stages_;
  std::array<PassExchanges, 2> passes_;  // forward, backward
  bool recording_ = true;
  bool ignores_ = false;
  bool went_back_ = true;   // a backward began after the last forward
  std::string difference_;  // between ranks
  int64_t off_plan_ = 0;
};

}  // namespace penstock::engine
