"""Inference that leaves something behind, computes with other values, or waits for other ranks."""

from __future__ import annotations

from planted import Mutation, Pytest

FRONT = "python/penstock/front/inference.py"
GUARD = "python/penstock/front/forward_guard.py"
WINDOW = "python/penstock/parallel/pipeline_window.py"
CACHES = "python/penstock/parallel/stand_in_caches.py"
HELD = "src/engine/model/held_units.cpp"
TESTS = "tests/parity/test_inference.py"
STAGES = "tests/parity/test_inference_stages.py"
RELAYS = Pytest((STAGES, "-k", "test_pipelines_relay and llama"))

INFERENCE = [
    Mutation(
        "the model stays in eval mode",
        FRONT,
        "            set_modes(before)\n",
        "            pass\n",
        Pytest((TESTS, "-k", "goes_on and zero3-resident")),
    ),
    Mutation(
        "edits of gathered parameters are lost without an error",
        FRONT,
        "            values.let_go_of_held(units, True)\n",
        "            values.let_go_of_held(units, False)\n",
        Pytest((TESTS, "-k", "test_error and edits_inside")),
    ),
    Mutation(
        "weights are the engine's own memory",
        FRONT,
        "                    yield name, param.detach().to(dtype or param.dtype, copy=True)\n",
        "                    yield name, param.detach().to(dtype or param.dtype)\n",
        Pytest((TESTS, "-k", "test_weights and ddp-None")),
    ),
    Mutation(
        "buffers of other stages are old",
        FRONT,
        "        self._pipeline.bring_buffers()\n",
        "",
        Pytest((TESTS, "-k", "have_the_buffers_of_all_stages")),
    ),
    Mutation(
        "ranks whose parameters are whole wait for each other in generate()",
        GUARD,
        "        if self._pace.uneven or self._pace.resident:\n",
        "        if self._pace.uneven:\n",
        Pytest((TESTS, "-k", "run_no_dummies")),
    ),
    Mutation(
        "a rank with little memory is filled",
        HELD,
        '"room for inference", bytes <= room / 5 * 4 ? "1" : "0");\n',
        '"room for inference", "1");\n',
        Pytest((TESTS, "-k", "streams_what_is_too_large")),
    ),
    Mutation(
        "parameters stay frozen after the engine",
        HELD,
        "  for (const at::Tensor& param : trained_) param.set_requires_grad(true);\n",
        "",
        Pytest((TESTS, "-k", "test_only_runs and alone")),
    ),
    Mutation(
        "later stages do not count the tokens in a cache",
        CACHES,
        "        caches_in(objects)[self.owner].update(zeros, zeros, self.layer)\n",
        "        pass\n",
        RELAYS,
    ),
    Mutation(
        "shapes of later stages do not count earlier tokens",
        CACHES,
        "        earlier = 0 if held is None or held.ndim < 2 else held.shape[-2]\n",
        "        earlier = 0\n",
        RELAYS,
    ),
    Mutation(
        "every forward of a pipeline draws the same random numbers",
        WINDOW,
        '{engine.data_rank} forward {seen}"\n',
        '{engine.data_rank} forward"\n',
        Pytest((STAGES, "-k", "draw_other_numbers")),
    ),
]
