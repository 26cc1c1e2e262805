"""An ordinary Trainer script with a DeepSpeed config, as it is written for DeepSpeed.

    penstock run --as-deepspeed --nproc 2 examples/hf/train_trainer.py --deepspeed \
        examples/hf/configs/zero3.json --output_dir out

Without --deepspeed, the plain Trainer runs.
"""

from __future__ import annotations

import json
import pathlib
import sys

import torch
from models import build
from text import Bytes
from transformers import HfArgumentParser, Trainer, TrainingArguments

DEFAULTS = [
    *("--max_steps", "8", "--per_device_train_batch_size", "2"),
    *("--use_cpu", str(not torch.accelerator.is_available())),
    *("--learning_rate", "1e-3", "--logging_steps", "1", "--report_to", "none"),
    *("--save_strategy", "no", "--seed", "1", "--lr_scheduler_type", "linear"),
    *("--warmup_steps", "2", "--disable_tqdm", "true", "--weight_decay", "0.01"),
]


def main(argv: list[str] | None = None) -> list[dict[str, float]]:
    given = list(sys.argv[1:] if argv is None else argv)
    given = [one for one in given if not one.startswith("--local_rank")]
    name, resume = "gpt2", None
    for option in ("--model", "--resume"):
        if option in given:
            at = given.index(option)
            value = given[at + 1]
            del given[at : at + 2]
            name, resume = (value, resume) if option == "--model" else (name, value)
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(DEFAULTS + given)
    torch.manual_seed(0)
    trainer = Trainer(
        model_init=None,
        model=build(name),
        args=args,
        train_dataset=Bytes(count=128),
        eval_dataset=Bytes(first=128, count=16),
    )
    trainer.train(resume_from_checkpoint=resume)
    lines = [one for one in trainer.state.log_history if "loss" in one]
    lines.append(trainer.evaluate())
    trainer.save_model()
    if args.process_index == 0:
        (pathlib.Path(args.output_dir) / "log.json").write_text(json.dumps(lines, indent=1))
    trainer.accelerator.wait_for_everyone()  # until here, gloo's threads free Python's tensors
    return lines


if __name__ == "__main__":
    main()
