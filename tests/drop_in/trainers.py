"""Runs of Transformers' Trainer, plain and with DeepSpeed's configs; of the kind of loops.py.

Arguments: a folder for files, then names of cases of trainer_cases.py.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
from typing import Any

import torch
from accelerate.state import AcceleratorState
from reporting import report
from trainer_cases import CASES

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples" / "hf"))

import models  # noqa: E402
import peft  # noqa: E402
import transformers  # noqa: E402
from text import Bytes  # noqa: E402
from transformers.integrations.deepspeed import unset_hf_deepspeed_config  # noqa: E402


def _meet() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def _config(case: dict[str, Any], folder: pathlib.Path) -> dict[str, Any] | None:
    if "native" in case:
        if not os.environ.get("PENSTOCK_AS_DEEPSPEED"):
            raise RuntimeError("Penstock's own")
        import penstock.hf  # noqa: PLC0415 - it would switch DeepSpeed off

        return penstock.hf.config(**case["native"])
    name = case.get("config")
    if name is None:
        return None
    config = json.loads((ROOT / "examples" / "hf" / "configs" / f"{name}.json").read_text())
    zero = config["zero_optimization"]
    for section in ("offload_optimizer", "offload_param"):
        if zero.get(section, {}).get("device") == "nvme":
            zero[section]["nvme_path"] = str(folder)
    for key, value in case.get("zero", {}).items():
        zero[key] = value
    return config


def _arguments(case: dict[str, Any], folder: pathlib.Path, name: str) -> Any:
    given = {
        "output_dir": str(folder / name),
        "use_cpu": not torch.cuda.is_available(),
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "seed": 1,
        "lr_scheduler_type": "linear",
        "warmup_steps": 2,
        "disable_tqdm": True,
        "weight_decay": 0.01,
    }
    kind = transformers.Seq2SeqTrainingArguments
    return kind(**(given | case.get("arguments", {})), deepspeed=_config(case, folder))


def _logits(model: Any) -> list[float]:
    ids = Bytes(count=1)[0]["input_ids"][None].to(model.device)
    model.eval()
    with torch.no_grad():
        return model(input_ids=ids).logits.float().flatten()[::1999].tolist()


def _after(case: dict[str, Any], trainer: Any, folder: pathlib.Path, name: str) -> dict[str, Any]:
    """What else is looked at."""
    found: dict[str, Any] = {}
    if "resume" in case:
        return found
    if case.get("save"):
        trainer.save_model()
        _meet()
        files = sorted(one.name for one in (folder / name).iterdir())
        found["files"] = files
        if any(one.startswith(("model", "pytorch_model")) for one in files):
            unset_hf_deepspeed_config()
            found["exported"] = _logits(
                transformers.AutoModelForCausalLM.from_pretrained(folder / name)
            )
            found["logits"] = _logits(trainer.model_wrapped)
    if case.get("generate"):
        ids = Bytes(count=1)[0]["input_ids"][None, :8]
        model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
        ids = ids.to(model.device)
        found["generated"] = model.generate(ids, max_new_tokens=4, do_sample=False).tolist()
    return found


def _build(case: dict[str, Any], folder: pathlib.Path) -> Any:
    name = case.get("model", "llama")
    if case.get("lora"):
        whole = models.build(str(folder / f"weights_{name}"))
        torch.manual_seed(0)
        return peft.get_peft_model(whole, peft.LoraConfig(r=4, target_modules="all-linear"))
    return models.build(name if case.get("fresh") else str(folder / f"weights_{name}"))


def run(name: str, folder: pathlib.Path) -> dict[str, Any]:
    """Losses, norms and rates of a case, and what it leaves."""
    case = CASES[name]
    AcceleratorState._reset_state()
    unset_hf_deepspeed_config()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)  # the case before may have set it
    args = _arguments(case, folder, name)
    trainer = transformers.Trainer(
        model=_build(case, folder),
        args=args,
        train_dataset=Bytes(count=64),
        eval_dataset=Bytes(first=64, count=8),
    )
    resume = case.get("resume")
    trainer.train(resume_from_checkpoint=str(folder / resume) if resume else None)
    lines = [one for one in trainer.state.log_history if "loss" in one]
    found = {
        "losses": [one["loss"] for one in lines],
        "norms": [one.get("grad_norm") for one in lines],
        "rates": [one["learning_rate"] for one in lines],
        "eval": trainer.evaluate()["eval_loss"],
        "best": trainer.state.best_metric,
        "device": str(trainer.model.device),
    }
    found |= _after(case, trainer, folder, name)
    trainer.accelerator.free_memory()
    return found


def write_models(folder: pathlib.Path) -> None:
    """A folder with weights for each model."""
    for name in ("gpt2", "llama", "moe"):
        models.build(name).save_pretrained(folder / f"weights_{name}")


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    transformers.logging.set_verbosity_error()
    _arguments({}, folder, "none")  # makes the process group
    if int(os.environ.get("RANK", "0")) == 0:
        write_models(folder)
    _meet()
    if "--deepspeed-first" in sys.argv:  # which DeepSpeed itself needs under zero.Init
        import deepspeed  # noqa: PLC0415

        deepspeed.init_distributed(dist_backend="gloo")
    names = [one for one in sys.argv[2:] if not one.startswith("--")]
    report(names or CASES, lambda name: run(name, folder))


if __name__ == "__main__":
    main()
