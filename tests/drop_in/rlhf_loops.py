"""Loops of RLHF projects in their own style, each with several engines in one process.

A loop gets the package `deepspeed`, or plain_deepspeed, a folder with rlhf_models.write_models(),
and options. It returns its losses and the sizes of the weights that it leaves.
"""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import torch
import torch.distributed as dist
import transformers
from rlhf_models import (
    PROMPT,
    ROWS,
    Lora,
    Scored,
    answered,
    clipped_loss,
    groups,
    ids,
    is_sharded,
    log_probs,
    missing,
    moving_average,
    policy,
    pretrained,
    size,
    whole_state,
    with_lora,
)
from transformers.integrations.deepspeed import HfDeepSpeedConfig

STEPS = 3


# ---- DeepSpeed-Chat


def _chat_config(stage: int, offload: bool, trains: bool = True, windows: int = 1) -> Any:
    device = {"device": "cpu" if offload else "none"}
    zero = {
        "stage": stage,
        "stage3_param_persistence_threshold": 1e4,
        "offload_param": dict(device),
        "memory_efficient_linear": False,
    }
    if trains:
        zero |= {
            "overlap_comm": True,
            "offload_optimizer": dict(device),
            "stage3_max_live_parameters": 3e7,
            "stage3_prefetch_bucket_size": 3e7,
        }
    return {
        "train_batch_size": ROWS * windows * dist.get_world_size(),
        "train_micro_batch_size_per_gpu": ROWS,
        "steps_per_print": 10,
        "zero_optimization": zero,
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
    }


def _chat_engine(ds: Any, model: Any, config: Any, offload: bool, rate: float = 1e-3) -> Any:
    kind = ds.ops.adam.DeepSpeedCPUAdam if offload else ds.ops.adam.FusedAdam
    optimizer = kind(groups(model, 0.01), lr=rate, betas=(0.9, 0.95))
    schedule = transformers.get_scheduler("cosine", optimizer, 1, 8)
    return ds.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)[0]


