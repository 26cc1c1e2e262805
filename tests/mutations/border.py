"""Bugs at the border with users' code: what ranks agree on, and what they look at."""

from __future__ import annotations

from planted import Mutation, Program, Pytest

RANKS = "tests/parity/test_border_ranks.py"
WINDOWS = "tests/parity/test_border_windows.py"
WAITS = "tests/parity/test_border_waits.py"
MICRO_STEPS = Pytest((WINDOWS, "-k", "micro_steps and zero2"))
LATE = Pytest((WINDOWS, "-k", "late_on_one_rank and zero2-1-False"))
AGREEMENT = "src/engine/step/window_agreement.cpp"

AT_THE_BORDER = [
    Mutation(
        "a backward that gave nothing on this rank is none of the window",
        AGREEMENT,
        "anywhere[i] = std::max(anywhere[i], all[rank][i]);",
        "anywhere[i] = std::min(anywhere[i], all[rank][i]);",
        MICRO_STEPS,
    ),
    Mutation(
        "a backward that gave nothing anywhere closes a window",
        AGREEMENT,
        "const bool shorter = window.keep(anywhere.substr(0, backwards));",
        "const bool shorter = false;",
        MICRO_STEPS,
    ),
    Mutation(
        "late gradients are moved by the rank alone that has them",
        AGREEMENT,
        "late.push_back(anywhere[i] == '1');",
        "late.push_back(driver.late()[i - backwards]);",
        LATE,
    ),
    Mutation(
        "options may differ by rank",
        AGREEMENT,
        "if (all[rank].substr(options) != all.front().substr(options)) {",
        "if (all.empty()) {",
        Pytest((RANKS, "-k", "another_lr and zero2")),
    ),
    Mutation(
        "edits that torch does not count are lost",
        "src/engine/step/outside_edits.cpp",
        "  return executor_.values().edited(index);",
        '  return "";',
        Pytest((RANKS, "-k", "one_element_is_edited")),
    ),
    Mutation(
        "an optimizer of your own loses the attributes of parameters",
        "python/penstock/front/optimizer.py",
        "            vars(master).update(vars(param))",
        "            vars(master).update({})",
        Pytest((RANKS, "-k", "reads_attributes and zero2")),
    ),
    Mutation(
        "a count in a shard of one element is saved as a value per element",
        "python/penstock/front/optimizer.py",
        "(master.numel() != 1 or key in known)",
        "master.numel() != 1",
        Pytest(("tests/python/test_checkpoint_edges.py", "-k", "one_element and zero1-1")),
    ),
    Mutation(
        "a view that is taken in GatheredParameters loses its values",
        "python/penstock/as_deepspeed/deepspeed/runtime/zero/partition_parameters.py",
        "            _keep_views(engine, own)\n",
        "",
        Pytest(("tests/drop_in/test_gathered_views.py", "-k", "written_values")),
    ),
    Mutation(
        "a parameter that one rank uses counts as unused",
        "python/penstock/as_deepspeed/deepspeed/runtime/zero/unused_parameters.py",
        "    used = _on_any_rank([one.grad is not None for _, one in params])\n",
        "    used = [one.grad is not None for _, one in params]\n",
        Pytest(("tests/drop_in/test_config_effects.py", "-k", "test_unused_parameters")),
    ),
    Mutation(
        "a method of an optimizer that reads gradients runs without them",
        "python/penstock/front/optimizer_methods.py",
        "            param.grad = gradient\n",
        "            param.grad = None\n",
        Pytest(("tests/parity/test_optimizers_outside_step.py", "-k", "SAM and zero1-fp32")),
    ),
    Mutation(
        "a cache that grew is there twice when a unit runs again",
        "python/penstock/front/recompute.py",
        "with buffers.as_before(), objects.as_before(), fields",
        "with buffers.as_before(), fields",
        Pytest(("tests/parity/test_objects.py", "-k", "an_object_that_blocks_change")),
    ),
    Mutation(
        "a counter of a block counts on when the block runs again",
        "python/penstock/front/recompute.py",
        ", fields.as_before(), states",
        ", states",
        Pytest(("tests/parity/test_recomputed_state.py", "-k", "counter")),
    ),
    Mutation(
        "a block that runs again draws other numbers",
        "python/penstock/front/recompute.py",
        ", states.as_before():",
        ":",
        Pytest(("tests/parity/test_recomputed_state.py", "-k", "random")),
    ),
    Mutation(
        "a copy by __dict__ runs the original",
        "python/penstock/front/forward_guard.py",
        "        if caller is self._module or not self._is_copied_to(caller):",
        "        if True:",
        Pytest(("tests/parity/test_overrides.py", "-k", "copied and other and zero1")),
    ),
    Mutation(
        "a change of the model's class is not seen",
        "python/penstock/front/forward_guard.py",
        "        for kind in type(module).__mro__:",
        "        for kind in type(module).__mro__[1:]:",
        Pytest(("tests/parity/test_overrides.py", "-k", "the-model-s-class and zero1")),
    ),
    Mutation(
        "another thread's forward enters a backward",
        "src/engine/step/core_state.cpp",
        "  const std::shared_ptr<void> running = calling.enter_backward();",
        "  const std::shared_ptr<void> running;",
        Pytest(("tests/parity/test_engine_threads.py", "-k", "zero1-backward-forward")),
    ),
    Mutation(
        "a plain backward of the drop-in is not weighted",
        "python/penstock/as_deepspeed/deepspeed/runtime/backward_weights.py",
        "weight = divided_by / self.gradient_accumulation_steps()",
        "weight = divided_by / divided_by",
        Pytest(("tests/drop_in/test_plain_backward.py", "-k", "loss-alone")),
    ),
    Mutation(
        "another engine's parameters are weighted twice",
        "python/penstock/as_deepspeed/deepspeed/runtime/engine.py",
        "one._weigh(divided_by, self.native.loss_scale)",
        "one._weigh(1.0, self.native.loss_scale)",
        Pytest(("tests/drop_in/test_plain_backward.py", "-k", "mutual-by-the-engine")),
    ),
    Mutation(
        "the C++ front takes a key that only Python reads",
        "src/engine/front/config_keys.cpp",
        '{"/parallel/norms", kPython},',
        '{"/parallel/norms", nullptr},',
        Program("src/engine/engine_test", ("--gtest_filter=ConfigKeys.*",)),
    ),
    Mutation(
        "the timeout of torch's group is not the engine's",
        "python/penstock/front/ranks.py",
        'return {**values, "comm": {**(comm or {}), "timeout_s": default_timeout_s()}}',
        "return values",
        Pytest(("tests/python/test_group_timeout.py",)),
    ),
    Mutation(
        "an empty list of slots means every slot",
        "python/penstock/launch/hostfile.py",
        "    if not listed:\n        raise ValueError(",
        "    if not listed:\n        return list(range(host.slots))\n        raise ValueError(",
        Pytest(("tests/python/test_launch_fuzz.py",)),
    ),
    Mutation(
        "masters keep the rounded values of a loaded state",
        "src/exec/gathered_values.cpp",
        "at::where(seen.eq(rounded(loaded)), loaded, kept)",
        "at::where(seen.eq(rounded(loaded)), kept, kept)",
        Pytest(("tests/python/test_loaded_masters.py",)),
    ),
    Mutation(
        "an edit on one rank is not compared",
        "src/exec/replica_edits.cpp",
        "  if (counted || sampled) compare(suspects(counted, sampled));\n",
        "",
        Pytest(("tests/parity/test_border_alone.py",)),
    ),
    Mutation(
        "no rank asks whether it waits in vain",
        "src/comm/store_group.cpp",
        "    roll_call_->ask(lane.peer, mine.text());\n",
        "",
        Pytest((WAITS, "-k", "uneven and shm-step-0")),
    ),
    Mutation(
        "an error on one rank is no reason",
        "src/base/turns.cpp",
        "    if (!left || waits || !follows) continue;\n",
        "    if (left || waits || follows) continue;\n",
        Pytest((WAITS, "-k", "raised and argument-zero1")),
    ),
    Mutation(
        "an error that all ranks caught is a reason",
        "src/base/turns.cpp",
        "const bool left = number + 1 == end && theirs->raised.empty() && !ours->raised.empty();",
        "const bool left = number + 1 == end && !ours->raised.empty();",
        Program("src/base/base_test", ("--gtest_filter=Turns.*",)),
    ),
    Mutation(
        "hooks on the node of a weight in tiles are not seen",
        "python/penstock/front/tiling.py",
        "        if hooks:\n            return True\n",
        "",
        Pytest(("tests/parity/test_border_tiles.py", "-k", "hooked and node-tokens")),
    ),
    Mutation(
        "a user's zero_grad() is replaced",
        "python/penstock/front/optimizer_methods.py",
        'n == "zero_grad" or not (',
        "not (",
        Pytest(("tests/parity/test_border_zero_grad.py", "-k", "overridden and ddp-Counts")),
    ),
    Mutation(
        "a rank that cannot begin tells nobody",
        "python/penstock/front/engine_calls.py",
        "                ranks.refuse(error, _mesh_of_nodes(*args[1:2], **kwargs))\n",
        "                pass\n",
        Pytest((WAITS, "-k", "begins and model")),
    ),
]
