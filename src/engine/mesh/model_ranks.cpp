#include "src/engine/mesh/model_ranks.h"

#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock::engine {

TensorAxis::TensorAxis(std::shared_ptr<parallel::Peers> peers,
                       const std::vector<parallel::Ruled>& ruled, const ModelTree& tree,
                       const std::set<int>& here)
    : peers_(std::move(peers)) {
  for (const parallel::Ruled& one : ruled) {
    const std::string& name = tree.modules[one.module].name;
    const char* style = parallel::style_name(one.style);
    params_.push_back(tree.modules[one.module].params);
    // These two styles leave the weight whole, so other code may read it.
    if (one.style != parallel::Style::kPartial && one.style != parallel::Style::kWhole) {
      for (const int param : params_.back()) {
        if (here.contains(param)) uncalled_.emplace(param, modules_.size());
      }
    }
    labels_.emplace_back(concat(style, " (", name, ")"));
    modules_.push_back(
        {static_cast<int>(modules_.size()), name, style, one.transposed, one.heads, one.size});
  }
  for (const ParamInfo& param : tree.params) {
    if (param.cut.axis != Axis::kTensor || param.cut.kind == TensorCut::kWhole) continue;
    cuts_.emplace(param.name, param.cut);
  }
}

parallel::OperatorPeers TensorAxis::ranks_of(const TensorModule& how) {
  const auto index = static_cast<size_t>(how.index);
  if (!uncalled_.empty()) {
    for (const int param : params_.at(index)) uncalled_.erase(param);
  }
  return {peers_, labels_.at(index)};
}

std::vector<std::pair<comm::Label, std::vector<int>>> TensorAxis::labels() const {
  std::vector<std::pair<comm::Label, std::vector<int>>> labels;
  for (size_t i = 0; i < labels_.size(); ++i) labels.emplace_back(labels_[i], params_[i]);
  return labels;
}

void TensorAxis::check_called(const std::vector<exec::UnitState>& units) const {
  if (uncalled_.empty()) return;
  for (const exec::UnitState& unit : units) {
    for (const exec::Flat& flat : unit.flats) {
      for (const exec::Slot& slot : flat.slots) {
        const auto found = uncalled_.find(slot.index);
        if (found == uncalled_.end()) continue;
        const bool shared = flat.placement.on(Axis::kPipeline).holders.size() > 1;
        if (shared && !slot.touched) continue;
        throw RuntimeFault(concat(
            "[engine::step] \"parallel.rules\" cut module \"", modules_[found->second].name,
            "\", which was not called before the first step. Code that reads its weight directly "
            "gets only a part of it. Give the module the style \"whole\""));
      }
    }
  }
}

SequenceAxis::SequenceAxis(Members ranks, Connect connect)
    : ranks_(std::move(ranks)), connect_(std::move(connect)), all_(connect_(ranks_, "sequence")) {}

void SequenceAxis::arrange(int num_neighbours) {
  const int count = ranks_.size(), size = num_neighbours;
  PENSTOCK_ASSERT(size > 0 && count % size == 0 && peers().size() == 1,
                  concat("[engine::SequenceAxis] groups of ", size, " ranks from ", count));
  const int place = ranks_.index % size, group = ranks_.index / size;
  Members neighbours{{}, place}, ring{{}, group};
  for (int i = 0; i < size; ++i) neighbours.ranks.push_back(ranks_.ranks[group * size + i]);
  for (int i = place; i < count; i += size) ring.ranks.push_back(ranks_.ranks[i]);
  const auto made = [&](const Members& some, const char* lane) {
    if (some.size() == 1) return std::shared_ptr<parallel::Peers>();
    return some.size() == count ? all_ : connect_(some, lane);
  };
  neighbours_ = made(neighbours, "heads");  // all ranks connect in this order
  ring_ = made(ring, "ring");
}

const std::shared_ptr<parallel::Peers>& SequenceAxis::neighbours() const {
  PENSTOCK_ASSERT(neighbours_ != nullptr, "[engine::SequenceAxis] a group has one rank");
  return neighbours_;
}

const std::shared_ptr<parallel::Peers>& SequenceAxis::ring() const {
  PENSTOCK_ASSERT(ring_ != nullptr, "[engine::SequenceAxis] there is one group");
  return ring_;
}

std::vector<parallel::Peers*> SequenceAxis::peers() const {
  std::vector<parallel::Peers*> peers = {all_.get()};
  for (const auto& some : {neighbours_, ring_}) {
    if (some != nullptr && some != all_) peers.push_back(some.get());
  }
  return peers;
}

int SequenceAxis::compare(const std::vector<at::Tensor>& values, const std::string& text) const {
  std::string all = text;
  for (const parallel::Peers* some : peers()) all += concat(" ", some->history());
  return all_->compare(values, all, "").first;
}

std::vector<parallel::Peers*> ModelRanks::peers() {
  std::vector<parallel::Peers*> peers;
  if (sequence) peers = sequence->peers();
  if (tensor) peers.insert(peers.begin(), &tensor->peers());
  return peers;
}

void ModelRanks::set_step(int64_t step) {
  for (parallel::Peers* some : peers()) some->set_step(step);
  if (stages) stages->set_step(step);
}

void ModelRanks::record(const std::shared_ptr<trace::Recorder>& recorder) {
  for (parallel::Peers* some : peers()) some->record(recorder);
  if (stages) stages->record(recorder);
}

void ModelRanks::watch(Watch watch) {
  watch_ = std::move(watch);
  watch_new();
}

void ModelRanks::watch_new() {
  if (!watch_) return;
  const auto along = [this](Axis axis) {
    return [watch = watch_, axis](MoveKind kind, const comm::Label& label, int64_t sent) {
      watch({kind, axis, sent}, label);
    };
  };
  if (tensor) tensor->peers().watch(along(Axis::kTensor));
  if (!sequence) return;
  for (parallel::Peers* some : sequence->peers()) some->watch(along(Axis::kSequence));
}

std::string ModelRanks::cut_short() const {
  return stages && stages->open() ? "a batch of the pipeline was cut short" : "";
}

void ModelRanks::close() {
  for (parallel::Peers* some : peers()) some->close();
  if (stages) stages->close();
}

// autograd passes on only the text of an exception, so Peers keep the exceptions of their
// exchanges.
std::exception_ptr ModelRanks::take_fault() {
  std::exception_ptr fault;
  for (parallel::Peers* some : peers()) {
    const std::exception_ptr other = some->take_fault();
    if (!fault) fault = other;
  }
  return fault;
}

}  // namespace penstock::engine
