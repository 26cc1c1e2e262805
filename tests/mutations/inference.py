"""Inference that leaves something behind, computes with other values, or waits for other ranks."""

from __future__ import annotations

from planted import Mutation, Pytest, gtest

SLICES = "python/penstock/front/row_slices.py"
FRONT = "python/penstock/front/inference.py"
GUARD = "python/penstock/front/forward_guard.py"
WINDOW = "python/penstock/parallel/pipeline_window.py"
CACHES = "python/penstock/parallel/stand_in_caches.py"
HELD = "src/engine/model/held_units.cpp"
CORE = "src/engine/step/core.cpp"
DISK = "src/mem/disk_tier.cpp"
PARAMS = "tests/parity/test_inference_params.py"
FILES = "tests/parity/test_rest_in_files.py"
QUANTIZED = "tests/parity/test_quantized.py"
KEPT = "tests/parity/test_kept.py"
TESTS = "tests/parity/test_inference.py"
TOKENS = gtest("src/activations/activations_test", "*LayerCaches*")
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
        '            values.let_go_of_held(units, "")\n',
        '            values.abandon_held(units, "")\n',
        Pytest((TESTS, "-k", "test_error and edits_inside")),
    ),
    Mutation(
        "weights of two versions are given without an error",
        FRONT,
        "        values.begin_pass()\n",
        "",
        Pytest(("tests/parity/test_inference_ends.py", "-k", "one_version and zero3 and step")),
    ),
    Mutation(
        "an error inside inference() is not told to other ranks",
        FRONT,
        '            values.let_go_of_held(units, f"inference() was left with {told}")\n',
        '            values.let_go_of_held(units, "")\n',
        Pytest(("tests/parity/test_inference_ends.py", "-k", "error_on_one_rank and zero3")),
    ),
    Mutation(
        "slices of a batch whose rows depend on each other are not refused",
        SLICES,
        '                self._refuse("its rows depend on each other")\n',
        "                pass\n",
        Pytest(("tests/parity/test_row_slices.py", "-k", "other_models and tokens")),
    ),
    Mutation(
        "slices of a batch lose the cache of all but the last rows",
        SLICES,
        "        self._fields[key][self._begin : self._end] = value\n",
        "        self._fields[key][:] = value[:1]\n",
        Pytest(("tests/parity/test_row_slices.py", "-k", "linear or whole_batch")),
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
        "self._pace.uneven = self._core.needs_unit_events and not self._pace.resident",
        "self._pace.uneven = self._core.needs_unit_events",
        Pytest((TESTS, "-k", "run_no_dummies")),
    ),
    Mutation(
        "a rank with little memory is filled",
        HELD,
        '"room for inference", bytes <= room / 5 * 4 ? "1" : "0");\n',
        '"room for inference", bytes <= room * 5 ? "1" : "1");\n',
        Pytest((TESTS, "-k", "streams_what_is_too_large")),
    ),
    Mutation(
        "parameters stay frozen after the engine",
        HELD,
        "FrozenParams::~FrozenParams() { set_requires_grad(true); }\n",
        "FrozenParams::~FrozenParams() {}\n",
        Pytest((TESTS, "-k", "test_only_runs and alone")),
    ),
    Mutation(
        "torch copies weights for each row of a batch",
        CORE,
        "  if (state_->frozen) state_->frozen->set_requires_grad(!grad_enabled);\n",
        "",
        Pytest((PARAMS, "-k", "same_products")),
    ),
    Mutation(
        "parameters of an engine for inference train after a forward that failed",
        CORE,
        "frozen->set_requires_grad(false);\n  state_->forward_failed(error);\n",
        "frozen;\n  state_->forward_failed(error);\n",
        Pytest((PARAMS, "-k", "test_flags")),
    ),
    Mutation(
        "a file is read after it was changed",
        DISK,
        "  for (const FilePart& part : *parts) part.check();",
        "  ",
        Pytest((FILES, "-k", "changed_file")),
    ),
    Mutation(
        "the bytes between the parts of files are those of earlier units",
        DISK,
        "    std::memset(data + (filled - begin), 0, static_cast<size_t>(first - filled));\n",
        "",
        gtest("src/mem/mem_test", "*UsersFile*"),
    ),
    Mutation(
        "an edited parameter is written over the file's extent",
        "src/mem/disk_traffic.cpp",
        "  if (Disk::is_read_only(buffer.offset)) buffer.offset = buffer.writable;\n",
        "",
        Pytest((FILES, "-k", "edits_leave")),
    ),
    Mutation(
        "a rank reads another rank's part of a file",
        "src/exec/rank.cpp",
        "    own.back().offset += first - part.at;\n",
        "",
        Pytest((FILES, "-k", "runs_from_the_files and zero3")),
    ),
    Mutation(
        "values of another dtype are taken as they are in the file",
        "src/engine/model/adoption.cpp",
        "from.dtype != device::scalar_type(flat.dtype) || is_tile(slot, tree)",
        "is_tile(slot, tree)",
        Pytest((FILES, "-k", "cannot_stay and dtype")),
    ),
    Mutation(
        "an edit of a quantized parameter is lost",
        "src/exec/gathered_values.cpp",
        "device::recode(buffer.data(), buffer.dtype, values32, Dtype::kFp32, buffer.numel);\n",
        "",
        Pytest((QUANTIZED, "-k", "edits_are_rounded")),
    ),
    Mutation(
        "a checkpoint keeps rounded values without an error",
        "src/ckpt/save.cpp",
        "  if (holding.flat->quantized) {\n",
        "  if (false) {\n",
        Pytest((QUANTIZED, "-k", "edits_are_rounded")),
    ),
    Mutation(
        "norms and heads are rounded, too",
        "src/engine/model/blueprint.cpp",
        "  if (names.empty()) return spec.block && info.param.dim() >= 2;\n",
        "  if (names.empty()) return spec.block || !spec.block;\n",
        Pytest((QUANTIZED, "-k", "computes_with and alone-int8")),
    ),
    Mutation(
        "quantized parameters count as if they were not",
        "src/plan/cost/state_bytes.h",
        "    return table_.dtype_in(place, flat.dtype, flat.quantized);\n",
        "    return table_.dtype_in(place, flat.dtype);\n",
        Pytest((QUANTIZED, "-k", "computes_with and alone-int8")),
    ),
    Mutation(
        "kept units have the values from before a load",
        "src/engine/step/driver.cpp",
        "    if (replaces && kept_[unit] && held_[unit] == 0)\n",
        "    if (replaces && !kept_[unit])\n",
        Pytest((KEPT, "-k", "have_the_new_values and state")),
    ),
    Mutation(
        "kept units are read again in each forward",
        "src/plan/step_writer.cpp",
        "  if (model_.units[unit].kept) return;\n",
        "",
        Pytest((KEPT, "-k", "uses_first and alone")),
    ),
    Mutation(
        "a state_dict lacks an edit of a kept unit",
        "src/engine/step/outside_edits.cpp",
        '    refuse_edit(touched(executor_.units()[unit]), "between forwards");\n',
        "",
        Pytest((KEPT, "-k", "in_place")),
    ),
    Mutation(
        "cached tokens that move are those of the forward before",
        "src/activations/layer_caches.cpp",
        "  put(tokens_, made);\n",
        "",
        TOKENS,
    ),
    Mutation(
        "sequences of a cache are not selected on disk",
        "src/activations/layer_caches.cpp",
        "    split(chunk(side, at).index_select(0, chosen));\n",
        "    split(chunk(side, at));\n",
        TOKENS,
    ),
    Mutation(
        "memory of a transfer in flight is used again",
        "src/activations/shelf.cpp",
        "  if (!wanted_) return;\n  arrive();\n",
        "  if (!wanted_) return;\n",
        TOKENS,
    ),
    Mutation(
        "a window keeps the tokens that it has passed",
        "src/activations/layer_caches.cpp",
        "  if (needed <= side.first) return;\n",
        "  if (needed >= 0) return;\n",
        TOKENS,
    ),
    Mutation(
        "cached tokens stay where the model computes",
        "python/penstock/front/token_caches.py",
        "                cache.layers[index] = moved_layer.moved(layer, self._caches)\n",
        "                pass\n",
        Pytest(("tests/parity/test_token_caches.py", "-k", "ways_to_use and host-1")),
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
        "            earlier = 0 if held.ndim < 2 else held.shape[-2]\n",
        "            earlier = 0\n",
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
