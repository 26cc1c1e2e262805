"""Bugs that users of sharded training have reported elsewhere, each as a test that would catch it.

The numbers are those of the list of known bugs that the project keeps. Left out:
B3   needs a host tier; the micro-steps that were dropped there are counted in B4.
B7   needs pipeline stages.
B8   needs an integration with a trainer; who divides the loss is B6 and B32.
B9   needs expert parallelism.
B10  needs expert parallelism.
B11  needs tensor parallelism.
B12  needs sequence parallelism.
B14  needs device streams; test_repeatable.py compares prefetch and buckets of other sizes.
B15  first steps only; "after load" needs checkpoints.
B16  needs quantised gathers, which "comm.codec" refuses; world size 3 is in test_parity.py.
B18  needs checkpoints.
B19  state_dict() only; "save and load" needs checkpoints.
B20  state_dict() only; "export" needs checkpoints.
B21  needs checkpoints.
B22  needs checkpoints.
B23  needs checkpoints.
B25  in memory only; offload needs a host tier.
B31  the norm only; nothing logs the loss yet.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import bug_models
import cases
import compare
import models
import pytest
import torch
import torch.distributed as dist
import training
from torch import nn
from training import Case, Tensors

EVERY = [*cases.STRATEGIES, *cases.NODE_STRATEGIES]
FREES_PARAMS = {"zero3", "hpz", "mics"}
every_strategy = pytest.mark.parametrize("strategy", EVERY)
both_precisions = pytest.mark.parametrize("precision", cases.PRECISIONS)


def case_of(strategy, **others) -> Case:
    return Case(strategy, world=4 if strategy in cases.NODE_STRATEGIES else 2, **others)


def initialize(model, config, **others):
    import penstock  # noqa: PLC0415

    return penstock.initialize(model, config, **others)


def batches(case):
    """The batches of training.reference()."""
    return models.batches(case.model, training.STEPS, case.samples)


def readable(model):
    """Names of the parameters that are whole now."""

    def can_read(parameter):
        try:
            parameter.detach().sum()
        except RuntimeError:  # freed
            return False
        return True

    return [name for name, parameter in model.named_parameters() if can_read(parameter)]


@dataclass
class Seen:
    """What one rank saw of a few steps."""

    gradients: list[Tensors] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: Tensors = field(default_factory=dict)
    readable: list[str] = field(default_factory=list)  # after the last step


def see(case, steps, others, same_batch=False) -> Seen:
    """On a rank: `steps` steps of `case`, with these config keys replaced."""
    model = models.build(case.model, case.recompute)
    engine = initialize(model, case.config() | others)
    seen = Seen()
    for step in range(steps):
        batch = batches(case)[0 if same_batch else step]
        seen.losses.append(training.backwards(engine, batch, case.accumulate))
        seen.gradients.append(engine.full_grads())
        assert engine.step() is True
        seen.norms.append(engine.grad_norm)
    seen.readable = readable(model)
    seen.weights = engine.state_dict()
    engine.close()
    return seen


def assert_gradients(case, gradients):
    """Those of the first step are plain torch's."""
    plain = training.reference(case.model, case.samples, 0.0)
    limit = compare.GRADIENT_LIMIT
    if case.precision == "bf16":
        theirs = training.reference(case.model, case.samples, 0.0, "bf16")
        own = compare.gradient_deviation(theirs.gradients, plain.gradients)
        limit = compare.BF16_RATIO * own + compare.BF16_SLACK["gradients"]
    assert compare.gradient_deviation(gradients, plain.gradients) <= limit


def assert_norms(case, norms):
    """Those of the first steps are plain torch's."""
    plain = training.reference(case.model, case.samples, 0.0).norms[: len(norms)]
    if case.precision == "fp32":
        assert compare.relative(norms, plain) <= compare.SCALAR_LIMIT
        return
    theirs = training.reference(case.model, case.samples, 0.0, "bf16").norms[: len(norms)]
    limit = compare.BF16_RATIO * compare.rms(theirs, plain) + compare.BF16_SLACK["norms"]
    assert compare.rms(norms, plain) <= limit


def check_steps(pools, case, steps=3) -> list[Seen]:
    """The first steps of `case` against plain torch; what each rank saw."""
    seen = pools(case.world).run(see, case, steps, {})
    for other in seen[1:]:
        for mine, theirs in zip(seen[0].gradients, other.gradients, strict=True):
            assert all(mine[name].equal(theirs[name]) for name in mine), "ranks differ"
    assert_gradients(case, seen[0].gradients[0])
    assert seen[0].norms[0] == pytest.approx(compare.norm(seen[0].gradients[0]), rel=1e-5)
    assert_norms(case, seen[0].norms)
    return seen


