#include "src/plan/cost/mesh_choice.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <set>
#include <tuple>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/plan/check.h"
#include "src/plan/cost/strategy_choice.h"
#include "src/plan/pipeline_plan.h"
#include "src/plan/pipeline_schedule.h"
#include "src/plan/strategy.h"

namespace penstock {

namespace {

constexpr size_t kShown = 10;

std::string fixed(double value, int digits) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.*f", digits, value);
  return text;
}

std::string mesh_of(const MeshAlternative& one) {
  return concat(one.tensor, " x ", one.pipeline, " x ", one.data);
}

int64_t numel(const ModelDesc& model) {
  int64_t sum = 0;
  for (const UnitDesc& unit : model.units) {
    for (const FlatDesc& flat : unit.flats) sum += flat.numel;
  }
  return sum;
}

int num_blocks(const ModelDesc& model) {
  return static_cast<int>(std::count_if(model.units.begin() + 1, model.units.end(),
                                        [](const UnitDesc& unit) { return unit.block; }));
}

Replay replayed(const MeshAlternative& mesh, double forward, double backward, double transfer) {
  const char* const name = mesh.virtual_stages > 1 ? "interleaved" : "1f1b";
  const PipelineShape shape{mesh.pipeline, mesh.virtual_stages, static_cast<int>(mesh.accumulate)};
  return replay(make_schedule(name, shape), forward, backward, transfer);
}

class Chooser {
 public:
  Chooser(const MeshQuestion& question, const ModelDesc& model)
      : question_(question),
        model_(model),
        width_(static_cast<double>(dtype_bytes(precision_of(model)))) {}

  std::vector<MeshAlternative> all() && {
    const int world = question_.nodes * question_.per_node, blocks = num_blocks(model_);
    for (int tensor = 1; tensor <= question_.per_node; ++tensor) {
      if (question_.per_node % tensor != 0 || question_.shape.heads % tensor != 0) continue;
      for (int pipeline = 1; pipeline <= std::max(1, blocks); ++pipeline) {
        if (world / tensor % pipeline != 0) continue;
        MeshAlternative mesh;
        mesh.precision = question_.asked.config.precision.value_or("");
        mesh.tensor = tensor;
        mesh.pipeline = pipeline;
        mesh.data = world / tensor / pipeline;
        mesh.node = nodes_of(mesh);
        for (const int64_t micro : question_.micro) try_micro(mesh, micro);
      }
    }
    const auto rank = [](const MeshAlternative& one) {
      return std::tuple(one.excess, one.seconds, one.state.device + one.activations);
    };
    std::stable_sort(found_.begin(), found_.end(),
                     [&](const auto& a, const auto& b) { return rank(a) < rank(b); });
    return std::move(found_);
  }

 private:
  // The ranks of a stage are neighbours. If they do not fill whole nodes, each rank counts as a
  // node.
  int nodes_of(const MeshAlternative& mesh) const {
    const int ranks = mesh.tensor * mesh.data, node = question_.per_node;
    if (node % ranks == 0) return 1;
    return ranks % node == 0 ? ranks / node : mesh.data;
  }

  void try_micro(MeshAlternative mesh, int64_t micro) {
    const int64_t samples = micro * mesh.data;
    if (question_.batch % samples != 0) return;
    mesh.micro = micro;
    mesh.accumulate = question_.batch / samples;
    if (mesh.accumulate < mesh.pipeline) return;  // the engine refuses it
    for (const bool recompute : {false, true}) {
      if (recompute && num_blocks(model_) == 0) continue;
      mesh.recompute = recompute;
      const StageCost stage = largest_stage(mesh);
      const std::vector<Alternative> states = states_of(mesh, stage);
      for (const int virtual_stages : {1, 2, 4}) {
        if (!interleaves(mesh, virtual_stages)) continue;
        mesh.virtual_stages = virtual_stages;
        for (const Alternative& state : states) add(mesh, stage, state);
      }
    }
  }

