"""inference(block_tokens=N): blocks run on slices of the batch, and the model gives what it gives
without slices, or an error."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import hugging_face as hf
import pytest
import test_inference as inference
import torch
from torch import nn

pytestmark = pytest.mark.timeout(480)
ROWS, TOKENS = 5, 7
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 2},
    "static": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
}


def padded() -> dict[str, torch.Tensor]:
    """Prompts of different lengths."""
    generator = torch.Generator().manual_seed(3)
    mask = torch.ones(ROWS, TOKENS, dtype=torch.int64)
    mask[0, :3], mask[3, :2] = 0, 0
    ids = torch.randint(1, 60, (ROWS, TOKENS), generator=generator)
    return {"input_ids": ids, "attention_mask": mask}


def texts(model: Any, given: dict[str, torch.Tensor], ways: Any) -> dict[str, torch.Tensor]:
    fixed = {"max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0, "do_sample": False}
    return {
        way: model.generate(
            **{name: one.to(model.device) for name, one in given.items()}, **fixed, **WAYS[way]
        ).cpu()
        for way in ways
    }


class Inside:
    """Records the tokens that each call of an MLP or an attention gets."""

    def __init__(self, model: nn.Module) -> None:
        self.tokens: list[int] = []
        for name, module in model.named_modules():
            if name.endswith(("mlp", "attn")):
                module.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, _module: Any, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        self.tokens.append(hidden.shape[0] * hidden.shape[1])


def slices(family: str, place: str, mode: str, path: str, device: str = "cpu") -> dict[str, Any]:
    plain = hf.build(family, **inference.ODD).to(device).eval()
    given = padded()
    ways = list(WAYS) if place == "zero3 alone" else ["greedy"]
    expected = texts(plain, given, ways)
    engine = inference.start(family, place, path, device)
    inside = Inside(engine.module)
    told: dict[str, Any] = {"same": [], "most": [], "later": [], "error": []}
    with engine.inference(mode):  # sequence ranks get the logits of their tokens
        logits = engine(**{name: one.to(device) for name, one in given.items()}).logits
        told["whole"] = max(inside.tokens, default=0)
    for most in (1, 2 * TOKENS, 10**6):
        inside.tokens.clear()
        with engine.inference(mode, block_tokens=most):
            ours = engine(**{name: one.to(device) for name, one in given.items()}).logits
            told["most"].append(max(inside.tokens, default=0))
            inside.tokens.clear()
            engine(**{name: one.to(device) for name, one in given.items()})
            told["later"].append(max(inside.tokens, default=0))
            told["error"].append(float((ours - logits).abs().max() / logits.abs().max()))
            made = texts(engine.module, given, ways)
        told["same"] += [torch.equal(made[way], expected[way]) for way in ways]
    engine.close()
    return told


PLACES = ("zero3 alone", "ddp", "zero3", "disk", "host", "T2", "S2", "P2", "zero3 of 4", "P2T2")


def cases() -> list[Any]:
    made = []
    for f, family in enumerate(inference.FAMILIES):
        for p, place in enumerate(PLACES):
            if place != "S2" or family in inference.IN_SEQUENCES:
                mode = ("auto", "resident", "stream")[(f + p) % 3]
                made.append(pytest.param(family, place, mode, id=f"{family}-{place}-{mode}"))
    return made


def pytest_generate_tests(metafunc):
    if "place" in metafunc.fixturenames:
        full = metafunc.config.getoption("full")
        chosen = cases() if full else cases()[::5]
        metafunc.parametrize(("family", "place", "mode"), chosen)


def test_gives_what_the_whole_batch_gives(family, place, mode, pools, tmp_path):
    world = inference.PLACES[place][0]
    # Sequence ranks compute a part of the tokens of each row.
    share = 2 if place == "S2" else 1
    for told in pools(world).run(slices, family, place, mode, str(tmp_path), timeout=200):
        assert all(told["same"])
        assert max(told["error"]) < 1e-5
        if told["whole"]:  # a family with modules of these names
            whole, tokens = told["whole"], told["whole"] // ROWS
            assert tokens == -(-TOKENS // share)
            # The check of each block runs four rows at once in any case.
            assert told["most"] == [4 * tokens, max(4, 2 * TOKENS // tokens) * tokens, whole]
            assert told["later"] == [tokens, 2 * TOKENS // tokens * tokens, whole]


# ---- other models


def _llama(**more: Any) -> Any:
    return hf.build("llama", **inference.ODD, **more)


def _of(name: str, **more: Any) -> Any:
    import transformers  # noqa: PLC0415

    sizes = {"vocab_size": 67, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = getattr(transformers, f"{name}Config")(**sizes, **more)
    kind = "Model" if name in ("Bert", "ViT") else "ForCausalLM"
    return getattr(transformers, name + kind)(config)


def _mixtral() -> Any:
    return _of(
        "Mixtral",
        num_local_experts=4,
        intermediate_size=64,
        num_key_value_heads=2,
        output_router_logits=True,
    )


class Encoder(nn.Module):
    """torch's own encoder, with or without the batch as first dimension."""

    def __init__(self, batch_first: bool, masked: bool) -> None:
        super().__init__()
        self.embed, self.masked = nn.Embedding(67, 32), masked
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=batch_first)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        size = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(size) if self.masked else None
        made: torch.Tensor = self.layers(self.embed(ids), mask=mask)
        return made


