"""The config section "hybrid_engine": a loop like DeepSpeed-Chat's generates in eval mode and
trains on what came out. Text and losses equal those of plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipe_models import deepspeed

pytestmark = pytest.mark.timeout(480)
ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0}}
HYBRID = {"enabled": True, "max_out_tokens": 64}

# Name: number of ranks, stage, section "hybrid_engine", whether generate() gathers once.
CASES: dict[str, tuple[int, int, dict[str, Any], bool]] = {
    "alone": (1, 0, HYBRID, False),
    "zero2": (2, 2, HYBRID, False),
    "zero3": (2, 3, HYBRID | {"inference_tp_size": 2, "release_inference_cache": True}, True),
    "zero3 of 4": (4, 3, HYBRID, True),
    "not pinned": (2, 3, HYBRID | {"pin_parameters": False}, False),
    "off": (2, 3, {"enabled": False}, False),
}


def build() -> Any:
    """Imports transformers, which must find a deepspeed."""
    deepspeed()
    import hugging_face as hf  # noqa: PLC0415

    return hf.build("llama")


def prompts(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(1, 40, (2, 5), generator=generator)


def loss_of(model: Any, text: torch.Tensor) -> Any:
    return model(input_ids=text, labels=text).loss


def rollout(model: Any, ids: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, min_new_tokens=4,
        do_sample=False, pad_token_id=0,
    )  # fmt: skip
    return made


def chats(stage: int, section: dict[str, Any]) -> dict[str, Any]:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": ADAM,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "hybrid_engine": section,
    }
    engine, *_ = deepspeed().initialize(model=build(), config=config)
    rank = dist.get_rank()
    modes: list[str] = []
    hold = engine.native.inference

    def watched(mode: str) -> Any:
        modes.append(mode)
        return hold(mode)

    engine.native.inference = watched
    told: dict[str, Any] = {"kind": type(engine).__name__, "text": [], "losses": []}
    for step in range(3):
        engine.eval()
        text = rollout(engine.module, prompts(step, rank))
        if hasattr(type(engine), "generate"):
            assert torch.equal(text, engine.generate(prompts(step, rank), max_new_tokens=4,
                                                     min_new_tokens=4, do_sample=False,
                                                     pad_token_id=0))  # fmt: skip
        told["evaluated"] = not engine.module.training
        engine.train()
        loss = loss_of(engine, text)
        engine.backward(loss)
        engine.step()
        told["text"].append(text.tolist())
        told["losses"].append(loss.item())
    plain_mode = rollout(engine.module, prompts(0, rank))  # in training mode nothing is gathered
    told |= {"modes": modes, "shape": list(plain_mode.shape)}
    model = engine.module
    engine.destroy()
    told["left"] = "generate" in vars(model)
    return told


def plainly(world: int) -> dict[str, Any]:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    told: dict[str, Any] = {
        "text": [[] for _ in range(world)],
        "losses": [[] for _ in range(world)],
    }
    for step in range(3):
        model.eval()
        with torch.no_grad():
            texts = [rollout(model, prompts(step, rank)) for rank in range(world)]
        model.train()
        losses = [loss_of(model, text) for text in texts]
        (sum(losses) / world).backward()
        optimizer.step()
        optimizer.zero_grad()
        for rank in range(world):
            told["text"][rank].append(texts[rank].tolist())
            told["losses"][rank].append(losses[rank].item())
    return told


@pytest.mark.parametrize("name", CASES)
def test_chats_as_plain_torch(name, drop_in_pools):
    world, stage, section, gathers = CASES[name]
    plain = drop_in_pools(1).run(plainly, world)[0]
    for rank, told in enumerate(drop_in_pools(world).run(chats, stage, section)):
        hybrid = section["enabled"]
        assert told["kind"] == ("DeepSpeedHybridEngine" if hybrid else "DeepSpeedEngine")
        assert told["text"] == plain["text"][rank]
        assert told["losses"] == pytest.approx(plain["losses"][rank], rel=1e-5)
        mode = "auto" if gathers else "stream"
        assert told["modes"] == ([mode] * 6 if hybrid and stage == 3 else [])
        assert told["evaluated"] and told["shape"] == [2, 9] and not told["left"]


def refused(section: Any) -> str:
    try:
        deepspeed().initialize(
            model=build(), config={"train_batch_size": 2, "hybrid_engine": section}
        )
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"enabled": True, "max_out_token": 5}, "max_out_token"),
        ({"enabled": True, "max_out_tokens": 0}, "max_out_tokens"),
        ({"enabled": "maybe"}, "enabled"),
        (True, "hybrid_engine"),
    ],
)
def test_refuses(section, expected, drop_in_pools):
    for said in drop_in_pools(2).run(refused, section):
        assert expected in said, said
