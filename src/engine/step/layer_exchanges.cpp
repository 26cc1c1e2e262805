#include "src/engine/step/layer_exchanges.h"

#include <algorithm>
#include <utility>

#include "src/base/text.h"
#include "src/engine/step/autograd_hooks.h"

namespace penstock::engine {

namespace {

size_t index_of(Op pass) { return pass == Op::kBackward ? 1 : 0; }

std::string bytes_text(const ModelDesc& model, std::vector<LayerExchange> UnitDesc::* pass) {
  int64_t bytes = 0, count = 0;
  for (const UnitDesc& unit : model.units) {
    for (const LayerExchange& one : unit.*pass) {
      bytes += one.sent;
      ++count;
    }
  }
  return concat(count, " exchanges of ", format_bytes(static_cast<double>(bytes)));
}

}  // namespace

LayerExchanges::LayerExchanges(const Driver& driver, const ModelDesc& model,
                               const ModelRanks& ranks, const std::vector<exec::UnitState>& units)
    : driver_(driver), model_(model), ranks_(ranks) {
  for (size_t unit = 0; unit < units.size(); ++unit) {
    for (const exec::Flat& flat : units[unit].flats) {
      for (const exec::Slot& slot : flat.slots) units_[slot.index] = static_cast<int>(unit);
    }
  }
  for (ByUnit& made : made_) made.resize(units.size());
  for (std::vector<size_t>& next : next_) next.assign(units.size(), 0);
}

// An exchange belongs to the unit of the module that makes it. Without such a module (attention
// over sequence ranks) it belongs to the unit that computes.
int LayerExchanges::unit_of(const comm::Label& label) const {
  if (ranks_.tensor) {
    for (const int param : ranks_.tensor->params_of(label)) {
      if (const auto found = units_.find(param); found != units_.end()) return found->second;
    }
  }
  return driver_.computing();
}

void LayerExchanges::add(const LayerExchange& made, const comm::Label& label) {
  const std::optional<Section> section = driver_.section();
  const bool back = in_backward();
  const bool forward = section == Section::kForward || section == Section::kForwardNext;
  const bool backward = section == Section::kBackward || section == Section::kBackwardLast;
  if (!(back ? backward : forward)) return;
  const auto unit = static_cast<size_t>(unit_of(label));
  size_t& next = next_[back ? 1 : 0][unit];
  if (recording_) {
    std::vector<LayerExchange>& list = made_[back ? 1 : 0][unit];
    if (next == 0) list.clear();
    list.push_back(made);
  } else {
    const UnitDesc& desc = model_.units[unit];
    const std::vector<LayerExchange>& planned = back ? desc.in_backward : desc.in_forward;
    const bool foreseen =
        next < planned.size() && planned[next].kind == made.kind && planned[next].axis == made.axis;
    off_plan_ += foreseen ? 0 : 1;
  }
  ++next;
}

void LayerExchanges::begin(Op pass) {
  std::vector<size_t>& next = next_[index_of(pass)];
  std::fill(next.begin(), next.end(), 0);
}

std::string LayerExchanges::record_text() const {
  std::string text;
  for (const Op pass : {Op::kForward, Op::kBackward}) {
    const ByUnit& made = made_[index_of(pass)];
    for (size_t unit = 0; unit < made.size(); ++unit) {
      for (const LayerExchange& one : made[unit]) {
        text +=
            concat(pass == Op::kForward ? "forward u" : "backward u", unit, " ", one.text(), "\n");
      }
    }
  }
  return text;
}

ModelDesc LayerExchanges::agree(ModelDesc model, const OrderLearner::ShareText& share) {
  recording_ = false;
  difference_ = first_difference(share("exchanges of step one", record_text()));
  for (size_t unit = 0; unit < model.units.size(); ++unit) {
    UnitDesc& desc = model.units[unit];
    desc.in_forward.clear();
    desc.in_backward.clear();
    if (!difference_.empty()) continue;
    desc.in_forward = made_[0][unit];
    desc.in_backward = made_[1][unit];
  }
  return model;
}

std::string LayerExchanges::text() const {
  if (recording_) return "exchanges of layers: known after step one\n";
  if (!difference_.empty()) {
    return concat("exchanges of layers differ between ranks, so the plan has none: ", difference_,
                  "\n");
  }
  return concat("exchanges of layers, per micro-batch: ", bytes_text(model_, &UnitDesc::in_forward),
                " in forward, ", bytes_text(model_, &UnitDesc::in_backward),
                " in backward; off plan so far: ", off_plan_, "\n");
}

}  // namespace penstock::engine