class Chain(nn.Module):
    """Blocks in a list, on hidden states."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block() for _ in range(2)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = torch.sin(ids[:, :, None] + torch.arange(16.0))
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden


def _normed() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(TOKENS), nn.Linear(16, 16))


class TwoLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(TOKENS, TOKENS), nn.Linear(TOKENS, TOKENS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.second(self.first(ids.float()))
        return made


class Odd(nn.Module):
    """A block with a rule of its own."""

    def __init__(self, rule: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.rule, self.calls = nn.Linear(16, 16), rule, 0
        self.kept: dict[str, torch.Tensor] = {"last": torch.zeros(())}
        self.holder = types.SimpleNamespace(last=torch.zeros(()))
        self.register_buffer("seen", torch.zeros(()))
        self.rows = nn.Parameter(torch.randn(ROWS, 1, 16))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.rule(self, hidden)


def _odd(rule: Callable[[Any, torch.Tensor], torch.Tensor]) -> Callable[[], nn.Module]:
    return lambda: Chain(lambda: Odd(rule))


def _in_place(block: Any, hidden: torch.Tensor) -> torch.Tensor:
    return hidden.add_(block.inner(hidden))


def _position(block: Any, hidden: torch.Tensor) -> torch.Tensor:
    return block.inner(hidden) * torch.arange(len(hidden))[:, None, None]


def _own_rows(block: Any, hidden: torch.Tensor) -> torch.Tensor:
    return block.inner(hidden) + block.rows[: len(hidden)]


def _mean_of_many(block: Any, hidden: torch.Tensor) -> torch.Tensor:
    made = block.inner(hidden)
    return made - made.mean(0) if len(made) > 2 else made


def _counts(block: Any, hidden: torch.Tensor) -> torch.Tensor:
    block.calls += 1
    return block.inner(hidden)


def _counts_rows(block: Any, hidden: torch.Tensor) -> torch.Tensor:
    block.seen += len(hidden)
    return block.inner(hidden)


def _keeps(block: Any, hidden: torch.Tensor) -> torch.Tensor:
    block.last = block.inner(hidden)
    return block.last


def _mixes(block: Any, hidden: torch.Tensor) -> torch.Tensor:
    made = block.inner(hidden)
    return made - made.mean(0) if getattr(block, "mix", False) else made


def _keeps_in_dict(block: Any, hidden: torch.Tensor) -> torch.Tensor:
    block.kept["last"] = block.inner(hidden)
    return block.kept["last"]


def _keeps_in_object(block: Any, hidden: torch.Tensor) -> torch.Tensor:
    block.holder.last = block.inner(hidden)
    return block.holder.last


def _not_a_number(block: Any, hidden: torch.Tensor) -> torch.Tensor:
    return torch.where(hidden > 0.99, float("nan"), block.inner(hidden))


class Counted(nn.Module):
    """Returns a table that is not by row, with as many entries as a slice has rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inner(hidden), torch.ones(2)


