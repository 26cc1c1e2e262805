"""What stages of a pipeline owe each other, left out or done twice."""

from __future__ import annotations

from planted import Mutation, Pytest, gtest

GRADIENTS, VALUES, WHOLES = (
    "src/exec/gradients.cpp",
    "src/exec/gathered_values.cpp",
    "src/engine/mesh/whole_params.cpp",
)
STAGES, LANES = "src/engine/mesh/stage_split.cpp", "src/engine/mesh/stage_lanes.cpp"
FRONT, WINDOW = (
    "python/penstock/parallel/pipeline_parallel.py",
    "python/penstock/parallel/pipeline_window.py",
)

TRAINS = Pytest(("tests/parity/test_pipeline.py", "-k", "two_stages and zero2"))
HELD_ONCE = Pytest(
    ("tests/parity/test_pipeline.py", "-k", "held_parameters_are_gathered_once and interleaved")
)
LEDGER = Pytest(("tests/parity/test_pipeline.py", "-k", "ledger_plans_windows and zero3"))
MESHES = Pytest(("tests/parity/test_pipeline.py", "-k", "test_trains and zero1"))


def life(story: str) -> Pytest:
    return Pytest(("tests/parity/test_pipeline_life.py", "-k", story))


def state(story: str) -> Pytest:
    return Pytest(("tests/parity/test_pipeline_state.py", "-k", story))


SPLITS = [
    Mutation(
        "the second part adds the gradient of a weight that is used twice once more",
        "src/engine/step/split_backward.cpp",
        "          repeats(group) || !std::all_of(",
        "          !std::all_of(",
        gtest("src/engine/engine_test", "SplitBackward*"),
    ),
    Mutation(
        "a hook on a layer's output runs in both parts of a backward",
        "src/engine/step/split_backward.cpp",
        "  if (!node.tensor_pre_hooks().empty() || !node.retains_grad_hooks().empty() ||",
        "  if (!node.retains_grad_hooks().empty() ||",
        gtest("src/engine/engine_test", "SplitBackward*"),
    ),
    Mutation(
        "an operator that is not torch's own runs in both parts of a backward",
        "src/engine/step/split_backward.cpp",
        '  if (type.find("9generated") == std::string_view::npos) return false;\n',
        "  if (type.empty()) return false;\n",
        gtest("src/engine/engine_test", "SplitBackward*"),
    ),
    Mutation(
        "the part of the inputs moves gradients",
        "src/plan/step_writer.cpp",
        "    const bool settles = mark != Mark::kInputs && (moves_now",
        "    const bool settles = (moves_now",
        gtest("tests/plans/plan_interpreter_test", "PipelineTest.*"),
    ),
    Mutation(
        "the part of the inputs counts as a backward",
        "src/plan/pipeline_plan.cpp",
        "      if (action.is_last()) count(action.stage, 1);",
        "      if (!action.forward) count(action.stage, 1);",
        gtest("tests/plans/plan_interpreter_test", "PipelineTest.*"),
    ),
    Mutation(
        "weights are computed as early as possible",
        "src/plan/pipeline_schedule.cpp",
        "      weights_until(micro + 1 - rank);\n",
        "      weights_until(micro + 1);\n",
        gtest("src/plan/plan_test", "Schedule*"),
    ),
]