  bool interleaves(const MeshAlternative& mesh, int virtual_stages) const {
    if (virtual_stages == 1) return true;
    return mesh.pipeline > 1 && mesh.accumulate % mesh.pipeline == 0 &&
           num_blocks(model_) % (mesh.pipeline * virtual_stages) == 0;
  }

  struct StageCost {
    ModelDesc model;
    int64_t params = 0;
  };

  // Returns the stage with the most parameters. All ranks of the pipeline then take as long as this
  // stage.
  StageCost largest_stage(const MeshAlternative& mesh) const {
    StageCost most;
    for (int rank = 0; rank < mesh.pipeline; ++rank) {
      const bool between = rank > 1 && rank + 1 < mesh.pipeline;
      if (between && num_blocks(model_) % mesh.pipeline == 0)
        continue;  // equal to the previous stage
      ModelDesc own = stage_of(model_, mesh.tensor, mesh.pipeline, rank, mesh.data);
      const int64_t params = numel(own);
      if (params > most.params) most = {std::move(own), params};
    }
    assume_layers(mesh, most.model);
    return most;
  }

  // Layers make their exchanges known only when they run. Here, each layer of a block is assumed to
  // sum the outputs of its attention and of its MLP, and in backward their gradients.
  void assume_layers(const MeshAlternative& mesh, ModelDesc& stage) const {
    const double size = mesh.tensor, blocks = std::max(1, num_blocks(model_));
    const double sums = 2 * static_cast<double>(question_.shape.layers) / blocks;
    const LayerExchange sum{
        MoveKind::kAllReduce, Axis::kTensor,
        static_cast<int64_t>(sums * 2 * (size - 1) / size * boundary_bytes(mesh))};
    for (UnitDesc& unit : stage.units) {
      if (!unit.block || unit.flats.empty()) continue;
      unit.recomputed = mesh.recompute;
      if (mesh.tensor == 1) continue;
      unit.in_forward = {sum};
      unit.in_backward.assign(mesh.recompute ? 2 : 1, sum);
    }
  }

  double tokens(const MeshAlternative& mesh) const {
    return static_cast<double>(mesh.micro * question_.shape.sequence);
  }
  // Returns the bytes of the hidden states of one micro-batch.
  double boundary_bytes(const MeshAlternative& mesh) const {
    return width_ * static_cast<double>(question_.shape.hidden) * tokens(mesh);
  }

  // Each stage is treated as a separate model whose state is sharded over the stage's data ranks.
  std::vector<Alternative> states_of(const MeshAlternative& mesh, const StageCost& stage) const {
    Question question{question_.asked, {"ddp", "zero1", "zero2", "zero3"}, false};
    if (mesh.data == 1) question.strategies = {"ddp"};
    Config& config = question.asked.config;
    config.mesh = {};
    config.mesh.data = mesh.data;
    config.mesh.node = mesh.node;
    config.batch = {};
    config.batch.accumulate = mesh.accumulate;
    question.asked.world_size = mesh.data;
    question.asked.tokens = tokens(mesh) * static_cast<double>(mesh.accumulate);
    question.asked.room = {};
    question.many = true;
    return alternatives(question, stage.model);
  }

  // The passes of a stage take as long as in its own plan. The schedule then shows how long the
  // ranks wait for each other.
  void add(MeshAlternative mesh, const StageCost& stage, const Alternative& state) {
    const Machine& machine = question_.asked.machine;
    mesh.state = state;
    mesh.params = stage.params;
    mesh.again = state.again;
    mesh.sums = state.layers;
    mesh.compute =
        6 * tokens(mesh) * static_cast<double>(mesh.accumulate * stage.params) / machine.flops;
    mesh.data_waits = state.seconds - mesh.compute - mesh.again - mesh.sums;
    std::vector<int> held(1, 1);  // micro-batches held at the peak, by the first and the last rank
    if (mesh.pipeline > 1) {
      const double times = static_cast<double>(mesh.accumulate * mesh.virtual_stages);
      const double forward = state.forward / times, backward = state.backward / times;
      const bool far = mesh.tensor * mesh.data >= question_.per_node;
      const double message =
          boundary_bytes(mesh) / mesh.tensor / (far ? machine.node : machine.local);
      const Replay near = replayed(mesh, forward, backward, 0);
      const Replay made = replayed(mesh, forward, backward, message);
      mesh.bubble = near.makespan - state.forward - state.backward;
      mesh.messages = std::max(0.0, made.makespan - near.makespan);
      held = made.most_held;
    }
    mesh.seconds = state.seconds + mesh.messages + mesh.bubble;
    mesh.activations = activations(mesh, held);
    check_room(mesh);
    found_.push_back(std::move(mesh));
  }

