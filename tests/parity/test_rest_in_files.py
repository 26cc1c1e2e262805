"""Frozen parameters that rest in the files of penstock.init(weights=...): the same results as
from the swap file, no copy, and files that stay as they are."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import pathlib
import re
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from parity import hugging_face as hf
from torch import nn

ODD = {"vocab_size": 67, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 4}
DISK = {"params": "disk"}


def files(folder: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> nn.Module:
    """[all ranks] Writes the model's files in shards, and returns the plain model."""
    plain = hf.build("llama", **ODD, **changes).to(dtype).eval()
    if dist.get_rank() == 0:
        plain.save_pretrained(folder, max_shard_size="6KB")
    dist.barrier()
    return plain


def from_files(folder: str, **changes: Any) -> Any:
    import penstock  # noqa: PLC0415

    with penstock.init(timeout_s=20.0, weights=folder):
        return hf.build("llama", **ODD, **changes).bfloat16()


def prints(folder: str) -> str:
    found = hashlib.sha256()
    for path in sorted(pathlib.Path(folder).glob("*.safetensors")):
        found.update(path.read_bytes() + str(path.stat().st_mtime_ns).encode())
    return found.hexdigest()


def config(folder: str, **more: Any) -> dict[str, Any]:
    offload = DISK | {"path": folder} | more.pop("offload", {})
    if "disk" not in offload.values():
        offload.pop("path")
    return {
        "precision": "bf16",
        "units": {"layer_bytes": 1},
        "offload": offload,
        "comm": {"timeout_s": 20.0},
    } | more


def start(folder: str, model: nn.Module, **more: Any) -> Any:
    import penstock  # noqa: PLC0415

    return penstock.initialize(model, config(folder, inference=True, **more))


def text(model: Any, new: int = 4) -> torch.Tensor:
    ids = torch.arange(1, 11, device=next(model.parameters()).device).view(2, 5)
    made: torch.Tensor = model.generate(
        ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
    )
    return made.cpu()


def written(engine: Any) -> int:
    return int(engine.ledger()["measured"]["disk_written"])


def in_files(engine: Any) -> int:
    return int(engine.explain().count("in the files of init()"))


# ---- the same as plain torch, and no copy

TABLES: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "checksums": (1, {"offload": {"checksums": True}}),
    "zero3": (2, {}),
    "zero3 of 4": (4, {}),
    "hpz": (4, {"strategy": "hpz", "mesh": {"node": 2}}),
    "no prefetch": (2, {"prefetch_bytes": 0}),
    "S2": (2, {"mesh": {"sequence": 2}}),
    "P2": (2, {"mesh": {"pipeline": 2}}),
    "D2P2": (4, {"mesh": {"pipeline": 2}}),
}


def runs(folder: str, table: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    plain = files(folder).to(device)
    before = prints(folder)
    engine = start(folder, from_files(folder), **table)
    told: dict[str, Any] = {
        "same": torch.equal(text(engine.module), text(plain)),
        "units": in_files(engine),
        "written": written(engine),
    }
    with engine.inference("resident"):
        told["same"] &= torch.equal(text(engine.module), text(plain))
    state = engine.state_dict(rank0_only=False)
    told["state"] = all(torch.equal(state[n], v.cpu()) for n, v in plain.state_dict().items())
    model = engine.module
    engine.close()
    gc.collect()
    held = [os.readlink(one) for one in pathlib.Path("/proc/self/fd").iterdir() if one.exists()]
    told["let go"] = not any("safetensors" in one for one in held)
    told["explained"] = "in the files" not in engine.explain()
    told["closed"] = all(
        torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True)
    )
    told["kept"] = prints(folder) == before
    return told


@pytest.mark.parametrize("table", TABLES)
def test_runs_from_the_files(table, pools, tmp_path):
    for told in pools(TABLES[table][0]).run(runs, str(tmp_path), TABLES[table][1]):
        assert told["same"] and told["state"] and told["closed"] and told["kept"], told
        assert told["let go"] and told["explained"], told
        assert told["units"] >= (3 if "P2" in table else 7) and told["written"] == 0, told


def built_without_values(folder: str, tied: str) -> dict[str, Any]:
    from accelerate import init_empty_weights  # noqa: PLC0415
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    import penstock  # noqa: PLC0415

    plain = files(folder, tie_word_embeddings=tied != "no")
    state = torch.get_rng_state()
    with penstock.init(timeout_s=20.0, weights=folder):
        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(folder), dtype=torch.bfloat16
            )
        if tied == "again":
            model.tie_weights()
    told = {"drawn": not torch.equal(state, torch.get_rng_state())}
    engine = start(folder, model)
    told |= {"same": torch.equal(text(model), text(plain)), "written": written(engine)}
    engine.close(gather=False)
    return told


@pytest.mark.parametrize("tied", ["no", "again"])
def test_built_without_values(tied, pools, tmp_path):
    for told in pools(2).run(built_without_values, str(tmp_path), tied):
        assert told == {"drawn": False, "same": True, "written": 0}


def test_parameters_that_were_separated(pools, tmp_path):
    with pytest.raises(ranks.RankError, match=r"call model\.tie_weights\(\) before the end"):
        pools(1).run(built_without_values, str(tmp_path), "separated")


# ---- what is copied as before