def plain_steps(model, optimizer, windows, scheduler=None) -> Tensors:
    """Plain training; the weights. A window is a list of batches whose mean loss counts."""
    for window in windows:
        optimizer.zero_grad()
        for batch in window:
            (model(*batch) / len(window)).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def plain_adamw(case, steps) -> Tensors:
    model = models.build(case.model)
    optimizer = torch.optim.AdamW(model.parameters(), **training.ADAMW)
    return plain_steps(model, optimizer, [[batch] for batch in batches(case)[:steps]])


def assert_weights(ours, theirs, limit=compare.WEIGHT_LIMIT):
    assert compare.weight_deviation(ours, theirs) <= limit


# ---- gradients


@both_precisions
@every_strategy
def test_b01_module_used_twice_in_a_step(strategy, precision, pools):
    check_steps(pools, case_of(strategy, precision=precision, model="awkward"))


@both_precisions
@every_strategy
def test_b02_gradient_norm_of_a_language_model(strategy, precision, pools):
    check_steps(pools, case_of(strategy, precision=precision), steps=5)


@both_precisions
@every_strategy
def test_b04_ranks_hold_the_same_accumulated_gradient(strategy, precision, pools):
    check_steps(pools, case_of(strategy, precision=precision, accumulate=4), steps=2)


@both_precisions
@every_strategy
def test_b05_gradients_are_zeroed_and_not_divided(strategy, precision, pools):
    """Without an update the same batch gives the same gradient again."""
    case = case_of(strategy, precision=precision, accumulate=2)
    still = {"optimizer": {"type": "SGD", "lr": 0.0}}
    first, *later = pools(case.world).run(see, case, 3, still, True)[0].gradients
    assert_gradients(case, first)
    for gradients in later:
        assert all(gradients[name].equal(first[name]) for name in first)


def several_backwards(case):
    """The window has `case.accumulate` backwards, of which the config does not know."""
    model = models.build(case.model)
    engine = initialize(model, case.config() | {"batch": {"micro": training.MICRO}})
    for micro in range(case.accumulate):
        engine.backward(engine(*training.rank_part(batches(case)[0], micro)))
    gradients = engine.full_grads()
    assert engine.step() is True
    engine.close()
    return gradients


@every_strategy
def test_b06_several_backwards_before_a_step_add_up(strategy, pools):
    case = case_of(strategy, accumulate=3)
    total = pools(case.world).run(several_backwards, case)[0]
    assert_gradients(case, {name: gradient / 3 for name, gradient in total.items()})


@both_precisions
@every_strategy
def test_b13_clipping(strategy, precision, pools):
    """A step of SGD at rate 1 moves the weights by the clipped gradient."""
    case = case_of(strategy, precision=precision, clip=True)
    descend = {"optimizer": {"type": "SGD", "lr": 1.0}}
    seen = pools(case.world).run(see, case, 1, descend)[0]
    model = models.build(case.model)
    for name, parameter in model.named_parameters():
        parameter.grad = seen.gradients[0].get(name)
    before = nn.utils.clip_grad_norm_(model.parameters(), training.CLIP[case.model])
    assert before > training.CLIP[case.model], "the case does not clip"
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    torch.optim.SGD(trained, lr=1.0).step()
    theirs = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    trains = {name: seen.weights[name] for name in theirs if not name.startswith("norm.")}
    assert_weights(trains, {name: theirs[name] for name in trains}, limit=1e-6)


def test_b15_first_steps_with_secondary_shards(pools):
    hpz, zero3 = (check_steps(pools, Case(name, world=4)) for name in ("hpz", "zero3"))
    for ours, theirs in zip(hpz, zero3, strict=True):
        assert compare.relative(ours.losses, theirs.losses) <= 1e-6
    assert_weights(hpz[0].weights, zero3[0].weights, limit=1e-6)


# ---- dtypes, names, memory


ROUTED = {
    "rule": {"precision": "bf16", "dtypes": {"router.*": "fp32"}},
    "built": {},
}


def routed_parts(world):
    generator = torch.Generator().manual_seed(6)
    return list(torch.randn(world, training.MICRO, models.FEATURES, generator=generator))