class OfCounted(Chain):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = torch.sin(ids[:, :, None] + torch.arange(16.0))
        for block in self.blocks:
            hidden, _ = block(hidden)
        return hidden


class Shares(Chain):
    """Its blocks get a tensor of all rows, to which they add."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden, total = torch.sin(ids[:, :, None] + torch.arange(16.0)), torch.zeros(1, 16)
        for block in self.blocks:
            hidden = block(hidden, total)
        return hidden + total


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, hidden: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.inner(hidden)
        total += 1
        return made


def _then_mixes(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    first = model(ids)
    for block in model.blocks:
        block.mix = True
    try:
        return [first, model(ids)]
    finally:
        for block in model.blocks:
            del block.mix


def _then_trains(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    first = model(ids)
    model.train()
    return [first, model(ids)]


def _then_hooks(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    first = model(ids)
    hook = model.blocks[1].inner.register_forward_hook(_centre)
    try:
        return [first, model(ids)]
    finally:
        hook.remove()


def _centre(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
    return output - output.mean(0)


class Dict(nn.Module):
    """Returns a dict, and not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"hidden": self.inner(hidden)}


class OfDicts(Chain):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = torch.sin(ids[:, :, None] + torch.arange(16.0))
        for block in self.blocks:
            hidden = block(hidden)["hidden"]
        return hidden


