"""`parallel.verify`: rules that cut what cannot be cut raise an error in the first forward, and
right rules change nothing."""

from __future__ import annotations

import re
import warnings
from typing import Any

import hugging_face as hf
import pytest
import rule_models as rm
import torch
from models import fill

pytestmark = pytest.mark.timeout(480)
LIMIT = 1e-5


def start(model: Any, rules: Any, verify: str, strategy: str = "zero3", **config: Any) -> Any:
    import penstock  # noqa: PLC0415

    settings = {
        "strategy": strategy,
        "mesh": {"tensor": 2},
        "parallel": {"rules": rules, "verify": verify},
        "optimizer": {"type": "SGD", "lr": 0.1},
        "comm": {"timeout_s": 120},
    }
    return penstock.initialize(model, settings | config)


def batch(step: int = 0) -> torch.Tensor:
    drawn = torch.randn(6, rm.SEQ, rm.WIDTH, generator=torch.Generator().manual_seed(step))
    return drawn.mul_(3).requires_grad_()


def trained(engine: Any, steps: int = 2) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights."""
    losses = []
    for step in range(steps):
        loss = engine(batch(step))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    weights = {n: v.clone() for n, v in engine.state_dict(rank0_only=False).items()}
    return losses, weights


def plain(model: Any, steps: int = 2) -> tuple[list[float], dict[str, torch.Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for step in range(steps):
        loss = model(batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {n: v.clone() for n, v in model.state_dict().items()}


def apart(ours: Any, theirs: Any) -> float:
    losses = max(abs(a - b) for a, b in zip(ours[0], theirs[0], strict=True))
    values = ((ours[1][n].double() - v.double()).abs().max() for n, v in theirs[1].items())
    return max(losses, *(float(one) for one in values))


def wrong(name: str, verify: str, strategy: str, config: Any) -> Any:
    """Returns the error's text, or how far the training is from that of plain torch."""
    made, rules, _ = rm.WRONG[name]
    engine = start(rm.build(made), rules, verify, strategy, **config)
    try:
        return apart(trained(engine, 1), plain(rm.build(made), 1))
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__} {error}"
    finally:
        engine.close()


@pytest.mark.parametrize("name", rm.WRONG)
def test_wrong_rules(name, pools):
    for said in pools(2).run(wrong, name, "own", "zero3", {}):
        assert isinstance(said, str), f"silent; differs from plain torch by {said}"
        assert said.startswith('ConfigError [front::forward] "parallel.rules" cuts "blocks.0"'), (
            said
        )
        assert re.search(rm.WRONG[name][2], said), said
        assert '"parallel.verify" to "off"' in said


OTHER_WRONG = [
    ("softmax", "ddp", {}),
    ("softmax", "zero1", {"precision": "bf16"}),
    ("zero last weight", "zero3", {"precision": "bf16"}),
    ("heads not divided", "zero3", {"activations": {"checkpoint": "unit"}}),
    ("whole input beside", "zero2", {"precision": "bf16"}),
]


@pytest.mark.parametrize("case", OTHER_WRONG, ids=str)
def test_wrong_rules_of_other_engines(case, pools):
    name, strategy, config = case
    for said in pools(2).run(wrong, name, "own", strategy, config):
        assert isinstance(said, str) and re.search(rm.WRONG[name][2], said), said


def without_a_check() -> dict[str, Any]:
    """Returns how far each wrong rule is from plain torch, or the error of the first step."""
    return {name: wrong(name, "off", "zero3", {}) for name in rm.WRONG}


# The check of a step finds these, after the backward.
FOUND_LATER = (
    "addend without partial", "bias on each rank", "column used whole", "whole input beside"
)  # fmt: skip


def test_wrong_rules_are_silent_without_a_check(pools):
    for told in pools(2).run(without_a_check):
        for name, said in told.items():
            if name in FOUND_LATER:
                assert "is not the same on ranks" in said, (name, said)
            else:
                assert said > 2e-5, (name, said)