def fp32_islands(strategy, way):
    case, model = case_of(strategy), bug_models.Routed()
    if way == "built":
        model.body.bfloat16()
    config = {key: case.config()[key] for key in ("strategy", "mesh", "comm")}
    engine = initialize(model, config | ROUTED[way])
    engine.backward(engine(routed_parts(case.world)[dist.get_rank()]))
    gradients = engine.full_grads()
    engine.step()
    engine.eval()
    with torch.no_grad():
        engine(routed_parts(case.world)[0])
    state = engine.state_dict()
    engine.close()
    return gradients, state.get("inv_freq")


@pytest.mark.parametrize("way", ROUTED)
@every_strategy
def test_b17_fp32_buffer_and_router_in_bf16(strategy, way, pools):
    case = case_of(strategy)
    gradients, buffer = pools(case.world).run(fp32_islands, strategy, way)[0]
    plain = bug_models.Routed()
    assert buffer.dtype == torch.float32 and buffer.equal(plain.inv_freq)
    plain.body.bfloat16()
    theirs = {}
    for part in routed_parts(case.world):
        plain.zero_grad()
        plain(part).backward()
        for name, parameter in plain.named_parameters():
            theirs[name] = theirs.get(name, 0) + parameter.grad.float() / case.world
    assert compare.gradient_deviation(gradients, theirs) <= 2**-8
    ours = {name: gradients[name] for name in theirs if name.startswith("router")}
    theirs = {name: theirs[name] for name in ours}
    assert compare.gradient_deviation(ours, theirs) <= compare.GRADIENT_LIMIT


@both_precisions
@every_strategy
def test_b19_frozen_parameters_are_in_the_state_dict(strategy, precision, pools):
    case = case_of(strategy, precision=precision, model="awkward")
    seen = pools(case.world).run(see, case, 3, {})[0]
    frozen = {name: p for name, p in models.build("awkward").named_parameters()}
    frozen = {name: p.detach() for name, p in frozen.items() if not p.requires_grad}
    assert frozen and not set(frozen) & set(seen.gradients[0]), "a frozen one has a gradient"
    for name, tensor in frozen.items():
        kept = tensor if precision == "fp32" else tensor.bfloat16().float()
        assert seen.weights[name].dtype == torch.float32
        assert seen.weights[name].shape == tensor.shape and seen.weights[name].equal(kept), name


def tied(strategy):
    case, model = case_of(strategy), models.build("gpt")
    engine = initialize(model, case.config())
    for batch in batches(case)[:3]:
        training.backwards(engine, batch, 1)
        engine.step()
    weights = engine.state_dict()
    engine.close()
    return weights, model.head.weight is model.tokens.weight


@every_strategy
def test_b20_tied_embeddings_in_the_state_dict(strategy, pools):
    case = case_of(strategy)
    weights, still_tied = pools(case.world).run(tied, strategy)[0]
    assert still_tied
    assert weights["head.weight"].equal(weights["tokens.weight"])
    assert_weights(weights, plain_adamw(case, 3))


# ---- optimizers and schedules


def two_params(kind):
    """The model that a table of optimizers updates."""
    import penstock  # noqa: PLC0415

    kinds = {"AdamW": torch.optim.AdamW, "Lion": penstock.Lion}
    return (kinds | {"Adafactor": torch.optim.Adafactor})[kind]


def two_steps(strategy, kind):
    case, model = case_of(strategy, model="awkward"), bug_models.TwoParams()
    config = {key: case.config()[key] for key in ("strategy", "mesh", "comm")}
    engine = initialize(model, config, optimizer=two_params(kind)(model.groups()))
    for batch in batches(case)[:2]:
        training.backwards(engine, batch, 1)
        engine.step()
    weights = engine.state_dict()
    engine.close()
    return weights


@pytest.mark.parametrize("kind", ["AdamW", "Lion"])
@every_strategy
def test_b25_two_parameters_two_groups_two_steps(strategy, kind, pools):
    case, model = case_of(strategy, model="awkward"), bug_models.TwoParams()
    weights = pools(case.world).run(two_steps, strategy, kind)[0]
    optimizer = {"AdamW": torch.optim.AdamW, "Lion": bug_models.PlainLion}[kind](model.groups())
    windows = [[batch] for batch in batches(case)[:2]]
    assert_weights(weights, plain_steps(model, optimizer, windows), limit=1e-6)


@every_strategy
def test_b24_whole_matrix_optimizer(strategy, pools):
    case, model = case_of(strategy, model="awkward"), bug_models.TwoParams()
    weights = pools(case.world).run(two_steps, strategy, "Adafactor")[0]
    windows = [[batch] for batch in batches(case)[:2]]
    assert_weights(weights, plain_steps(model, torch.optim.Adafactor(model.groups()), windows))