OVER_STAGES = [
    *SPLITS,
    Mutation(
        "gradients of tied weights are not added up",
        "src/plan/step_writer.cpp",
        "  for (const Axis axis : kModelAxes) {\n    const bool any",
        "  for (const Axis axis : {Axis::kTensor}) {\n    const bool any",
        TRAINS,
    ),
    Mutation(
        "actions of one stage gather the units of all stages of the rank",
        "src/engine/mesh/stage_window.cpp",
        " && !contains(stages_of_[unit], stage)) continue;\n",
        " && stages_of_[unit].empty()) continue;\n",
        gtest("src/engine/engine_test", "StageWindow*"),
    ),
    Mutation(
        "modules of another stage, which return stand-ins, gather their units",
        "src/engine/mesh/stage_window.cpp",
        "  return contains(stages_of_[static_cast<size_t>(unit)], actions_[begun_ - 1].stage);\n",
        "  return true;\n",
        HELD_ONCE,
    ),
    Mutation(
        "an action runs the plan of the action before it",
        "src/engine/mesh/stage_window.cpp",
        "  return StageTurn{static_cast<int>(begun_) - 1, action.stage, trains_};\n",
        "  return StageTurn{std::max(0, static_cast<int>(begun_) - 2), action.stage, trains_};\n",
        gtest("src/engine/engine_test", "StageWindow*"),
    ),
    Mutation(
        "a stage's gradients are reduced in each backward",
        "src/plan/pipeline_plan.cpp",
        "last.push_back(backwards == 0);",
        "last.push_back(backwards >= 0);",
        gtest("src/plan/plan_test", "Pipeline.*"),
    ),
    Mutation(
        "the norm counts tied weights once a stage",
        "src/place/model_placement.cpp",
        "    return is_sharded(axis) || mesh",
        "    return axis == Axis::kPipeline || is_sharded(axis) || mesh",
        TRAINS,
    ),
    Mutation(
        "weights of another stage are this rank's",
        VALUES,
        "  return own.defined() ? own : values;\n",
        "  return own.defined() ? own : zeros32(flat.numel);\n",
        TRAINS,
    ),
    Mutation(
        "what another stage's parameters are written to stays there",
        WHOLES,
        "    if (!stages && !one.flat->placement.is_sharded()) continue;\n",
        "    if (!one.flat->placement.is_sharded()) continue;\n",
        life("looks_at_weights"),
    ),
    Mutation(
        "edits of another stage's parameters are lost in silence",
        WHOLES,
        "      if (ckpt::checksum(slot.param.detach()) != shown_[&slot].hash) name = slot.name;\n",
        "",
        life("edits_of_another_stage"),
    ),
    Mutation(
        "every stage saves tied weights",
        "src/ckpt/inventory.cpp",
        "  if (!stages.empty() && stages.front() != stage) return {0, 0};"
        "  // that stage writes it\n",
        "  if (stages.size() > 99 && stages.front() != stage) return {0, 0};\n",
        life("checkpoints"),
    ),
    Mutation(
        "a stage begins with an embedding",
        STAGES,
        '    may_begin.push_back(tree.modules[module].type != "Embedding");\n',
        "    may_begin.push_back(true);\n",
        life("t5"),
    ),
    Mutation(
        "what encloses pieces is on one stage",
        STAGES,
        "    if (all) stages.of_param.back() = every;\n",
        "    if (all) stages.of_param.back() = {0};\n",
        gtest("src/engine/engine_test", "Stages*"),
    ),
    Mutation(
        "gradients are not handed back",
        WINDOW,
        "        if action.stage > 0:\n            arrived",
        "        if action.stage > 1:\n            arrived",
        Pytest(("tests/parity/test_pipeline.py", "-k", "two_stages and zero2", "-x")),
    ),
    Mutation(
        "the loss counts on every stage",
        "python/penstock/front/batches.py",
        "self._core.mean(own, bool(losses))",
        "self._core.mean(own)",
        TRAINS,
    ),
    Mutation(
        "what was received is not what the stage begins with",
        FRONT,
        "            leaf = Arrived(value) if wanted else None\n",
        "            leaf = Arrived(torch.zeros_like(value)) if wanted else None\n",
        TRAINS,
    ),
    Mutation(
        "all stages of a rank count as micro-batches",
        "src/engine/step/core_state.cpp",
        "/ config.parallel.virtual_stages;",
        "/ 1.0;",
        MESHES,
    ),
    Mutation(
        "messages are expected in another order",
        LANES,
        "  for (const Action& made : in_rounds(schedule)) {\n",
        "  std::vector<Action> by_stage = in_rounds(schedule);\n"
        "  std::sort(by_stage.begin(), by_stage.end());\n"
        "  for (const Action& made : by_stage) {\n",
        Pytest(("tests/parity/test_pipeline.py", "-k", "trains and zero1 and interleaved")),
    ),
    Mutation(
        "a backward by nothing of this rank's does not count",
        WINDOW,
        "        if action.is_last:\n            self._ranks.end_backward(action)\n",
        "",
        state("frozen and zero1"),
    ),
    Mutation(
        "backwards of frozen stages are none of the window",
        "src/engine/step/accumulation_window.cpp",
        "    const bool kept = at >= gave_anywhere.size() || gave_anywhere[at] != '0';\n",
        "    const bool kept = gave_anywhere.empty() || gave_.find('1') != std::string::npos;\n",
        state("frozen and zero1"),
    ),
    Mutation(
        "the backwards of a micro-batch are counted one by one",
        "src/engine/step/backward_end.cpp",
        "  if (state.window->seen() > state.seen_before) state.window->set_micro(micro);\n",
        "  static_cast<void>(micro);\n",
        Pytest(("tests/parity/test_border_stages.py", "-k", "zero1 and interleaved")),
    ),
    Mutation(
        "buffers come from the first stage",
        LANES,
        "      if (buffer.stage % members_.size() != owner) continue;\n",
        "      if (owner > 0) continue;\n",
        state("buffers_are"),
    ),
    Mutation(
        "close() leaves each stage its own buffers",
        "src/engine/model/restore_model.cpp",
        "  closing.bring_buffers();\n",
        "",
        state("close_brings"),
    ),
    Mutation(
        "a small layer with statistics is on every stage",
        STAGES,
        "(info.keeps || (bytes",
        "((bytes",
        state("close_brings"),
    ),
    Mutation(
        "buffers of the whole model change once a stage",
        FRONT,
        "            self._check_outside(before)\n",
        "            pass\n",
        state("no_stage_has_alone"),
    ),
    Mutation(
        "the memory of a pipeline is predicted section by section",
        "src/engine/watch/report.cpp",
        "entry_of(predict(config, state_->model, false, plan_of));",
        "entry_of(predict(config, state_->model));",
        LEDGER,
    ),
]
