#include "src/plan/cost/strategy_comparison.h"

#include <algorithm>
#include <string>
#include <vector>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/plan/cost/strategy_choice.h"
#include "src/plan/strategy.h"

namespace penstock {

namespace {

// Returns the cells of a strategy on this mesh. An axis of one rank has no layout there.
std::vector<Placement> cells_on(const Mesh& mesh, const std::string& strategy) {
  std::vector<Placement> cells;
  const Table table = preset(strategy, {});
  for (int role = 0; role < kNumRoles; ++role) {
    for (int phase = 0; phase < kNumPhases; ++phase) {
      Placement cell = table.at(static_cast<Role>(role), static_cast<Phase>(phase));
      for (const Axis axis : {Axis::kNode, Axis::kLocal}) {
        if (mesh.size(axis) == 1) cell.layout[static_cast<size_t>(axis)] = Layout::kReplicated;
      }
      cells.push_back(cell);
    }
  }
  return cells;
}

// Returns whether two strategies have equal cells and allow the same tiers for parameters.
bool equal_on(const Mesh& mesh, const std::string& a, const std::string& b) {
  return cells_on(mesh, a) == cells_on(mesh, b) && can_rest_away(a) == can_rest_away(b);
}

// A gain below a twentieth is below what the prediction can tell.
std::string codec_text(const Alternative& best, const Alternative& codec) {
  const bool pays = codec.seconds < 0.95 * best.seconds;
  return concat(
      "\"comm.codec\": \"int8\" would take ", seconds_text(codec.seconds), " s/step with ",
      codec.strategy, ", not ", seconds_text(best.seconds), ": it ",
      pays ? "pays here, but rounds gradients and parameters on their way" : "does not pay here",
      "\n");
}

std::string text_of(const PlanReport& report, const PlanQuestion& asked, size_t num_units,
                    int64_t num_params) {
  std::string text = concat(num_params, " parameters in ", num_units, " units, ", asked.world_size,
                            " ranks, ", asked.tokens,
                            " tokens per rank and step; bytes per rank at the peak, without "
                            "activations; each rank has ",
                            asked.room.text(), "\n", choice_text(report.alternatives));
  for (const auto& [name, twin] : report.same) {
    text += concat(name, " is ", twin, " on this mesh\n");
  }
  if (report.codec) text += codec_text(report.alternatives.front(), *report.codec);
  return text;
}

// Returns the best alternative with encoded exchanges.
std::optional<Alternative> with_codec(Question question, const ModelDesc& model) {
  Config& config = question.asked.config;
  const bool has_wires = config.comm.codec != "none" || config.table.contains(kWireRow);
  if (has_wires || mesh_of(config).world() == 1) return {};
  config.comm.codec = "int8";
  const std::vector<Alternative> all = alternatives(question, model);
  if (all.empty() || !all.front().fits) return {};
  return all.front();
}

}  // namespace

const std::vector<std::string>& strategy_names() { return preset_names(); }

PlanReport compare(const PlanQuestion& asked, const ModelDesc& model, int64_t num_params) {
  Question question{asked, {}, false};
  question.asked.config.offload.optimizer = question.asked.config.offload.params = "auto";
  const Mesh mesh = mesh_of(asked.config);
  PlanReport report;
  for (const std::string& name : preset_names()) {
    const auto twin = std::find_if(question.strategies.begin(), question.strategies.end(),
                                   [&](const auto& other) { return equal_on(mesh, name, other); });
    if (twin == question.strategies.end()) {
      question.strategies.push_back(name);
    } else {
      report.same[name] = *twin;
    }
  }
  report.alternatives = alternatives(question, model);
  if (report.alternatives.empty()) throw ConfigError(refusal(question, model));
  if (!report.alternatives.front().fits) {  // "nothing fits" must have tried everything
    open_all(question);
    report.alternatives = alternatives(question, model);
  }
  report.codec = with_codec(question, model);
  report.text = text_of(report, asked, model.units.size(), num_params);
  return report;
}

}  // namespace penstock