  // Returns the bytes of activations by arXiv:2205.05198, equation 2, without attention scores,
  // which fused kernels do not keep. `held`: stage micro-batches that each pipeline rank holds at
  // its peak.
  int64_t activations(const MeshAlternative& mesh, const std::vector<int>& held) const {
    const TransformerShape& shape = question_.shape;
    const double values = boundary_bytes(mesh);
    const double whole = values * (5 + 12.0 / mesh.tensor);  // per layer
    const double layers = std::ceil(static_cast<double>(shape.layers) / mesh.pipeline);
    const double each = (mesh.recompute ? values : whole) * layers / mesh.virtual_stages;
    const double logits = tokens(mesh) * static_cast<double>(shape.vocabulary) * (2 * width_ + 4);
    const double most = std::max(held.front() * each, held.back() * each + logits);
    return static_cast<int64_t>(most + (mesh.recompute ? whole : 0));
  }

  void check_room(MeshAlternative& mesh) const {
    const Room& room = question_.asked.room;
    const std::tuple<const char*, int64_t, int64_t> limits[] = {
        {"device", mesh.state.device + mesh.activations, room.device},
        {"host", mesh.state.host, room.host},
        {"disk", mesh.state.disk, room.disk},
        {"device and host together", mesh.state.memory + mesh.activations, room.memory}};
    std::vector<std::string> parts;
    for (const auto& [name, needed, allowed] : limits) {
      if (needed <= allowed) continue;
      mesh.excess += needed - allowed;
      parts.push_back(
          concat(name, " ", format_bytes(static_cast<double>(needed - allowed)), " over"));
    }
    mesh.fits = parts.empty();
    mesh.over = join(parts, ", ");
  }

  const MeshQuestion& question_;
  const ModelDesc& model_;
  const double width_;
  std::vector<MeshAlternative> found_;
};

std::string row_of(const MeshAlternative& one) {
  char text[200];
  const std::string schedule = one.pipeline == 1 ? "-" : concat("v=", one.virtual_stages);
  const std::string tiers = concat(one.state.optimizer, "/", one.state.params);
  std::snprintf(text, sizeof(text), "%-14s %-4s %-6s %-10s %-6s %-9s %-11s %-11s %9.4g  %s\n",
                mesh_of(one).c_str(), schedule.c_str(), one.state.strategy.c_str(), tiers.c_str(),
                one.recompute ? "again" : "kept", concat(one.accumulate, " of ", one.micro).c_str(),
                format_bytes(static_cast<double>(one.state.device)).c_str(),
                format_bytes(static_cast<double>(one.activations)).c_str(), one.seconds,
                one.fits ? "yes" : one.over.c_str());
  return text;
}

}  // namespace

std::string MeshAlternative::why() const {
  std::vector<std::string> parts;
  const auto share = [&](const std::string& what, double part) {
    parts.push_back(concat(what, " ", fixed(1e3 * part, 1), " ms"));
  };
  share("computes", compute + again);
  if (tensor > 1) share(concat("tensor ", tensor, ": its sums cost"), sums);
  if (pipeline > 1) {
    const double busy = state.forward + state.backward;
    parts.push_back(
        concat("pipeline ", pipeline, ": bubble ", fixed(100 * bubble / busy, 1), " %"));
    share("messages", messages);
  }
  share(concat("data ", data, ": waits and update"), data_waits);
  return concat(mesh_of(*this), ": ", join(parts, "; "), ", of ", fixed(1e3 * seconds, 1), " ms",
                fits ? "" : concat("; does not fit: ", over));
}