def _logits(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    return [model(ids).logits]


def _router(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    given = model(ids)
    return [given.logits, given.aux_loss[None], *given.router_logits]


def _text(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    return [model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)]


def _recorded(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    given = model(ids, output_hidden_states=True, output_attentions=True)
    return [*given.hidden_states, *given.attentions]


def _plain(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    return [model(ids)]


def _square(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    return [model(ids[:, : len(ids)])]


def _training(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    model.train()
    return [model(ids)]


def _compiled(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    model.model.layers[0].compile(backend="eager")
    return []


def _seq2seq() -> Any:
    import transformers  # noqa: PLC0415

    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=67,
            d_model=32,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            d_kv=8,
            decoder_start_token_id=0,
        )
    )


def _both(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    return [model(input_ids=ids, decoder_input_ids=ids).logits]


# Name: the model, what is called, and the error ("": what plain torch gives).
MODELS: dict[str, tuple[Callable[[], Any], Callable[..., list[torch.Tensor]], str]] = {
    "experts": (_mixtral, _router, ""),
    "recorded": (lambda: _llama(attn_implementation="eager"), _recorded, ""),
    "linear attention": (lambda: _of("Mamba", state_size=4), _text, ""),
    "no cache": (lambda: _of("Bert", intermediate_size=64), _recorded, ""),
    "alibi": (lambda: _of("Bloom"), _logits, "has the shape"),
    "position bias": (_seq2seq, _both, "it returns a tensor of the shape (1, 4, 7, 7)"),
    "encoder": (lambda: Encoder(True, False), _plain, ""),
    "tokens first": (lambda: Encoder(False, False), _plain, "its rows depend on each other"),
    "mask": (lambda: Encoder(True, True), _plain, "has the shape"),
    "mask as large as the batch": (lambda: Encoder(True, True), _square, "has the shape"),
    "batch norm in eval": (lambda: Chain(_normed), _plain, ""),
    "batch norm": (lambda: Chain(_normed), _training, "its rows depend"),
    "a dict": (lambda: OfDicts(Dict), _plain, "it returns a dict"),
    "in place": (_odd(_in_place), _plain, ""),
    "by position": (_odd(_position), _plain, "its rows depend"),
    "rows of its own": (_odd(_own_rows), _plain, "its rows depend"),
    "a mean of many": (_odd(_mean_of_many), _plain, "its rows depend"),
    "counts calls": (_odd(_counts), _plain, "changes buffers or attributes"),
    "counts rows": (_odd(_counts_rows), _plain, "changes buffers or attributes"),
    "keeps a tensor": (_odd(_keeps), _plain, "changes buffers or attributes"),
    "keeps in a dict": (_odd(_keeps_in_dict), _plain, "changes buffers or attributes"),
    "keeps in an object": (_odd(_keeps_in_object), _plain, "changes buffers or attributes"),
    "not a number": (_odd(_not_a_number), _plain, ""),
    "a table": (lambda: OfCounted(Counted), _plain, "it returns a tensor of the shape (2,)"),
    "a shared argument": (lambda: Shares(Adds), _plain, "writes to an argument"),
    "an attribute later": (_odd(_mixes), _then_mixes, "its rows depend"),
    "batch norm later": (lambda: Chain(_normed), _then_trains, "its rows depend"),
    "a hook later": (_odd(_mixes), _then_hooks, "its rows depend"),
    "no blocks": (TwoLinear, _plain, "no unit is one"),
}


def others(case: str) -> tuple[str, float]:
    import penstock  # noqa: PLC0415

    make, call, _ = MODELS[case]
    torch.manual_seed(0)
    model, ids = make().eval(), padded()["input_ids"]
    with torch.no_grad():
        expected = call(model, ids)
    model.eval()
    config = {"inference": True, "strategy": "zero3", "units": {"layer_bytes": 1}}
    engine = penstock.initialize(model, config)
    try:
        with engine.inference("stream", block_tokens=2 * TOKENS):
            ours = call(model, ids)
    except (RuntimeError, ValueError) as error:
        return str(error), 0.0
    finally:
        engine.close()
    return "", max(
        float((one.float() - other.float()).nan_to_num().abs().max())
        for one, other in zip(ours, expected, strict=True)
    )


@pytest.mark.parametrize("case", MODELS)
def test_other_models(case, pools):
    for said, error in pools(1).run(others, case):
        expected = MODELS[case][2]
        assert (expected in said) if expected else not said, said
        assert error < 1e-5


# ---- errors


def refused(case: str, path: str) -> str:
    import penstock  # noqa: PLC0415

    model = _llama()
    config: dict[str, Any] = {"inference": True, "strategy": "zero3", "units": {"layer_bytes": 1}}
    if case == "cache":
        config["offload"] = {"params": "disk", "cache": "disk", "path": path}
    if case == "tiles":
        config["tiling"] = {"max_bytes": 1024}
    if case == "compiled":
        model.model.layers[0].compile(backend="eager")
    engine = penstock.initialize(model, config)
    tokens: Any = {"none": 0, "text": "8", "flag": True}.get(case, 8)
    try:
        with engine.inference("stream", block_tokens=tokens):
            return ""
    except ValueError as error:
        return str(error)
    finally:
        inference.text(model, inference.prompts(), 2)
        engine.close()


REFUSED = {
    "none": "block_tokens is 0; allowed: a whole number >= 1",
    "text": "block_tokens is '8'; allowed",
    "flag": "block_tokens is True; allowed",
    "cache": 'block_tokens and "offload.cache" do not work together',
    "compiled": '"model.layers.0" is compiled',
    "tiles": 'does not work with "tiling"',
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, pools, tmp_path):
    for said in pools(1).run(refused, case, str(tmp_path)):
        assert REFUSED[case] in said


def leaves() -> list[bool]:
    """After an error in the middle of a batch, the model is as before."""
    engine = inference.start("llama", "zero3", "")
    model, ids = engine.module, padded()["input_ids"]
    before = [vars(one).get("forward") for one in model.modules()]
    plain = inference.text(model, ids, 3)
    hook = model.model.layers[1].mlp.register_forward_pre_hook(_raise)
    raised = False
    try:
        with engine.inference("stream", block_tokens=TOKENS):
            model(ids)
    except ZeroDivisionError:
        raised = True
    hook.remove()
    same = [vars(one).get("forward") for one in model.modules()] == before
    again = torch.equal(inference.text(model, ids, 3), plain)
    for step in range(2):
        inference.micro(engine, "llama", step)
    stepped = engine.step()
    engine.close()
    return [raised, same, again, stepped]


def _raise(*_: Any) -> None:
    raise ZeroDivisionError("in the MLP")


def test_an_error_leaves_the_model_as_before(pools):
    for told in pools(2).run(leaves):
        assert all(told), told
