#pragma once
// LayerExchanges: what layers exchange with the tensor and sequence ranks while they compute. Step
// one shows it. All ranks then agree on it, and it becomes part of the model that is planned. Later
// exchanges are compared with the plan. Used like Core::State.
#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "src/engine/mesh/model_ranks.h"
#include "src/engine/step/driver.h"
#include "src/engine/step/order_learner.h"
#include "src/exec/flat.h"
#include "src/plan/model_desc.h"

namespace penstock::engine {

class LayerExchanges {
 public:
  // All arguments must outlive this object.
  LayerExchanges(const Driver& driver, const ModelDesc& model, const ModelRanks& ranks,
                 const std::vector<exec::UnitState>& units);

  // Called before each exchange. Exchanges outside of training are ignored.
  void add(const LayerExchange& made, const comm::Label& label);
  void begin(Op pass);  // a training forward or a backward begins
  // Records again until the next agree().
  void restart() { recording_ = true; }

  // [all ranks] Ends the recording. Returns the model with the exchanges if all ranks made the same
  // ones, and without them otherwise.
  ModelDesc agree(ModelDesc model, const OrderLearner::ShareText& share);

  // Returns what an explanation says of the exchanges: lines, or "" if there are none.
  std::string text() const;

 private:
  using ByUnit = std::vector<std::vector<LayerExchange>>;

  int unit_of(const comm::Label& label) const;
  std::string record_text() const;

  const Driver& driver_;
  const ModelDesc& model_;
  const ModelRanks& ranks_;
  std::map<int, int> units_;    // by parameter
  std::array<ByUnit, 2> made_;  // of the last forward and backward in which a unit made any
  std::array<std::vector<size_t>, 2> next_;  // by unit: exchanges in this forward or backward
  bool recording_ = true;
  std::string difference_;  // between ranks
  int64_t off_plan_ = 0;
};

}  // namespace penstock::engine