std::string MeshAlternative::config() const {
  std::string text =
      concat("{\"mesh\": {\"tensor\": ", tensor, ", \"pipeline\": ", pipeline, ", \"data\": ", data,
             ", \"node\": ", node, "}, \"strategy\": \"", state.strategy,
             "\", \"batch\": {\"micro\": ", micro, ", \"accumulate\": ", accumulate, "}");
  if (!precision.empty()) text += concat(", \"precision\": \"", precision, "\"");
  if (state.optimizer != "none" || state.params != "none") {
    text += concat(", \"offload\": {\"optimizer\": \"", state.optimizer, "\", \"params\": \"",
                   state.params, "\"}");
  }
  if (recompute) text += ", \"activations\": {\"checkpoint\": \"unit\"}";
  if (virtual_stages > 1) {
    text += concat(", \"parallel\": {\"schedule\": \"interleaved\", \"virtual_stages\": ",
                   virtual_stages, "}");
  }
  return text + "}";
}

ModelDesc stage_of(const ModelDesc& model, int tensor, int pipeline, int rank, int data) {
  ModelDesc staged = model;
  const int blocks = num_blocks(model);
  std::vector<int> stages;
  int block = 0;
  for (size_t unit = 0; unit < model.units.size(); ++unit) {
    const int now = static_cast<int>(int64_t{block} * pipeline / std::max(1, blocks));
    stages.push_back(std::min(now, pipeline - 1));
    if (unit > 0 && model.units[unit].block) ++block;
    for (FlatDesc& flat : staged.units[unit].flats) {
      if (unit == 0 || tensor == 1) continue;
      const int64_t part = (flat.numel + tensor - 1) / tensor;
      flat.numel = (part + data - 1) / data * data;
    }
  }
  for (auto* order : {&staged.forward, &staged.backward}) {
    for (Visit& visit : *order) visit.stage = stages[static_cast<size_t>(visit.unit)];
  }
  for (Visit& visit : staged.forward) {
    if (visit.unit == 0 && visit.mark == Mark::kEnd) visit.stage = pipeline - 1;
  }
  return part(staged, pipeline, rank);
}

std::vector<MeshAlternative> mesh_alternatives(const MeshQuestion& question,
                                               const ModelDesc& model) {
  std::vector<MeshAlternative> all = Chooser(question, model).all();
  if (!all.empty()) return all;
  throw ConfigError(concat("[plan::mesh_alternatives] no mesh of ",
                           question.nodes * question.per_node, " ranks can divide a batch of ",
                           question.batch, " samples. Use a batch that is a multiple of the ranks ",
                           "(--batch), or smaller micro-batches (--micro)"));
}

std::string mesh_text(const MeshQuestion& question, const std::vector<MeshAlternative>& all) {
  std::string text = concat(
      question.nodes, " nodes of ", question.per_node, " ranks; ", question.batch,
      " samples a step of ", question.shape.sequence, " tokens; each rank has ",
      question.asked.room.text(), "\n",
      "mesh: tensor x pipeline x data; state as the engine counts it; activations are an "
      "estimate\n",
      "not tried: hpz, mics, sequence ranks, and any offload other than that of --config\n",
      "mesh           v    state  opt/params acts   micro     state       activations    s/step  "
      "fits\n");
  std::string why;
  std::set<std::string> seen;
  for (size_t i = 0; i < all.size(); ++i) {
    if (i < kShown) text += row_of(all[i]);
    if (seen.size() < kShown && seen.insert(mesh_of(all[i])).second) why += all[i].why() + "\n";
  }
  const char* best = all.front().fits ? "best: " : "nothing fits; the nearest: ";
  return concat(text, "the best of each mesh:\n", why, best, all.front().config(), "\n");
}

}  // namespace penstock