PEAK, WARM_UP, TOTAL, LOW = 0.04, 3, 8, 0.1


def warm_up(strategy, given):
    case, model = case_of(strategy), bug_models.Slope()
    config = {key: case.config()[key] for key in ("strategy", "mesh", "comm")}
    config["schedule"] = {
        "type": "cosine", "warmup_steps": WARM_UP, "total_steps": TOTAL, "min_ratio": LOW,
    }  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=PEAK) if given == "object" else None
    if optimizer is None:
        config["optimizer"] = {"type": "SGD", "lr": PEAK}
    engine = initialize(model, config, optimizer=optimizer)
    rates, weights = [], []
    for _ in range(TOTAL + 1):
        rates.append(engine.lr)
        engine.backward(engine(torch.ones(())))
        engine.step()
        weights.append(engine.state_dict().get("weight"))
    engine.close()
    return rates, weights


@pytest.mark.parametrize("given", ["config", "object"])
@every_strategy
def test_b26_warm_up(strategy, given, pools):
    rates, weights = pools(case_of(strategy).world).run(warm_up, strategy, given)[0]
    model = bug_models.Slope()
    optimizer = torch.optim.SGD(model.parameters(), lr=PEAK)
    rise = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARM_UP, 1.0, WARM_UP - 1)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, TOTAL - WARM_UP, LOW * PEAK)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [rise, fall], [WARM_UP - 1])
    for rate, weight in zip(rates[:TOTAL], weights, strict=False):
        assert rate == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-6)
        theirs = plain_steps(model, optimizer, [[(torch.ones(()),)]], scheduler)["weight"]
        assert weight.tolist() == pytest.approx(theirs.tolist(), rel=1e-6)
    assert rates[TOTAL] == pytest.approx(LOW * PEAK)


# ---- construction


def pretrained():
    """Weights for all of the model but its last block."""
    weights = models.build("gpt").state_dict()
    return {name: t for name, t in weights.items() if not name.startswith("blocks.2.")}


def new_block(strategy):
    import penstock  # noqa: PLC0415

    case = case_of(strategy)
    torch.manual_seed(11)
    with penstock.init():
        model = models.Gpt()
        missing = model.load_state_dict(pretrained(), strict=False).missing_keys
    assert all(name.startswith("blocks.2.") for name in missing)
    engine = initialize(model, case.config())
    first = engine.state_dict()
    for batch in batches(case)[:3]:
        training.backwards(engine, batch, 1)
        engine.step()
    last = engine.state_dict()
    engine.close()
    return first, last


@every_strategy
def test_b27_new_block_on_a_pretrained_model(strategy, pools):
    case = case_of(strategy)
    first, last = pools(case.world).run(new_block, strategy)[0]
    torch.manual_seed(11)
    model = models.Gpt()
    model.load_state_dict(pretrained(), strict=False)
    assert_weights(first, {n: t.clone() for n, t in model.state_dict().items()}, limit=0)
    optimizer = torch.optim.AdamW(model.parameters(), **training.ADAMW)
    assert_weights(last, plain_steps(model, optimizer, [[batch] for batch in batches(case)[:3]]))


# ---- models and loops that differ between ranks or steps


BRANCHES = {
    "all ranks": lambda step, rank, micro: [0, 1] if step % 2 == 0 else [0],
    "by micro": lambda step, rank, micro: [0, 1, 2] if micro == 0 else [step % 3],
    "by rank": lambda step, rank, micro: [0, 1, 2] if step == 0 else [(step + rank) % 3],
    "one rank": lambda step, rank, micro: [0, 1] if rank == 1 and step > 0 else [0, 1, 2],
    "by rank at once": lambda step, rank, micro: [rank % 2],
}


