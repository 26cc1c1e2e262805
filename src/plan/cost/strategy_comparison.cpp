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

// The prediction is not accurate enough to show a gain below a twentieth.
std::string codecs_text(const PlanReport& report) {
  if (report.codecs.empty()) return "";
  const double plain = report.alternatives.front().seconds;
  std::string text;
  for (const CodecAlternative& one : report.codecs) {
    const bool mixed = one.average != one.best.seconds;
    text += concat("\"comm.codec\": \"", one.codec, "\" would take ",
                   seconds_text(one.best.seconds), " s/step with ", one.best.strategy,
                   mixed ? concat(" (", seconds_text(one.average),
                                  " on average, if 15% of all steps are exact)")
                         : "",
                   one.average < 0.95 * plain ? ": it pays here\n" : ": it does not pay here\n");
  }
  return concat(text, "without a codec: ", seconds_text(plain),
                " s/step. A codec rounds gradients and parameters on their way "
                "(docs/tables.md#wires)\n");
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
  return text + codecs_text(report);
}

// Returns the best alternative with each codec. `plain`: seconds of an exact step.
std::vector<CodecAlternative> with_codecs(Question question, const ModelDesc& model, double plain) {
  constexpr double kExact = 0.15;  // of all steps, usual for signs (docs/tables.md)
  Config& config = question.asked.config;
  const bool has_wires = config.comm.codec != "none" || config.table.contains(kWireRow);
  std::vector<CodecAlternative> found;
  if (has_wires || mesh_of(config).world() == 1) return found;
  // "fp8" sends as many bytes as "int8".
  for (const char* const codec : {"int8", "zero++", "1bit"}) {
    const bool signs = std::string(codec) == "1bit";
    config.comm.codec = codec;
    config.comm.exact_first = signs ? 1 : 0;  // Adam refuses signs without any
    const std::vector<Alternative> all = alternatives(question, model);
    if (all.empty() || !all.front().fits) continue;
    const double exact = signs ? kExact : 0;
    found.push_back({codec, all.front(), exact * plain + (1 - exact) * all.front().seconds});
  }
  return found;
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
  report.codecs = with_codecs(question, model, report.alternatives.front().seconds);
  report.text = text_of(report, asked, model.units.size(), num_params);
  return report;
}

}  // namespace penstock
