"""Layers in tiles, on one rank: the loss in chunks, and what the user sees of tiled parameters."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

WIDTH, VOCAB, TOKENS = 12, 37, 10
TILES = {"max_bytes": 600, "loss_tokens": 4}  # 12 rows a tile


class Net(nn.Module):
    def __init__(self, loss, bias=True):
        super().__init__()
        self.loss = loss
        self.enter = nn.Embedding(VOCAB, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=bias)

    def forward(self, tokens, targets):
        return self.loss(self.head(torch.tanh(self.enter(tokens))), targets)


def data():
    torch.manual_seed(1)
    tokens, targets = torch.randint(VOCAB, (2, 2, TOKENS))
    targets[0, 2] = targets[1, 5] = -100
    return tokens, targets


def flat(logits):
    return logits.view(-1, VOCAB)


def shifted(logits, targets):
    return F.cross_entropy(flat(logits[..., :-1, :].contiguous()), targets[..., 1:].reshape(-1))


def masked(logits, targets):
    kept = targets != -100
    return F.cross_entropy(logits[kept], targets[kept])


def with_weight(logits, targets):
    return F.cross_entropy(flat(logits), targets.view(-1), weight=torch.linspace(0.5, 2, VOCAB))


def by_hand(logits, targets):
    return -F.log_softmax(flat(logits), -1).gather(1, targets.view(-1, 1).clamp(min=0)).mean()


def transposed(logits, targets):
    return F.cross_entropy(logits.transpose(1, 2), targets)


# Name -> loss of logits and targets, and whether the logits stay away.
LOSSES = {
    "mean": (lambda x, y: F.cross_entropy(flat(x), y.view(-1)), True),
    "sum": (lambda x, y: F.cross_entropy(flat(x), y.view(-1), reduction="sum"), True),
    "none": (
        lambda x, y: F.cross_entropy(flat(x), y.view(-1), reduction="none").square().sum(),
        True,
    ),
    "smooth": (lambda x, y: F.cross_entropy(flat(x), y.view(-1), label_smoothing=0.2), True),
    "smooth sum": (
        lambda x, y: F.cross_entropy(flat(x), y.view(-1), reduction="sum", label_smoothing=0.3),
        True,
    ),
    "module": (lambda x, y: nn.CrossEntropyLoss()(x.flatten(0, 1).float(), y.flatten()), True),
    "ignore a class": (
        lambda x, y: F.cross_entropy(flat(x), y.clamp(min=0).view(-1), ignore_index=0),
        True,
    ),
    "shifted": (shifted, True),
    "masked": (masked, True),
    "one token": (lambda x, y: F.cross_entropy(x[1, 3], y[1, 3]), True),
    "one row": (lambda x, y: F.cross_entropy(x[0, :, :].to(torch.float32), y[0]), True),
    "twice": (lambda x, y: F.cross_entropy(x[0], y[0]) + F.cross_entropy(x[1], y[1]), True),
    "class weights": (with_weight, False),
    "by hand": (by_hand, False),
    "transposed": (transposed, False),
    "a regulariser": (lambda x, y: F.cross_entropy(flat(x), y.view(-1)) + x.square().mean(), False),
    "some classes": (lambda x, y: x[..., :5].square().mean(), False),
}


class Largest(TorchDispatchMode):
    """The most elements that any op gave in one tensor."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(one, torch.Tensor) and one.device.type != "meta":
                self.elements = max(self.elements, one.numel())
        return result


def plain_run(loss, bias, targets):
    torch.manual_seed(0)
    model = Net(loss, bias)
    value = model(data()[0], targets)
    value.backward()
    return value.detach(), {n: p.grad for n, p in model.named_parameters()}


def tiled_run(loss, bias, targets, **settings):
    import penstock  # noqa: PLC0415

    torch.manual_seed(0)
    engine = penstock.initialize(Net(loss, bias), {"tiling": TILES} | settings)
    with Largest() as largest:
        value = engine(data()[0], targets)
        engine.backward(value)
    gradients = engine.full_grads()
    engine.close()
    return value.detach(), gradients, largest.elements


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_torchs(name, bias):
    loss, stays_away = LOSSES[name]
    targets = data()[1]
    expected, theirs = plain_run(loss, bias, targets)
    value, ours, most = tiled_run(loss, bias, targets)
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-7)
    assert ours.keys() == theirs.keys()
    for key, gradient in ours.items():
        assert float((gradient - theirs[key]).norm() / theirs[key].norm()) <= 1e-6, key
    # The whole weight, in full_grads() of the plain run's size, is smaller than any logits.
    assert stays_away == (most <= VOCAB * WIDTH), most


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_nothing_but_ignored_tokens(reduction):
    def loss(logits, targets):
        return F.cross_entropy(flat(logits), targets.view(-1), reduction=reduction)

    targets = torch.full((2, TOKENS), -100)
    expected, theirs = plain_run(loss, True, targets)
    value, ours, _ = tiled_run(loss, True, targets)
    torch.testing.assert_close(value, expected, equal_nan=True)
    for key, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[key], equal_nan=True)


def mean_loss(logits, targets):
    return F.cross_entropy(flat(logits), targets.view(-1))


def start(tiling=None, model=None, **settings):
    import penstock  # noqa: PLC0415

    torch.manual_seed(0)
    model = model or Net(mean_loss)
    return penstock.initialize(model, {"tiling": TILES if tiling is None else tiling} | settings)