def branching_window(case, step, branches):
    """The parts of a step's batch with what they use, by rank and micro-batch."""
    x, targets = batches(case)[step]
    parts = zip(x.split(training.MICRO), targets.split(training.MICRO), strict=True)
    chosen = BRANCHES[branches]
    return [
        (*part, chosen(step, index % case.world, index // case.world))
        for index, part in enumerate(parts)
    ]


def branching(case, branches):
    engine = initialize(bug_models.Branching(), case.config())
    for step in range(4):
        window = branching_window(case, step, branches)
        for part in window[dist.get_rank() :: case.world]:
            engine.backward(engine(*part))
            engine.step()
    assert engine.steps == 4
    weights = engine.state_dict()
    engine.close()
    return weights


@pytest.mark.parametrize("branches", BRANCHES)
@every_strategy
def test_b28_unused_parameters(strategy, branches, pools):
    case = case_of(strategy, accumulate=2, model="awkward")
    weights = pools(case.world).run(branching, case, branches)[0]
    model = bug_models.Branching()
    optimizer = torch.optim.AdamW(model.parameters(), **training.ADAMW)
    windows = [branching_window(case, step, branches) for step in range(4)]
    assert_weights(weights, plain_steps(model, optimizer, windows))


@pytest.mark.parametrize("recompute", ["reentrant", "nonreentrant"])
@every_strategy
def test_b29_shared_and_frozen_weights_under_checkpointing(strategy, recompute, pools):
    case = case_of(strategy, recompute=recompute, model="awkward")
    seen = check_steps(pools, case)
    if strategy in FREES_PARAMS:
        assert not seen[0].readable, "parameters stay whole after a step"


def no_grad_in_train_mode(case, between):
    """Trains with `between` forwards without gradients before each step, and leaves its loop after
    a forward."""
    model = models.build(case.model)
    alone = {"prefetch_bytes": 0, "comm": {"timeout_s": 60, "bucket_bytes": 0}}
    engine = initialize(model, case.config() | alone)
    left = []
    for batch in batches(case)[:3]:
        for _ in range(between):
            with torch.no_grad():
                engine(*batch)
            left += readable(model)
        training.backwards(engine, batch, 1)
        engine.step()
    engine(*training.rank_part(batches(case)[3], 0))
    left += readable(model)
    peak_bytes = engine.ledger()["measured"]["param"]
    weights = engine.state_dict()
    engine.close()
    return left, peak_bytes, weights


@every_strategy
def test_b30_no_grad_in_train_mode_and_a_loop_that_is_left(strategy, pools):
    case = case_of(strategy)
    _, usual_bytes, _ = pools(case.world).run(no_grad_in_train_mode, case, 0)[0]
    left, peak_bytes, weights = pools(case.world).run(no_grad_in_train_mode, case, 2)[0]
    if strategy in FREES_PARAMS:
        assert not left, "parameters stay whole after a forward"
    assert peak_bytes == usual_bytes, "parameters stay whole while others are used"
    assert_weights(weights, plain_adamw(case, 3))


def norms_by_scale(case):
    """The loss scale and the norm of each applied step, on one batch without an update."""
    others = {
        "precision": "fp16",
        "optimizer": {"type": "SGD", "lr": 0.0},
        "loss_scale": {"initial": 2.0**22, "window": 1},
    }
    engine = initialize(models.build(case.model), case.config() | others)
    seen = []
    for _ in range(16):
        training.backwards(engine, batches(case)[0], 1)
        scale = engine.loss_scale
        if engine.step():
            seen.append((scale, engine.grad_norm))
    skipped = engine.skipped_steps
    engine.close()
    return seen, skipped


@every_strategy
def test_b31_norm_after_a_change_of_the_loss_scale(strategy, pools):
    case = case_of(strategy)
    seen, skipped = pools(case.world).run(norms_by_scale, case)[0]
    assert skipped > 0 and len(seen) > 1, (seen, skipped)
    plain = training.reference(case.model, case.samples, 0.0).norms[0]
    for scale, norm in seen:
        assert norm == pytest.approx(plain, rel=2**-8), f"at scale {scale}"


EPOCH = 5  # batches; windows are of two


def two_epochs(case):
    windowed = {"batch": {"micro": training.MICRO, "accumulate": 2}}
    engine = initialize(models.build(case.model), case.config() | windowed)
    applied = []
    for index, batch in enumerate(batches(case)[: 2 * EPOCH]):
        engine.backward(engine(*training.rank_part(batch, 0)))
        applied.append(engine.step(force=(index + 1) % EPOCH == 0))
    weights = engine.state_dict()
    engine.close()
    return applied, weights


@every_strategy
def test_b32_epoch_that_windows_do_not_divide(strategy, pools):
    case = case_of(strategy)
    applied, weights = pools(case.world).run(two_epochs, case)[0]
    assert applied == [False, True, False, True, True] * 2
    parts = batches(case)
    windows = [parts[i : i + 2] for i in (0, 2)] + [parts[4:5]]
    windows += [parts[i : i + 2] for i in (5, 7)] + [parts[9:10]]
    model = models.build(case.model)
    optimizer = torch.optim.AdamW(model.parameters(), **training.ADAMW)
    assert_weights(weights, plain_steps(model, optimizer, windows))