def _grown(ds: Any, model: Any, config: Any) -> Any:
    """With an embedding of a multiple of 8 rows; the new rows are zero."""
    before = model.config.vocab_size
    known = HfDeepSpeedConfig(config) if is_sharded(ds, config) else None
    model.resize_token_embeddings(8 * -(-before // 8))
    del known
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        if layer is None:
            continue
        with ds.zero.GatheredParameters(layer.weight, modifier_rank=0):
            layer.weight.data[before:] = 0
    return model


def _fused(ds: Any, model: torch.nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, Lora):
            own = [module.weight, module.lora_right_weight, module.lora_left_weight]
            with ds.zero.GatheredParameters(missing(own, ds), modifier_rank=0):
                module.fuse()


def chat_sft(
    ds: Any, folder: pathlib.Path, stage: int, offload: bool = False, lora: bool = False
) -> list[float]:
    """Step 1: supervised fine-tuning, evaluated before and after."""
    rank = dist.get_rank()
    config = _chat_config(stage, offload, windows=2)
    model = _grown(ds, policy(ds, folder, config), config)
    if lora:
        model = with_lora(model, "layers.")
        model.enable_input_require_grads()
    engine = _chat_engine(ds, model, config, offload)
    engine.gradient_checkpointing_enable()
    found = []

    def evaluate() -> None:
        engine.eval()
        with torch.no_grad():
            loss = engine(ids(7, 90), labels=ids(7, 90)).loss
        dist.all_reduce(loss)
        found.append(loss.item())

    evaluate()
    engine.train()
    for step in range(2 * STEPS):
        batch = ids(rank, step)
        loss = engine(input_ids=batch, labels=batch, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    engine.tput_timer.update_epoch_count()
    evaluate()
    if lora:
        _fused(ds, engine)
        evaluate()
    if dist.get_rank() == 0:
        torch.save(engine.module.state_dict(), folder / "sft.bin")  # of ZeRO-3 the buffers alone
    found.append(size(whole_state(ds, engine.module)))
    engine.destroy()
    return found


def _scored(ds: Any, folder: pathlib.Path, config: Any, state: Any = None) -> Any:
    """A model with a value head. With a state it is built from its config and then loaded module by
    module: the file's values are on rank 0."""
    base = folder / "base"
    if state is None:
        made = pretrained(ds, transformers.AutoModel, base, config)
    else:
        known = HfDeepSpeedConfig(config) if is_sharded(ds, config) else None
        made = transformers.AutoModel.from_config(transformers.AutoConfig.from_pretrained(base))
        del known
    torch.manual_seed(5)
    model = Scored(made)
    for name, module in model.named_modules() if state is not None else ():
        own = dict(module.named_parameters(prefix=name, recurse=False))
        if not own:
            continue
        with ds.zero.GatheredParameters([own[one] for one in own if one in state], modifier_rank=0):
            if dist.get_rank() == 0 or hasattr(ds, "PLAIN"):
                prefix = f"{name}." if name else ""
                module._load_from_state_dict(state, prefix, {}, True, [], [], [])
    return model


def chat_reward(ds: Any, folder: pathlib.Path, stage: int, offload: bool = False) -> list[float]:
    """Step 2: a reward model from pairs, saved, built again from its config and loaded."""
    config = _chat_config(stage, offload)
    engine = _chat_engine(ds, _scored(ds, folder, config), config, offload)
    found = []
    for step in range(STEPS):
        loss = engine(ids(dist.get_rank(), step, 2 * ROWS))
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    state = whole_state(ds, engine.module)
    engine.destroy()
    reads = _chat_config(3 if stage == 3 else 0, offload, trains=False)
    again = ds.initialize(model=_scored(ds, folder, reads, state), config=reads)[0]
    again.eval()
    with torch.no_grad():
        found += again.values(ids(7, 91)).flatten().tolist()
    again.destroy()
    return found


class _Chat:
    """The four or five engines of step 3."""

    def __init__(self, ds: Any, folder: pathlib.Path, stages: tuple[int, int], has: Any) -> None:
        offload = "offload" in has
        config = _chat_config(stages[0], offload, windows=2 if "text" in has else 1)
        reads = [_chat_config(3 if one == 3 else 0, False, trains=False) for one in stages]
        model = policy(ds, folder, config)
        if "lora" in has:
            model = with_lora(model, "layers.")
        self.actor = _chat_engine(ds, model, config, offload)
        self.ref = ds.initialize(model=policy(ds, folder, reads[0]), config=reads[0])[0]
        self.mean: Any = None
        if "ema" in has:
            model = policy(ds, folder, reads[0])
            model = with_lora(model, "layers.") if "lora" in has else model
            self.mean = ds.initialize(model=model, config=reads[0])[0]
        config = _chat_config(stages[1], offload)
        torch.manual_seed(17)
        state = Scored(transformers.AutoModel.from_pretrained(folder / "base")).state_dict()
        self.critic = _chat_engine(ds, _scored(ds, folder, config, state), config, offload, 3e-3)
        self.reward = ds.initialize(model=_scored(ds, folder, reads[1], state), config=reads[1])[0]
        self.synced = stages[0] == 3 and not hasattr(ds, "PLAIN")

    def experience(self, prompts: torch.Tensor) -> dict[str, torch.Tensor]:
        for one in (self.actor, self.ref, self.critic, self.reward):
            one.eval()
        seen = answered(self.actor.module, prompts, self.synced)
        self.actor.train()
        self.critic.train()
        mask = seen.ne(0).long()
        with torch.no_grad():
            old = log_probs(self.actor(seen, attention_mask=mask).logits, seen)
            base = log_probs(self.ref(seen, attention_mask=mask).logits, seen)
            score = self.reward.values(seen)[:, -1]
            values = self.critic.values(seen)[:, :-1]
        gain = -0.1 * (old - base)
        gain[:, -1] += score.clamp(-5, 5)
        total = gain.flip(1).cumsum(1).flip(1)
        start = PROMPT - 1
        return {
            "seen": seen,
            "mask": mask[:, 1:][:, start:],
            "old": old[:, start:],
            "advantage": (total - values)[:, start:],
            "returns": total[:, start:],
        }

    def update(self, one: dict[str, torch.Tensor]) -> list[float]:
        start = PROMPT - 1
        new = log_probs(self.actor(one["seen"], use_cache=False).logits, one["seen"])[:, start:]
        loss = clipped_loss(new, one["old"], one["advantage"], one["mask"])
        self.actor.backward(loss)
        self.actor.step()
        values = self.critic.values(one["seen"])[:, :-1][:, start:]
        wrong = ((values - one["returns"]) ** 2 * one["mask"]).sum() / one["mask"].sum()
        self.critic.backward(wrong)
        self.critic.step()
        return [loss.item(), wrong.item()]

    def text(self, batch: torch.Tensor) -> float:
        loss = self.actor(input_ids=batch, labels=batch, use_cache=False).loss
        self.actor.backward(0.3 * loss)
        self.actor.step()
        return loss.item()


def chat_ppo(
    ds: Any, folder: pathlib.Path, stages: tuple[int, int], has: tuple[str, ...] = ()
) -> list[float]:
    """Step 3: PPO. `stages`: of the actor and of the critic. `has`: "offload", "lora", "ema" and
    "text", which adds a supervised loss to the actor's window."""
    rank = dist.get_rank()
    chat = _Chat(ds, folder, stages, has)
    found: list[float] = []
    for step in range(STEPS):
        one = chat.experience(ids(rank, step, length=PROMPT))
        found.append(float(one["seen"].sum()))
        for _ in range(2):
            found += chat.update(one)
            if "text" in has:
                found.append(chat.text(ids(rank, 50 + step)))
            if chat.mean is not None:
                moving_average(ds, chat.actor, chat.mean, 0.9)
    if "lora" in has:
        _fused(ds, chat.actor)
    engines = (chat.actor, chat.critic, chat.mean)
    found += [size(whole_state(ds, one.module)) for one in engines if one is not None]
    for one in (*engines, chat.ref, chat.reward):
        if one is not None:
            one.destroy()
    return found


# ---- OpenRLHF


class Actor(torch.nn.Module):
    """A policy; `model` is first a model and then its engine."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        mask = seen.ne(0).long()
        places = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
        return log_probs(self.model(seen, attention_mask=mask, position_ids=places)["logits"], seen)


class Critic(transformers.LlamaPreTrainedModel):
    """A value head over the body of a checkpoint that has none."""

    base_model_prefix = "model"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = transformers.LlamaModel(config)
        self.score = torch.nn.Linear(config.hidden_size, 1, bias=False)
        self.post_init()

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        hidden = self.model(seen, attention_mask=seen.ne(0).long()).last_hidden_state
        return self.score(hidden).squeeze(-1)[:, :-1]


def _open_config(stage: int, offload: bool, trains: bool = True) -> dict[str, Any]:
    auto = ("max_live_parameters", "max_reuse_distance", "param_persistence_threshold")
    zero: dict[str, Any] = {"stage": stage} | {f"stage3_{one}": "auto" for one in auto}
    zero["offload_param"] = {"device": "cpu" if offload and not trains else "none"}
    config: dict[str, Any] = {
        "steps_per_print": 100,
        "zero_optimization": zero,
        "bf16": {"enabled": False},
        "fp16": {"enabled": False},
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
        "compile": {"deepcompile": False},
        "tensor_parallel": {"autotp_size": 1},
        "train_micro_batch_size_per_gpu": ROWS,
        "train_batch_size": ROWS * dist.get_world_size(),
    }
    if not trains:
        return config
    zero["offload_param"]["device"] = "none"
    zero["offload_optimizer"] = {"device": "cpu" if offload else "none", "pin_memory": True}
    for key in ("sub_group_size", "stage3_prefetch_bucket_size", "reduce_bucket_size"):
        zero[key] = "auto"
    zero |= {"zero_hpz_partition_size": 1, "zero_quantized_weights": False}
    zero |= {"zero_quantized_gradients": False}
    if stage == 3:
        zero["reduce_scatter"] = True
    options = {"lr": 2e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.01}
    return config | {
        "data_types": {"grad_accum_dtype": None},
        "checkpoint": {"load_universal": False},
        "optimizer": {"type": "AdamW", "params": options},
    }


def _open_engine(ds: Any, model: Any, config: dict[str, Any]) -> Any:
    schedule = functools.partial(
        transformers.get_scheduler,
        "cosine_with_min_lr",
        num_warmup_steps=1,
        num_training_steps=10,
        scheduler_specific_kwargs={"min_lr_rate": 0.1},
    )
    return ds.initialize(
        model=model,
        optimizer=None,
        model_parameters=groups(model, 0.01),
        lr_scheduler=schedule,
        config=config,
        args={"local_rank": -1},
        dist_init_required=True,
    )[0]


def _critic(ds: Any, folder: pathlib.Path, config: dict[str, Any], seed: int) -> Any:
    model = pretrained(ds, Critic, folder / "base", config)
    with ds.zero.GatheredParameters([model.score.weight], modifier_rank=0):
        generator = torch.Generator().manual_seed(seed)
        model.score.weight.data.normal_(std=0.2, generator=generator)
    return model


def _sleep(ds: Any, engine: Any) -> None:
    """Moves the states to the host, as between training and generation on one device."""
    if hasattr(ds, "PLAIN"):
        return
    from deepspeed.runtime.zero.offload_config import (  # noqa: PLC0415 - not in plain runs
        OffloadDeviceEnum,
        OffloadStateTypeEnum,
    )

    names = ("optim_states", "contiguous_grad_buffer", "hp_params", "lp_grads")
    engine.optimizer.offload_states(
        include=[OffloadStateTypeEnum[one] for one in names],
        device=OffloadDeviceEnum.cpu,
        pin_memory=False,
        non_blocking=True,
    )
    engine.empty_partition_cache()


def open_rlhf(
    ds: Any, folder: pathlib.Path, stage: int, offload: bool = False, sleep: bool = False
) -> list[float]:
    """PPO with an actor, its moving average, a critic, a reference and a reward model. The policy's
    weights are read one by one, as for an inference server."""
    rank = dist.get_rank()
    trains = _open_config(stage, offload)
    reads = _open_config(3 if stage == 3 else 0, True, trains=False)
    actor, mean, ref = (Actor(policy(ds, folder, one)) for one in (trains, reads, reads))
    actor.model = _open_engine(ds, actor.model, trains)
    for one in (mean, ref):
        one.model = ds.initialize(model=one.model, args={"local_rank": -1}, config=reads)[0]
        one.eval()
    critic = _open_engine(ds, _critic(ds, folder, trains, 1), trains)
    reward = ds.initialize(model=_critic(ds, folder, reads, 2), config=reads)[0]
    found: list[float] = []
    engines = (actor.model, critic)
    for step in range(STEPS):
        actor.eval()
        seen = answered(
            actor.model.module, ids(rank, step, length=PROMPT), stage == 3 and rank >= 0
        )
        mask = seen.ne(0)[:, 1:].float()
        with torch.no_grad():
            old, base = actor(seen), ref(seen)
            score, values = reward(seen)[:, -1:], critic(seen)
        returns = score - 0.1 * (old - base)
        for one in engines if sleep else ():
            one.reload_states(non_blocking=True)
        actor.train()
        loss = clipped_loss(actor(seen), old, returns - values, mask)
        actor.model.backward(loss)
        actor.model.step()
        moving_average(ds, actor.model, mean.model, 0.9)
        wrong = ((critic(seen) - returns) ** 2 * mask).mean()
        critic.backward(wrong)
        critic.step()
        found += [loss.item(), wrong.item(), float(actor.model.get_global_grad_norm())]
        for one in engines if sleep else ():
            _sleep(ds, one)
        sent = 0.0
        for param in actor.model.module.parameters():
            with ds.zero.GatheredParameters([param], enabled=is_sharded(ds, trains)):
                sent += param.data.double().abs().sum().item()
        found.append(sent)
    if sleep:
        actor.model.reload_states(non_blocking=True)
    found += [
        _exported(ds, actor.model, folder, stage),
        size(whole_state(ds, mean.model.module)),
    ]
    for one in (actor.model, mean.model, ref.model, critic, reward):
        one.destroy()
    return found


def _exported(ds: Any, engine: Any, folder: pathlib.Path, stage: int) -> float:
    """The size of the weights that rank 0 saves, loaded again."""
    place, model = folder / "exported", engine.module
    if stage == 3:
        state = engine._consolidated_16bit_state_dict()
    else:
        state = ds.checkpoint.utils.clone_tensors_for_torch_save(model.state_dict())
    if dist.get_rank() == 0:
        assert set(model.state_dict()) <= set(state)
        model.save_pretrained(place, state_dict=state)
    dist.barrier()
    saved = transformers.AutoModelForCausalLM.from_pretrained(place)
    dist.barrier()
    return size(dict(saved.named_parameters()))


# ---- open-instruct


def _instruct_train(ds: Any, engine: Any, ref: Any, steps: range) -> list[float]:
    """Two micro-batches a step: the loop says which one ends the window."""
    rank, world = dist.get_rank(), dist.get_world_size()
    found = []
    for step in steps:
        seen = answered(engine.module, ids(rank, step, 2 * ROWS, PROMPT), not hasattr(ds, "PLAIN"))
        generator = torch.Generator().manual_seed(step)
        gain = torch.randn(2 * ROWS, 1, generator=generator)
        tokens = seen.ne(0)[:, 1:].sum().float()
        dist.all_reduce(tokens)
        with torch.no_grad():
            base = log_probs(ref(seen).logits, seen)
            old = log_probs(engine(seen).logits, seen)
        for part in range(2):
            rows = slice(part * ROWS, (part + 1) * ROWS)
            new = log_probs(engine(seen[rows]).logits, seen[rows])
            ratio = (new - old[rows]).exp()
            away = (base[rows] - new).exp() - (base[rows] - new) - 1
            mask = seen[rows].ne(0)[:, 1:]
            loss = ((0.05 * away - gain[rows] * ratio) * mask).sum() / tokens * world
            engine.set_gradient_accumulation_boundary(part == 1)
            engine.backward(loss)
            if part == 1:
                engine.step()
            found.append(loss.item())
        found.append(float(engine.get_global_grad_norm()))
        _towards(ds, engine.module, ref.module)
    return found


def _towards(ds: Any, model: torch.nn.Module, ref: torch.nn.Module) -> None:
    """Moves the reference towards the policy; rank 0 writes."""
    for one, other in zip(model.parameters(), ref.parameters(), strict=True):
        with ds.zero.GatheredParameters([one, other], modifier_rank=0):
            if dist.get_rank() == 0 or not hasattr(other, "ds_id"):
                other.data.mul_(0.8).add_(one.data, alpha=0.2)


def _instruct_policy(ds: Any, folder: pathlib.Path, stage: int, offload: bool) -> Any:
    config = _open_config(stage, offload)
    del config["optimizer"], config["train_batch_size"], config["compile"]
    config["zero_force_ds_cpu_optimizer"] = False
    config["data_types"] = {"grad_accum_dtype": "fp32"}
    model = policy(ds, folder, config)
    model.config.use_cache = False
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(groups(model, 0.01), lr=2e-3)
    schedule = transformers.get_scheduler("linear", optimizer, 1, 12)
    return ds.initialize(
        model=model,
        optimizer=optimizer,
        config=config | {"gradient_accumulation_steps": 1},
        lr_scheduler=schedule,
        dist_init_required=False,
    )[0]


def open_instruct(ds: Any, folder: pathlib.Path, stage: int, offload: bool = False) -> list[float]:
    """GRPO with a reference that follows the policy, saved, and resumed by a second engine."""
    reads = _open_config(3 if stage == 3 else 0, offload, trains=False)
    ref = ds.initialize(model=policy(ds, folder, reads), config=reads)[0]
    ref.eval()
    engine = _instruct_policy(ds, folder, stage, offload)
    found = _instruct_train(ds, engine, ref, range(2))
    place = str(folder / f"instruct{stage}")
    engine.save_checkpoint(place, tag="last", client_state={"training_step": 2})
    kept = whole_state(ds, ref.module)
    found += _instruct_train(ds, engine, ref, range(2, 4))
    engine.destroy()
    engine = _instruct_policy(ds, folder, stage, offload)
    _, state = engine.load_checkpoint(place, tag="last", load_module_strict=True)
    for name, param in ref.module.named_parameters():
        with ds.zero.GatheredParameters([param], modifier_rank=0):
            param.data.copy_(kept[name])
    first = state["training_step"]
    found += _instruct_train(ds, engine, ref, range(first, first + 2))
    found += [size(whole_state(ds, one.module)) for one in (engine, ref)]
    engine.destroy()
    ref.destroy()
    return found
