"""The engine's calls and settings: loss scales, sums, refusals, timers and profiles."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import itertools
import math
from typing import Any

import pipe_models as pipes
import pytest
import torch
import torch.distributed as dist
from raised import raised as error_of
from ranks import Failure
from torch.utils.checkpoint import checkpoint

WORLD = 2


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))


def engine_of(stage: int, config: dict[str, Any] | None = None, **given: Any) -> Any:
    model = net()
    base = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    if "optimizer" in given:
        del base["optimizer"]
    merged = base | (config or {})
    return pipes.deepspeed().initialize(
        model=model, model_parameters=list(model.parameters()), config=merged, **given
    )[0]


def loss_of(engine: Any, step: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return engine(torch.randn(2, 4, generator=generator).to(dtype)).float().square().mean()


# ---- the loss scale

# Stage, which steps overflow ("x"), keys of fp16.
SCALES = [
    (1, "........x......", {"loss_scale_window": 3}),
    (2, ".xx.x..x.xx....", {"loss_scale_window": 2}),
    (3, "xx.xxx....xxxx.", {"loss_scale_window": 3, "hysteresis": 3}),
    (1, "x.x.xx.xx.x....", {"loss_scale_window": 4, "consecutive_hysteresis": True}),
    (2, "x..x..xx..", {"loss_scale_window": 1, "hysteresis": 1}),
    (2, ".xxx..", {"hysteresis": 1, "min_loss_scale": 16}),
    (3, "xx.xx", {"hysteresis": 2, "min_loss_scale": 64}),
    (0, ".xxxxxxx.....", {"loss_scale_window": 2, "min_loss_scale": 4, "hysteresis": 5}),
    (1, "x.x", {"loss_scale": 128}),
]


def expected_scales(stage: int, overflows: str, keys: dict[str, Any]) -> list[Any]:
    """DeepSpeed's rule: a scale doubles if a multiple of the window has passed since the step after
    the last overflow; at stage 0 there is neither hysteresis nor an error at the minimum."""
    scale, left = float(keys.get("loss_scale", 64)), keys.get("hysteresis", 2)
    if keys.get("loss_scale"):
        return [scale] * len(overflows)
    window, least = keys.get("loss_scale_window", 1000), keys.get("min_loss_scale", 1)
    last, found = -1, []
    for step, kind in enumerate(overflows):
        passed = step - last - 1
        if kind == "x":
            last = step
            if stage == 0 or left == 1:
                if stage and scale == least:
                    return [*found, "raised"]
                scale = max(scale / 2, least)
            else:
                left -= 1
        else:
            grows = passed > 0 and passed % window == 0
            if grows:
                scale *= 2
            if grows or keys.get("consecutive_hysteresis"):
                left = keys.get("hysteresis", 2)
        found.append(scale)
    return found


def scaled(stage: int, overflows: str, keys: dict[str, Any]) -> dict[str, Any]:
    fp16 = {"enabled": True, "initial_scale_power": 6, **keys}
    engine = engine_of(stage, {"fp16": fp16})
    view, scales, norms = engine.optimizer.loss_scaler, [], []
    for step, kind in enumerate(overflows):
        loss = loss_of(engine, step, torch.float16)
        engine.backward(loss * math.inf if kind == "x" and dist.get_rank() == 1 else loss)
        try:
            engine.step()
        except RuntimeError:
            scales.append("raised")
            break
        scales.append(view.cur_scale)
        norms.append(math.isinf(engine.get_global_grad_norm()))
    found = {"scales": scales, "norms": norms, "skipped": engine.skipped_steps}
    found["view"] = [view.dynamic, view.cur_iter, view.scale_window, view.delayed_shift]
    assert engine.optimizer._get_loss_scale() == view.loss_scale == engine.cur_scale
    engine.destroy()
    return found


@pytest.mark.parametrize(("stage", "overflows", "keys"), SCALES)
def test_the_scale_follows_deepspeed(stage, overflows, keys, drop_in_pools):
    found = drop_in_pools(WORLD).run(scaled, stage, overflows, keys)
    scales = expected_scales(stage, overflows, keys)
    steps = len(scales) - scales.count("raised")
    for one in found:
        assert one["scales"] == scales
        assert one["norms"] == [kind == "x" for kind in overflows[:steps]]
        assert one["skipped"] == overflows[:steps].count("x")
        dynamic = "loss_scale" not in keys
        window = keys.get("loss_scale_window", 1000) if dynamic else None
        shift = keys.get("hysteresis", 2) if dynamic and stage else 1
        assert one["view"] == [dynamic, steps, window, shift]


def given_by_hand(precision: str) -> tuple[float, list[float], int]:
    """`.grad` set at stage 0, beside plain torch: the difference, loss scales, skipped steps."""
    fp16 = {"enabled": precision == "fp16", "initial_scale_power": 4}
    engine, plain = engine_of(0, {"fp16": fp16}), net()
    sgd, scales = torch.optim.SGD(plain.parameters(), lr=0.1), []
    for value in (0.25, -1.0, math.nan, 2.0):
        scale = engine.native.loss_scale
        for ours, theirs in zip(engine.module.parameters(), plain.parameters(), strict=True):
            ours.grad = torch.full_like(ours, value * scale)
            theirs.grad = torch.full_like(theirs, value)
        engine.step()
        if not math.isnan(value):
            sgd.step()
        scales.append(engine.native.loss_scale)
    engine.backward(loss_of(engine, 0, torch.float16 if precision == "fp16" else torch.float32))
    engine.destroy()
    pairs = zip(engine.module.parameters(), plain.parameters(), strict=True)
    off = max((one.float() - other).abs().max().item() for one, other in pairs)
    return off, scales, engine.skipped_steps


def test_gradients_set_by_hand_at_stage_0(drop_in_pools):
    for precision, limit, left in (("fp32", 1e-6, 1.0), ("fp16", 1e-3, 16.0)):
        for off, scales, skipped in drop_in_pools(WORLD).run(given_by_hand, precision):
            assert off < limit and skipped == 1
            assert scales == [left, left, max(left / 2, 1.0), max(left / 2, 1.0)]


def plainly_scaled(scale: float) -> str:
    """A plain loss.backward() in fp16: its weights against those of engine.backward()."""
    weights = []
    for plain in (True, False):
        engine = engine_of(2, {"fp16": {"enabled": True, "loss_scale": scale}})
        for step in range(3):
            loss = loss_of(engine, step, torch.float16)
            try:
                loss.backward() if plain else engine.backward(loss)
            except RuntimeError as error:
                engine.destroy()
                return str(error)
            engine.step()
        engine.destroy()
        weights.append(torch.cat([p.detach().flatten() for p in engine.module.parameters()]))
    return "equal" if torch.equal(*weights) else "different"


def test_a_plain_backward_needs_a_scale_of_one(drop_in_pools):
    assert drop_in_pools(WORLD).run(plainly_scaled, 1) == ["equal"] * WORLD
    for scale in (0, 2):
        for said in drop_in_pools(WORLD).run(plainly_scaled, scale):
            assert "Loss scaling is required" in said and "the loss is not scaled" in said


# ---- gradients


def summed(stage: int, op: str, plain: bool, accumulate: int) -> list[float]:
    """Weights after three steps; the mean is trained with the rate times the number of ranks."""
    rate = 0.02 * (dist.get_world_size() if op == "mean" else 1)
    config = {
        "gradient_allreduce_op": op,
        "gradient_accumulation_steps": accumulate,
        "optimizer": {"type": "SGD", "params": {"lr": rate}},
    }
    engine = engine_of(stage, config)
    for step in range(3 * accumulate):
        loss = loss_of(engine, step)
        loss.backward() if plain else engine.backward(loss)
        engine.step()
    engine.destroy()
    return [value for p in engine.module.parameters() for value in p.detach().flatten().tolist()]


@pytest.mark.parametrize(("stage", "plain", "accumulate"), [(0, False, 2), (1, True, 2), (2, 0, 1)])
def test_gradients_are_summed(stage, plain, accumulate, drop_in_pools):
    sums, means = (
        drop_in_pools(WORLD).run(summed, stage, op, plain, accumulate) for op in ("sum", "mean")
    )
    assert sums[0] == sums[1]
    assert sums[0] == pytest.approx(means[0], abs=1e-6)


# ---- refusals


def raised(call: Any) -> tuple[str, list[str]]:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the error is the result
        return str(error), [one.__name__ for one in type(error).__mro__]
    return "", []


def refused(name: str) -> tuple[str, list[str]]:
    model = net()
    own = torch.optim.RMSprop(model.parameters())
    rates = torch.optim.lr_scheduler.LambdaLR(own, lambda step: 1.0)
    host = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    if name == "no optimizer":
        engine = engine_of(1, {"optimizer": {}})
        loss = loss_of(engine)
        found = raised(engine.step) if dist.get_rank() else raised(lambda: engine.backward(loss))
        assert engine.get_lr() == engine.get_mom() == []
        engine.destroy()
        return found
    if name == "taken optimizer":
        first = engine_of(1)
        found = raised(lambda: engine_of(1, optimizer=first.optimizer))
        first.destroy()
        return found
    calls: dict[str, Any] = {
        "no model": lambda: pipes.deepspeed().initialize(model=None, config={}),
        "no config": lambda: pipes.deepspeed().initialize(model=model),
        "scheduler alone": lambda: engine_of(1, lr_scheduler=rates),
        "untested": lambda: engine_of(1, {"zero_allow_untested_optimizer": False}, optimizer=own),
        "untested by name": lambda: engine_of(1, {"zero_allow_untested_optimizer": False}),
        "not for a cpu": lambda: engine_of(
            1,
            {"zero_force_ds_cpu_optimizer": True, "zero_optimization": host},
            optimizer=torch.optim.Adam(model.parameters()),
        ),
        "another sum": lambda: engine_of(0, {"data_types": {"grad_accum_dtype": "bf16"}}),
        "sum at stage 3": lambda: engine_of(3, {"gradient_allreduce_op": "sum"}),
        "another dtype": lambda: engine_of(1, {"data_types": {"param_dtype": "bf16"}}),
    }
    return raised(calls[name])


REFUSED = {
    "no optimizer": "without an optimizer",
    "taken optimizer": "belongs to another engine",
    "no model": "not an nn.Module",
    "no config": "no config",
    "scheduler alone": "a scheduler object needs the optimizer object",
    "untested": "RMSprop is not an optimizer that DeepSpeed tested",
    "untested by name": "SGD is not an optimizer that DeepSpeed tested",
    "not for a cpu": "pass a DeepSpeedCPUAdam",
    "another sum": "allowed at stage 0: fp32",
    "sum at stage 3": "not supported with ZeRO stage 3",
    "another dtype": 'allowed: "fp32"',
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_deepspeed_refuses(name, drop_in_pools):
    of_parser = name in ("sum at stage 3", "another dtype")
    for said, kinds in drop_in_pools(WORLD).run(refused, name):
        assert REFUSED[name] in said
        assert "ConfigError" in kinds and "ValueError" in kinds
        assert of_parser or "AssertionError" in kinds


# ---- what is printed


def printed(config: dict[str, Any], steps: int) -> list[Any]:
    with contextlib.redirect_stdout(io.StringIO()) as heard:
        engine = engine_of(2, {"gradient_accumulation_steps": 2, **config})
        for step in range(steps):
            engine.backward(loss_of(engine, step))
            engine.step()
    found = [heard.getvalue(), engine.get_wall_clock_timers()]
    found.append(
        engine.flops_profiler and [engine.flops_profiler.flops, engine.flops_profiler.params]
    )
    engine.destroy()
    return found


MICRO = "fwd_microstep bwd_microstep bwd_inner_microstep bwd_allreduce_microstep step_microstep"
WINDOW = "fwd bwd bwd_inner bwd_allreduce step"


def names_in(line: str) -> str:
    assert line.startswith("[Rank 0] time (ms) | ")
    return " ".join(part.partition(":")[0] for part in line.split(" | ")[1:])


def test_times_are_printed(drop_in_pools):
    (first, times, _), (other, _, _) = drop_in_pools(WORLD).run(
        printed, {"wall_clock_breakdown": True}, 4
    )
    assert other == ""
    assert [names_in(line) for line in first.splitlines()] == [MICRO, MICRO, WINDOW] * 2
    assert set(times) == {*MICRO.split(), *WINDOW.split()}
    assert times["fwd"] > 0 and times["bwd_allreduce"] == 0


def test_nothing_is_printed_without_a_key(drop_in_pools):
    assert drop_in_pools(WORLD).run(printed, {}, 4) == [["", {}, None]] * WORLD


def timed(names: list[str]) -> tuple[str, dict[str, Any]]:
    """What log() prints on this rank, and what is left of the timers."""
    pipes.deepspeed()
    from deepspeed.utils.timer import SynchronizedWallClockTimer  # noqa: PLC0415

    timers = SynchronizedWallClockTimer()
    for _ in range(3):
        timers("a").start()
        timers("a").stop()
    timers("b").start()
    with contextlib.redirect_stdout(io.StringIO()) as heard:
        timers.log(["a", "b", "missing"], ranks=[1])
    left = {
        "a": timers("a").elapsed(),
        "runs": timers("b").started_,
        "kept": len(timers("a")._spent),
    }
    said = [error_of(timers("b").start), error_of(timers("a").stop)]
    return heard.getvalue(), left | {"names": sorted(timers.get_timers()), "said": said}


def test_timers_start_again_on_every_rank_after_a_log(drop_in_pools):
    (first, other), (printed_there, told) = drop_in_pools(WORLD).run(timed, ["a"])
    assert first == "" and printed_there.startswith("[Rank 1] time (ms) | a: ")
    for one in (other, told):
        assert one["a"] == 0 and one["kept"] == 0 and one["runs"] and one["names"] == ["a", "b"]
        assert "b has already been started" in one["said"][0]
        assert "a is not started" in one["said"][1]


def throughput() -> dict[str, Any]:
    """Counts and times of a ThroughputTimer in a loop of two micro-batches per step."""
    pipes.deepspeed()
    from deepspeed.utils.timer import ThroughputTimer  # noqa: PLC0415

    told: list[str] = []
    timer = ThroughputTimer(batch_size=8, start_step=1, steps_per_output=2, logging_fn=told.append)
    timer.stop()  # no effect before start()
    idle = (timer.initialized, timer.started, timer.micro_step_count, timer.avg_samples_per_sec())
    spent = []
    for micro in range(6):
        timer.start()
        timer.stop(global_step=micro % 2 == 1)
        spent.append((timer.end_time - timer.start_time, timer.step_elapsed_time))
    timer.stop(global_step=True)
    counts = (timer.initialized, timer.started, timer.micro_step_count, timer.global_step_count)
    return {
        "idle": idle,
        "counts": counts,
        "spent": spent,
        "total": timer.total_elapsed_time,
        "rate": timer.avg_samples_per_sec(),
        "told": told,
    }


def test_throughput_counts_what_start_and_stop_enclose(drop_in_pools):
    for found in drop_in_pools(WORLD).run(throughput):
        assert found["idle"] == (False, False, 0, float("-inf"))
        assert found["counts"] == (True, False, 6, 3)
        first, last = found["spent"][:2], found["spent"][2:]
        assert first == [(0, 0)] * 2, "steps before start_step are not timed"
        assert [step for _, step in last[1::2]] == [0, 0], "a step's time begins again"
        assert all(step == pytest.approx(own) for own, step in last[::2])
        assert found["total"] == pytest.approx(sum(own for own, _ in last))
        assert found["rate"] == pytest.approx(8 * 2 / found["total"])
        (line,) = found["told"]
        assert line.startswith("micro_step=4/global_step=2, RunningAvgSamplesPerSec=")
        assert "CurrSamplesPerSec=" in line


def test_memory_is_printed(drop_in_pools):
    (first, _, _), _ = drop_in_pools(WORLD).run(printed, {"memory_breakdown": True}, 2)
    for part, when in itertools.product(("forward", "backward", "step"), ("before", "after")):
        assert f"Engine {when} {part}\nMA " in first


def test_operations_are_printed(drop_in_pools, tmp_path):
    file = tmp_path / "new" / "profile.txt"
    keys = {"enabled": True, "profile_step": 1, "output_file": str(file), "top_modules": 2}
    (_, _, counted), _ = drop_in_pools(WORLD).run(printed, {"flops_profiler": keys}, 4)
    macs = 2 * 2 * 4 * 4  # samples, layers, weights
    assert counted == [2 * macs, 40]
    text = file.read_text()
    assert "Profile Summary at step" in text and "batch size per GPU:" in text
    assert f"{macs} MACs = 100% MACs" in text and "(2): Linear(20 = 50% Params" in text
    assert "depth 1:\n    params      - {'Linear': '40', 'Tanh': '0'}" in text


def logged(config: dict[str, Any]) -> list[Any]:
    comm = pipes.deepspeed().comm
    with contextlib.redirect_stdout(io.StringIO()) as heard:
        engine = engine_of(0, {"comms_logger": config})
        value = torch.full((256,), float(dist.get_rank()))
        comm.all_reduce(value)
        comm.broadcast(value, 0)
        comm.all_gather_into_tensor(torch.empty(512), value)
        found = comm.log_summary(show_straggler=True, return_dict=True)
    engine.destroy()
    comm.configure(enabled=False, verbose=False, prof_all=True, prof_ops=[])
    comm.comms_logger.reset_data()
    return [heard.getvalue(), found["summary"], found["straggler_analysis"], value[0].item()]


def test_collectives_are_logged(drop_in_pools):
    first, other = drop_in_pools(WORLD).run(logged, {"enabled": True, "verbose": True})
    said, summary, waits, value = first
    assert value == 1.0
    assert list(summary) == list(waits) == ["all_reduce", "broadcast", "all_gather_into_tensor"]
    for name, sizes in summary.items():
        (row,) = sizes.values()
        assert row["count"] == 1 and row["msg_size_str"] == "1.0 KB"
        assert f"comm op: {name} | time (ms): " in said
        gathers = 2 if "gather" in name else 1
        assert row["busbw_avg_gbps"] == pytest.approx(
            8192 * gathers * (1 if name != "all_gather_into_tensor" else 0.5)
            / row["total_latency_ms"] / 1e6
        )  # fmt: skip
    assert "Comm. Op            Message Size        Count" in said
    assert "Breakdown with straggler effect" in said and other[0] == ""
    only = drop_in_pools(WORLD).run(
        logged, {"enabled": True, "prof_all": False, "prof_ops": ["broadcast"]}
    )
    assert [list(summary) for _, summary, _, _ in only] == [["broadcast"]] * WORLD
    assert drop_in_pools(WORLD).run(logged, {})[0][1] == {}


def test_the_failures_of_ranks_are_errors(drop_in_pools):
    """A value of a section that DeepSpeed refuses is refused on every rank."""
    for failed in drop_in_pools(WORLD).attempt(printed, {"comms_logger": {"enabled": "maybe"}}, 1):
        assert isinstance(failed, Failure) and failed.is_a("ConfigError")


# ---- optimizers of the config

CLASSES = [
    ("Adam", {}, False, "FusedAdam", True),
    ("Adam", {"adam_w_mode": False}, False, "FusedAdam", False),
    ("AdamW", {"adam_w_mode": False}, True, "DeepSpeedCPUAdam", True),
    ("Adam", {"adam_w_mode": False}, True, "DeepSpeedCPUAdam", False),
    ("Adam", {"torch_adam": True, "adam_w_mode": False}, True, "Adam", None),
    ("Adam", {"torch_adam": True}, False, "AdamW", None),
    ("Lion", {}, False, "FusedLion", None),
    ("Lion", {}, True, "DeepSpeedCPULion", None),
    ("Adagrad", {}, True, "DeepSpeedCPUAdagrad", None),
    ("Adagrad", {}, False, "Adagrad", None),
]


def made(kind: str, params: dict[str, Any], offload: bool) -> tuple[str, Any, list[float]]:
    zero: dict[str, Any] = {"stage": 2}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    section = {"type": kind, "params": {"lr": 0.01, "weight_decay": 0.1, **params}}
    engine = engine_of(2, {"optimizer": section, "zero_optimization": zero})
    losses = []
    for step in range(3):
        loss = loss_of(engine, step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    inner = engine.optimizer.optimizer
    mode = getattr(inner, "adam_w_mode", None)
    engine.destroy()
    return type(inner).__name__, None if mode is None else bool(mode), losses


@pytest.mark.parametrize(("kind", "params", "offload", "name", "mode"), CLASSES)
def test_classes_of_the_configs_optimizer(kind, params, offload, name, mode, drop_in_pools):
    first, other = drop_in_pools(WORLD).run(made, kind, params, offload)
    assert first[:2] == other[:2] == (name, mode)
    usual = drop_in_pools(WORLD).run(made, kind, params | {"torch_adam": True}, False)
    assert first[2] == pytest.approx(usual[0][2], abs=1e-6)


# ---- fp16 where a plain backward may follow a call of engine.module


def fp16_stories() -> dict[str, Any]:
    """A copy of the module, a second engine of the model, and a recomputed call of the module."""
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 4}}
    ds, half = pipes.deepspeed(), torch.float16
    model = net()

    def start(model: torch.nn.Module) -> Any:
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            **fp16,
        }
        return ds.initialize(model=model, model_parameters=model.parameters(), config=config)[0]

    first = start(model)
    first.backward(loss_of(first, 0, half))
    first.step()
    twin = copy.deepcopy(first.module)
    second = start(model)  # closes the first one
    second.backward(loss_of(second, 1, half))
    second.step()
    x = torch.ones(2, 4, dtype=half)
    alike = bool(torch.equal(twin(x).isfinite(), torch.ones(2, 4, dtype=torch.bool)))
    grads = []
    for recomputes in (False, True):
        call = functools.partial(checkpoint, second.module, use_reentrant=False)
        output = call(x.clone().requires_grad_()) if recomputes else second(x)
        second.backward(output.float().square().mean())
        grads.append(second.native.full_grads()["0.weight"].clone())
        second.zero_grad()
        second.native.zero_grad()
    second.destroy()
    return {"alike": alike, "recomputed": (grads[0] - grads[1]).abs().max().item()}


def test_fp16_engines_follow_each_other_and_are_copied(drop_in_pools):
    for found in drop_in_pools(WORLD).run(fp16_stories):
        assert found["alike"] and found["recomputed"] < 1e-3


def two_precisions(how: str) -> float:
    """How much a backward of an engine in fp32 is off after one of an engine in fp16."""
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
    low, own, plain = engine_of(1, fp16), engine_of(1), net()
    first, second = loss_of(low, 0, torch.float16), loss_of(own, 0)
    if how == "scale":
        low.scale(first).backward()
    else:
        low.optimizer.backward(first)
    second.backward()
    found = own.native.full_grads()["0.weight"]
    loss_of(plain, 0).backward()
    expected = plain[0].weight.grad
    dist.all_reduce(expected)
    low.destroy()
    own.destroy()
    return float((found - expected / WORLD).abs().max())


@pytest.mark.parametrize("how", ["scale", "optimizer"])
def test_an_engine_in_fp16_leaves_others_their_weights(how, drop_in_pools):
    assert max(drop_in_pools(WORLD).run(two_precisions, how)) < 1e-5