def test_an_embedding_is_bitwise():
    """Forward and gradient: each row is in one tile."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCAB, WIDTH, padding_idx=4, scale_grad_by_freq=True))
    tokens, _ = data()
    weighting = torch.randn(2, TOKENS, WIDTH)
    expected = model(tokens).detach()
    model(tokens).mul(weighting).sum().backward()
    gradient, model[0].weight.grad = model[0].weight.grad, None
    engine = start({"max_bytes": 600}, model)
    ours = engine(tokens)
    assert ours.equal(expected)
    engine.backward(ours.mul(weighting).sum())
    assert engine.full_grads()["0.weight"].equal(gradient)
    engine.close()


def test_what_the_user_sees():
    model = Net(mean_loss)
    names, weight = list(model.state_dict()), model.head.weight
    before = weight.detach().clone()
    engine = start(model=model, optimizer={"lr": 0.1})
    assert list(model.state_dict(keep_vars=True)) == names == list(engine.state_dict())
    assert model.head.weight is weight and weight.shape == before.shape
    with pytest.raises(RuntimeError, match=r'"head.weight" is in 4 tiles.*engine\.gathered'):
        weight.sum()
    with engine.gathered([weight]):
        assert weight.equal(before)
    with pytest.raises(RuntimeError, match="tiles"):
        weight.sum()
    with engine.gathered(write=True), torch.no_grad():
        weight.mul_(2.0)
    assert engine.state_dict()["head.weight"].equal(before * 2)
    engine.backward(engine(*data()))
    halved = {name: value / 2 for name, value in engine.full_grads().items()}
    engine.set_grads(halved)
    ours = engine.full_grads()
    assert all(ours[name].equal(value) for name, value in halved.items())
    assert engine.step()
    trained = engine.state_dict()
    engine.close()
    assert model.head.weight is weight and weight.equal(trained["head.weight"])
    assert not weight.equal(before) and "forward" not in vars(model.head)
    model(*data()).backward()
    assert weight.grad is not None


def test_optimizers_of_the_users_own():
    """The groups hold the whole parameter, the steps are on tiles."""

    def train(make):
        torch.manual_seed(0)
        model = Net(mean_loss)
        groups = [
            {"params": [model.head.weight], "lr": 0.01},
            {"params": [model.head.bias, model.enter.weight], "lr": 0.001},
        ]
        return model, make(groups, eps=1e-3)

    for make in (torch.optim.AdamW, torch.optim.RMSprop):
        plain, optimizer = train(make)
        for _ in range(3):
            optimizer.zero_grad()
            plain(*data()).backward()
            optimizer.step()
        import penstock  # noqa: PLC0415

        model, optimizer = train(make)
        engine = penstock.initialize(model, {"tiling": TILES}, optimizer=optimizer)
        for _ in range(3):
            engine.backward(engine(*data()))
            engine.step()
        engine.close()
        for name, value in model.named_parameters():
            torch.testing.assert_close(value, dict(plain.named_parameters())[name], msg=name)


def test_logits_after_a_step_are_an_error():
    engine = start(model=Net(lambda x, y: (mean_loss(x, y), x)))
    loss, logits = engine(*data())
    assert logits.shape == (2, TOKENS, VOCAB) and logits.dtype == torch.float32
    before = logits.argmax(-1)
    assert before.shape == (2, TOKENS)
    engine.backward(loss)
    engine.step()
    with pytest.raises(RuntimeError, match="Use the logits before"):
        logits.argmax(-1)
    engine.close()


def test_a_loss_outside_of_the_model():
    tokens, targets = data()
    expected, theirs = plain_run(mean_loss, True, targets)
    torch.manual_seed(0)
    engine = start(model=Net(lambda x, _: x))
    loss = mean_loss(engine(tokens, None), targets)
    torch.testing.assert_close(loss.detach(), expected)
    engine.backward(loss)
    for name, value in engine.full_grads().items():
        torch.testing.assert_close(value, theirs[name], msg=name)
    engine.close()


class Tied(Net):
    def __init__(self, loss):
        super().__init__(loss)
        self.head.weight = self.enter.weight
        self.other = nn.Bilinear(2, 2, 2)


ERRORS = [
    ({"max_bytes": 600, "modules": ["haed"]}, 'is named "haed"; did you mean "head"'),
    ({"max_bytes": 600, "modules": ["other"]}, 'is named "other"'),
    ({"loss_tokens": 4, "head": "entr"}, 'did you mean "enter"'),
    ({"max_bytes": 8}, "less than one row"),
    ({"modules": ["head"]}, "no effect while tiling.max_bytes is 0"),
    ({"head": "head"}, "no effect while tiling.loss_tokens is 0"),
]


@pytest.mark.parametrize("tiling, message", ERRORS, ids=str)
def test_settings_that_cannot_work(tiling, message):
    import penstock  # noqa: PLC0415

    with pytest.raises(penstock.ConfigError, match=message):
        start(tiling, Tied(mean_loss))


def test_second_derivatives_are_refused():
    import penstock  # noqa: PLC0415

    engine = start({"max_bytes": 600}, Net(lambda x, _: x.square().mean()))
    loss = engine(data()[0], None)
    with pytest.raises((penstock.RuntimeFault, RuntimeError), match="second derivative"):
        torch.autograd.grad(loss, [engine.module.head.bias], create_graph=True)
    engine.close()