def copied(folder: str, case: str) -> dict[str, Any]:
    import penstock  # noqa: PLC0415

    dtype = torch.float32 if case == "another dtype" else torch.bfloat16
    plain = files(folder, dtype).bfloat16()
    more: dict[str, Any] = {}
    if case == "T2":
        more["mesh"] = {"tensor": 2}
    if case == "lossy wire":
        more["comm"] = {"codec": "int8", "timeout_s": 20.0}
    if case == "tiles":
        more["tiling"] = {"max_bytes": 1024}
    model = from_files(folder)
    if case == "an edit before":
        with penstock.init(timeout_s=20.0), torch.no_grad():
            model.lm_head.weight.mul_(2)
        plain.lm_head.weight.data.mul_(2)
    engine = start(folder, model, **more)
    with torch.no_grad():
        ids = torch.arange(1, 11).view(2, 5)
        far = (engine(input_ids=ids).logits - plain(input_ids=ids).logits).float()
    told = {"written": written(engine), "units": in_files(engine), "far": float(far.norm())}
    engine.close()
    return told


COPIED = {
    "another dtype": 0,
    "T2": 1,  # norms stay
    "lossy wire": 0,
    "tiles": 1,
    "an edit before": 1,
}


@pytest.mark.parametrize("case", COPIED)
def test_copies_what_cannot_stay(case, pools, tmp_path):
    for told in pools(2).run(copied, str(tmp_path), case):
        assert told["written"] > 0 and (told["units"] > 0) == bool(COPIED[case]), told
        assert told["far"] < (1.0 if case in ("lossy wire", "T2") else 1e-6), told


# ---- edits


def edits(folder: str) -> dict[str, Any]:
    plain = files(folder)
    before = prints(folder)
    engine = start(folder, from_files(folder))
    model = engine.module
    units = in_files(engine)
    with engine.gathered([model.lm_head.weight], write=True), torch.no_grad():
        model.lm_head.weight.mul_(-1)
    plain.lm_head.weight.data.mul_(-1)
    told = {"same": torch.equal(text(model), text(plain))}
    told["units"] = units - in_files(engine)
    engine.load_state_dict({n: v * 0.5 for n, v in plain.state_dict().items()})
    plain.load_state_dict({n: v * 0.5 for n, v in plain.state_dict().items()})
    told["again"] = torch.equal(text(model), text(plain)) and in_files(engine) == 0
    engine.close()
    told["kept"] = prints(folder) == before
    return told


def test_edits_leave_the_files(pools, tmp_path):
    for told in pools(2).run(edits, str(tmp_path)):
        assert told == {"same": True, "units": 1, "again": True, "kept": True}


# ---- frozen weights beside trained ones


class Adapted(nn.Module):
    """A frozen model with small trained layers beside its projections, as LoRA adds them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.requires_grad_(False)
        self.down = nn.Linear(24, 4, bias=False, dtype=torch.bfloat16)
        self.up = nn.Linear(4, 67, bias=False, dtype=torch.bfloat16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.model.model(input_ids=ids).last_hidden_state
        logits = self.model.lm_head(hidden) + self.up(self.down(hidden))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def adapts(folder: str, by_files: bool) -> dict[str, Any]:
    import penstock  # noqa: PLC0415

    plain = files(folder)
    base = from_files(folder) if by_files else plain
    torch.manual_seed(3)
    engine = penstock.initialize(Adapted(base), config(folder, strategy="zero3"))
    losses = []
    for step in range(4):
        ids = torch.randint(0, 67, (2, 9), generator=torch.Generator().manual_seed(step))
        loss = engine(ids)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    told = {"losses": losses, "units": in_files(engine), "written": written(engine)}
    engine.save(folder, "end")
    told["trained"] = [engine.state_dict(rank0_only=False)["up.weight"].float().sum().item()]
    engine.close()
    return told


def test_adapters_train_over_the_files(pools, tmp_path):
    copied = pools(2).run(adapts, str(tmp_path / "a"), False)
    stayed = pools(2).run(adapts, str(tmp_path / "b"), True)
    for one, two in zip(copied, stayed, strict=True):
        assert one["losses"] == two["losses"] and one["trained"] == two["trained"]
        assert one["units"] == 0 and two["units"] >= 6
        assert two["written"] < one["written"]


# ---- changes of the files


def changes(folder: str, how: str) -> str:
    plain = files(folder)
    engine = start(folder, from_files(folder))
    expected = text(engine.module)
    dist.barrier()
    found = sorted(pathlib.Path(folder).glob("*.safetensors"))
    if dist.get_rank() == 0:
        for path in found:
            if how == "in place":
                path.write_bytes(bytes(reversed(path.read_bytes())))
            elif how == "touched":
                os.utime(path, ns=(0, 0))
            elif how == "cut":
                os.truncate(path, path.stat().st_size // 2)
            elif how == "renamed":
                path.rename(path.with_suffix(".moved"))
            elif how == "deleted":
                path.unlink()
            else:  # a new file under the old name
                path.with_suffix(".new").write_bytes(b"new")
                path.with_suffix(".new").replace(path)
    dist.barrier()
    try:
        for call in (engine.state_dict, engine.state_dict) if how == "touched" else ():
            with contextlib.suppress(RuntimeError):
                call()
                return "values of a changed file"
        same = torch.equal(text(engine.module), expected)
        assert same and torch.equal(expected, text(plain))
    except RuntimeError as error:
        return str(error)
    finally:
        engine.close(gather=False)
    return "same"


@pytest.mark.parametrize("how", ["in place", "touched", "cut"])
def test_a_changed_file_is_an_error(how, pools, tmp_path):
    for said in pools(2).run(changes, str(tmp_path), how):
        assert re.search(r'"[^"]*\.safetensors" was changed .*keep it until close\(\)', said), said


@pytest.mark.parametrize("how", ["renamed", "deleted", "replaced"])
def test_the_open_file_is_what_counts(how, pools, tmp_path):
    assert set(pools(2).run(changes, str(tmp_path), how)) == {"same"}