def right(name: str, strategy: str, config: Any, recompute: str = "") -> Any:
    """Returns how far the checked training is from the unchecked one, and from plain torch."""
    made, rules = rm.RIGHT[name]
    told, drawn = [], []
    for verify in ("all", "off"):
        model = rm.build(made, recompute)
        torch.manual_seed(5)
        engine = start(model, rules, verify, strategy, **config)
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            told.append(trained(engine))
        drawn.append((torch.rand(()), [vars(one).get("calls") for one in model.modules()]))
        engine.close()
    torch.manual_seed(5)
    unlike = name == "dropout"  # of a part draws as many numbers as the part has
    far = 0.0 if unlike else apart(told[0], plain(rm.build(made, recompute)))
    return apart(*told), drawn[0] == drawn[1], far


@pytest.mark.parametrize("name", rm.RIGHT)
def test_right_rules(name, pools):
    for changed, drawn, far in pools(2).run(right, name, "zero3", {}):
        assert changed == 0 and drawn and far <= LIMIT, (changed, drawn, far)


OTHER_RIGHT = [
    ("attention", "ddp", {"precision": "bf16"}, ""),
    ("attention", "zero3", {"precision": "bf16"}, ""),
    ("returned weights", "zero3", {"precision": "fp16"}, ""),
    ("dropout", "zero3", {"activations": {"checkpoint": "unit"}}, ""),
    ("dropout", "ddp", {}, "nonreentrant"),
    ("attention", "ddp", {}, "reentrant"),
    ("attention", "zero1", {"batch": {"accumulate": 2}}, "nonreentrant"),
    ("q k v", "zero3", {"offload": {"optimizer": "host", "params": "host"}}, ""),
]


@pytest.mark.parametrize("case", OTHER_RIGHT, ids=str)
def test_right_rules_of_other_engines(case, pools):
    name, strategy, config, recompute = case
    exact = "precision" not in config and "batch" not in config
    for changed, drawn, far in pools(2).run(right, name, strategy, config, recompute):
        assert changed == 0 and drawn, (changed, drawn)
        assert not exact or far <= LIMIT, far


# ---- rules of known models


class Counted:
    """Counts modules that are compared with uncut ones."""

    def __init__(self) -> None:
        from penstock.parallel.probe import Probe  # noqa: PLC0415

        self.count, self._kind, self._had = 0, Probe, Probe.compared
        Probe.compared = self._compared(Probe.compared)

    def _compared(self, inner: Any) -> Any:
        def compared(*args: Any) -> Any:
            self.count += 1
            return inner(*args)

        return compared

    def __enter__(self) -> Counted:
        return self

    def __exit__(self, *_: Any) -> None:
        self._kind.compared = self._had


def known(kind: str, strategy: str, mesh: Any, extra: Any, config: Any) -> Any:
    """Returns losses with a check and without, compared modules and warnings."""
    told = []
    with Counted() as counted, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", RuntimeWarning)
        for verify in ("all", "off"):
            parallel = {"parallel": config.get("parallel", {}) | {"verify": verify}}
            engine = hf.start(strategy, hf.build(kind, **extra), config | {"mesh": mesh} | parallel)
            losses = []
            for step in range(2):
                if "pipeline" in mesh:
                    batch = {n: v[:2] for n, v in hf.batch(kind, step, 0).items()}
                    losses.append(float(engine.train_batch(batch)))
                    continue
                loss = engine(**hf.batch(kind, step, 0)).loss
                engine.backward(loss)
                engine.step()
                losses.append(float(loss.detach()))
            engine.close()
            told.append(losses)
    return *told, counted.count, [str(one.message) for one in warned]


