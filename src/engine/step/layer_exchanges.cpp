#include "src/engine/step/layer_exchanges.h"

#include <algorithm>
#include <utility>

#include "src/base/text.h"
#include "src/engine/step/unit_order.h"

namespace penstock::engine {

namespace {

std::string bytes_text(const std::vector<std::vector<LayerExchange>>& by_unit) {
  int64_t bytes = 0, count = 0;
  for (const std::vector<LayerExchange>& unit : by_unit) {
    for (const LayerExchange& one : unit) bytes += one.sent;
    count += static_cast<int64_t>(unit.size());
  }
  return concat(count, " exchanges of ", format_bytes(static_cast<double>(bytes)));
}

}  // namespace

LayerExchanges::LayerExchanges(size_t num_units, std::map<const std::string*, int> units,
                               bool in_stages)
    : units_(std::move(units)), in_stages_(in_stages) {
  for (PassExchanges& pass : passes_) {
    pass.by_unit.resize(num_units);
    pass.next.assign(num_units, 0);
  }
}

void LayerExchanges::begin_forward() {
  std::vector<size_t>& next = of(Op::kForward).next;
  if (std::exchange(went_back_, false) || in_stages_) std::fill(next.begin(), next.end(), 0);
}

void LayerExchanges::begin_backward() {
  std::vector<size_t>& next = of(Op::kBackward).next;
  std::fill(next.begin(), next.end(), 0);
  went_back_ = true;
}

void LayerExchanges::add(Op pass, const comm::Label& label, int computing,
                         const LayerExchange& made) {
  if (ignores_) return;
  const auto found = units_.find(label.text.get());
  const auto unit = static_cast<size_t>(found == units_.end() ? computing : found->second);
  std::vector<LayerExchange>& list = of(pass).by_unit[unit];
  const size_t next = of(pass).next[unit]++;
  if (recording_) {
    if (next == 0) list.clear();
    list.push_back(made);
    return;
  }
  const bool foreseen =
      next < list.size() && list[next].kind == made.kind && list[next].axis == made.axis;
  off_plan_ += foreseen ? 0 : 1;
}

void LayerExchanges::restart() {
  clear();
  for (PassExchanges& pass : passes_) std::fill(pass.next.begin(), pass.next.end(), 0);
  recording_ = true;
  off_plan_ = 0;
}

std::string LayerExchanges::record_text() const {
  std::string text;
  for (size_t pass = 0; pass < passes_.size(); ++pass) {
    const ByUnit& made = passes_[pass].by_unit;
    for (size_t unit = 0; unit < made.size(); ++unit) {
      for (const LayerExchange& one : made[unit]) {
        text += concat(pass == 0 ? "forward u" : "backward u", unit, " ", one.text(), "\n");
      }
    }
  }
  return text;
}

void LayerExchanges::agree(const OrderLearner::ShareText& share) {
  difference_ = first_difference(share("exchanges of step one", record_text()));
  recording_ = false;
  if (!difference_.empty()) clear();
}

void LayerExchanges::clear() {
  for (PassExchanges& pass : passes_) {
    for (std::vector<LayerExchange>& unit : pass.by_unit) unit.clear();
  }
}

void LayerExchanges::put_into(ModelDesc& model) const {
  if (recording_) return;
  for (size_t unit = 0; unit < model.units.size(); ++unit) {
    model.units[unit].in_forward = passes_[0].by_unit[unit];
    model.units[unit].in_backward = passes_[1].by_unit[unit];
  }
}

std::string LayerExchanges::text() const {
  if (recording_) return "exchanges of layers: known after step one\n";
  if (!difference_.empty()) {
    return concat("exchanges of layers differ between ranks, so the plan has none: ", difference_,
                  "\n");
  }
  return concat("exchanges of layers, per micro-batch: ", bytes_text(passes_[0].by_unit),
                " in forward, ", bytes_text(passes_[1].by_unit),
                " in backward; off plan so far: ", off_plan_, "\n");
}

}  // namespace penstock::engine
