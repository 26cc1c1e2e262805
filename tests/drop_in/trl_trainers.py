"""Runs of TRL's trainers, plain and with DeepSpeed's configs; of the kind of loops.py.

Arguments: a folder for files, then names of cases of trl_cases.py. Models and data are built here.
"""

from __future__ import annotations

import os
import pathlib
import sys
from typing import Any

import peft
import torch
import transformers
import trl
from accelerate.state import AcceleratorState
from datasets import Dataset, load_from_disk
from reporting import report
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from trl_cases import CASES

STEPS = 3
TEXT = (
    "A pool of rank processes runs many functions because importing a library takes seconds. The "
    "parent hosts the store, so that a rank that dies never takes it along with the others. Every "
    "wait has a deadline; at the deadline the pool ends its own children and nothing else at all."
)
KINDS = {
    "sft": (trl.SFTTrainer, trl.SFTConfig),
    "dpo": (trl.DPOTrainer, trl.DPOConfig),
    "kto": (trl.KTOTrainer, trl.KTOConfig),
    "reward": (trl.RewardTrainer, trl.RewardConfig),
    "grpo": (trl.GRPOTrainer, trl.GRPOConfig),
    "rloo": (trl.RLOOTrainer, trl.RLOOConfig),
}
GENERATING = ("grpo", "rloo")


def tokenizer() -> Any:
    """A byte is a token; the last two tokens are the padding and the end."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={one: i for i, one in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>"
    )


def _config() -> Any:
    return transformers.LlamaConfig(
        vocab_size=264,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=256,
        eos_token_id=257,
        bos_token_id=257,
    )


def write_models(folder: pathlib.Path) -> None:
    """A policy and a reward model, each with the tokenizer."""
    kinds = {
        "policy": transformers.LlamaForCausalLM,
        "judge": transformers.LlamaForSequenceClassification,
    }
    for name, kind in kinds.items():
        transformers.set_seed(1)
        config = _config()
        config.num_labels = 1
        kind(config).save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)


def data(trainer: str, place: pathlib.Path) -> Any:
    """16 examples in the trainer's format, in a folder, because the ranks share what TRL caches."""
    words = TEXT.split()
    rows = []
    for i in range(16):
        prompt = " ".join(words[i : i + 3])
        good = " " + " ".join(words[i + 3 : i + 5])
        bad = " " + " ".join(words[i + 20 : i + 21 + i % 2])
        rows.append(
            {
                "sft": {"text": prompt + good},
                "dpo": {"prompt": prompt, "chosen": good, "rejected": bad},
                "kto": {"prompt": prompt, "completion": good, "label": i % 3 != 0},
                "reward": {"chosen": prompt + good, "rejected": prompt + bad},
                "grpo": {"prompt": prompt},
                "rloo": {"prompt": prompt},
            }[trainer]
        )
    if int(os.environ.get("RANK", "0")) == 0:
        Dataset.from_list(rows).save_to_disk(place)
    _meet()
    return load_from_disk(place)


def _meet() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def spread(completions: list[str], **_: Any) -> list[float]:
    """A reward that depends on each byte."""
    return [sum(one.encode()) % 97 / 97 for one in completions]


def _deepspeed(case: dict[str, Any]) -> dict[str, Any] | None:
    if "stage" not in case:
        return None
    zero: dict[str, Any] = {"stage": case["stage"]}
    if case["stage"] == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
        for key in ("prefetch_bucket_size", "param_persistence_threshold"):
            zero[f"stage3_{key}"] = "auto"
        zero["reduce_bucket_size"] = "auto"
    if case.get("offload"):
        sections = ("optimizer", "param") if case["stage"] == 3 else ("optimizer",)
        zero |= {f"offload_{one}": {"device": "cpu"} for one in sections}
    section = {"penstock": case["section"]} if "section" in case else {}
    return section | {
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
    }


def _arguments(case: dict[str, Any], place: pathlib.Path) -> Any:
    given: dict[str, Any] = {
        "output_dir": str(place),
        "use_cpu": not torch.cuda.is_available(),
        "bf16": False,
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "learning_rate": 5e-3,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "seed": 1,
        "disable_tqdm": True,
        "ddp_timeout": 60,
    }
    if case["trainer"] in GENERATING:
        given |= {"num_generations": 4, "max_completion_length": 6, "beta": 0.05}
    kind = KINDS[case["trainer"]][1]
    return kind(**(given | case.get("options", {})), deepspeed=_deepspeed(case))


def _trainer(case: dict[str, Any], folder: pathlib.Path, name: str) -> Any:
    options: dict[str, Any] = {}
    if case.get("lora"):
        task = "SEQ_CLS" if case["trainer"] == "reward" else "CAUSAL_LM"
        options["peft_config"] = peft.LoraConfig(
            r=4, target_modules=["q_proj", "v_proj"], task_type=task
        )
    if case["trainer"] in GENERATING:
        options["reward_funcs"] = str(folder / "judge") if case.get("judge") else spread
    model = "judge" if case["trainer"] == "reward" else "policy"
    arguments = _arguments(case, folder / name)
    return KINDS[case["trainer"]][0](
        model=str(folder / model),
        args=arguments,
        train_dataset=data(case["trainer"], folder / f"data_{name}"),
        processing_class=tokenizer(),
        **options,
    )


def _saved(trainer: Any, place: pathlib.Path) -> dict[str, Any]:
    """Names of the files, and each saved tensor's sum."""
    from safetensors.torch import load_file  # noqa: PLC0415

    trainer.save_model()
    _meet()
    found: dict[str, Any] = {"files": sorted(one.name for one in place.iterdir())}
    for path in place.glob("*.safetensors"):
        state = load_file(path)
        found["saved"] = {name: one.double().sum().item() for name, one in sorted(state.items())}
    return found


def run(name: str, folder: pathlib.Path) -> dict[str, Any]:
    """Losses and norms of a case, and the sums of the weights that it saves."""
    case = CASES[name]
    AcceleratorState._reset_state()
    unset_hf_deepspeed_config()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)  # the case before may have set it
    transformers.set_seed(1)
    trainer = _trainer(case, folder, name)
    trainer.train()
    lines = [one for one in trainer.state.log_history if "loss" in one]
    found: dict[str, Any] = {
        "losses": [one["loss"] for one in lines],
        "norms": [one.get("grad_norm") for one in lines],
        "device": str(trainer.model.device),
    }
    for key in ("rewards/margins", "kl", "reward", "mean_token_accuracy"):
        if key in lines[0]:
            found[key] = [one[key] for one in lines]
    if case.get("save"):
        found |= _saved(trainer, folder / name)
    trainer.accelerator.free_memory()
    return found


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    transformers.logging.set_verbosity_error()
    _arguments(CASES["plain-sft"], folder / "none")  # makes the process group
    if int(os.environ.get("RANK", "0")) == 0:
        write_models(folder)
    _meet()
    report(sys.argv[2:] or CASES, lambda name: run(name, folder))


if __name__ == "__main__":
    main()