RECOMPUTED = {"activations": {"checkpoint": "unit"}}
TOKENS = {"parallel": {"norms": "tokens"}}
CUT = {"parallel": {"cut_logits": True}}
STAGES = {"pipeline": 2, "tensor": 2}
TWO = {"batch": {"accumulate": 2}}
OLD = {"new_decoder_architecture": False, "multi_query": False, "num_kv_heads": None}
# kind, strategy, mesh, model's options, config, compared modules
KNOWN: list[Any] = [
    ("llama", "zero3", {"tensor": 2}, {}, {}, 4),
    ("llama", "ddp", {"tensor": 4}, {}, CUT, 4),
    ("llama", "zero3", {"tensor": 2}, {}, TOKENS | RECOMPUTED, 4),
    ("llama", "zero3", {"tensor": 2}, {}, {"precision": "bf16"}, 4),
    ("llama", "zero1", STAGES, {}, TWO, 2),
    ("llama", "zero3", STAGES, {}, TWO | RECOMPUTED | {"precision": "bf16"}, 2),
    ("gpt2", "zero1", {"tensor": 2}, {"attn_pdrop": 0.1, "resid_pdrop": 0.1}, {"seed": 1}, 4),
    ("gpt2", "zero3", {"tensor": 2}, {}, RECOMPUTED | {"precision": "bf16"}, 4),
    ("gpt2", "ddp", {"tensor": 2}, {}, TOKENS, 4),
    ("gpt2", "zero2", STAGES, {}, TWO, 2),
    ("qwen3", "zero3", {"tensor": 4}, {}, {}, 4),
    ("phi3", "zero3", {"tensor": 2}, {}, {}, 0),  # its rules have whole inputs and outputs
    ("opt", "zero3", {"tensor": 2}, {}, {}, 4),
    ("bloom", "zero3", {"tensor": 2}, {}, {}, 4),
    ("falcon", "zero3", {"tensor": 2}, {}, {}, 4),
    ("falcon", "ddp", {"tensor": 2}, OLD, {}, 4),
    ("bert", "zero3", {"tensor": 2}, {}, {}, 4),
    ("bert", "zero3", {"tensor": 2}, {}, TOKENS, 4),
]


@pytest.mark.parametrize("case", KNOWN, ids=lambda case: "-".join(map(str, case[:5])))
def test_rules_of_known_models(case, pools):
    *run, compared = case
    world = 4 if 4 in run[2].values() or "pipeline" in run[2] else 2
    for checked, unchecked, count, warned in pools(world).run(known, *run):
        assert checked == unchecked and count == compared and not warned, (count, warned)


def test_parts_among_arguments_are_told(pools):
    """In T5 the first block's bias, of which a rank has a part, is an argument of later blocks."""
    for checked, unchecked, count, warned in pools(2).run(
        known, "t5", "zero3", {"tensor": 2}, {}, {}
    ):
        assert checked == unchecked and count == 7
        (said,) = warned
        assert re.search('"encoder.block.1.layer.0.SelfAttention": its arguments differ', said)


# ---- modules that enclose units


def flat(wrong: bool, strategy: str, verify: str) -> Any:
    middle = (lambda h: h.softmax(-1)) if wrong else torch.tanh
    config = {"units": {"layer_bytes": 1}}
    with Counted() as counted:
        engine = start(
            fill(rm.Flat(middle), 3), {"up": "column", "down": "row"}, verify, strategy, **config
        )
        try:
            return apart(trained(engine, 3), plain(fill(rm.Flat(middle), 3), 3)), counted.count
        except ValueError as error:
            return str(error), counted.count
        finally:
            engine.close()


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_layers_of_the_model_itself(strategy, pools):
    for far, count in pools(2).run(flat, False, strategy, "own"):
        assert far <= LIMIT and count == 1
    for said, _ in pools(2).run(flat, True, strategy, "own"):
        assert 'cuts "the model" (up "column", down "row")' in said, said
    for far, count in pools(2).run(flat, True, strategy, "off"):
        assert far > 1e-4 and count == 0
