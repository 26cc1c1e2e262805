"""What a body trains: an engine with this rank's samples, or plain torch with all of them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from idioms import nets
from idioms.table import Cell, Idiom

Tensors = dict[str, torch.Tensor]
# A large eps: a gradient that is as good as zero moves nothing by its rounding.
ADAMW = {"lr": 2e-2, "eps": 0.1, "weight_decay": 0.1}
SAMPLES = 4  # of a micro-batch, on all ranks together


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, **ADAMW)


def made(given: Any, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer, or what makes it of the parameters that train."""
    if isinstance(given, torch.optim.Optimizer):
        return given
    return given([p for p in model.parameters() if p.requires_grad])


class PlainEngine:
    """What of the engine's interface the bodies use. In bf16 it keeps fp32 masters of what trains:
    a step makes the elements that were edited the masters', and updates these."""

    def __init__(self, model: nn.Module, optimizer: Any, scheduler: Any, cell: Cell):
        self.module = model
        self.optimizer = made(optimizer, model)
        if scheduler is not None and not hasattr(scheduler, "step"):
            scheduler = scheduler(self.optimizer)
        self.lr_scheduler = scheduler
        self.accumulate, self.seen, self.closed = cell.accumulate, 0, False
        self.masters: dict[nn.Parameter, torch.Tensor] = {}
        self.published: dict[nn.Parameter, torch.Tensor] = {}
        if cell.precision == "bf16":
            for parameter in model.parameters():
                if parameter.requires_grad:
                    self.masters[parameter] = parameter.data.clone()
                if parameter.is_floating_point():
                    parameter.data = parameter.data.bfloat16()
                self.published[parameter] = parameter.data.clone()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        before = self.arrived()
        loss.backward(**options)
        self.seen += self.arrived() != before

    def arrived(self) -> list[tuple[int, int] | None]:
        """Other values once a gradient has come."""
        gradients = [parameter.grad for parameter in self.module.parameters()]
        return [None if g is None else (id(g), g._version) for g in gradients]

    @property
    def divisor(self) -> int:
        return max(1, min(self.seen, self.accumulate))

    def full_grads(self) -> Tensors:
        """Averaged over the window, in fp32."""
        trained = self.module.named_parameters()
        return {n: p.grad.float() / self.divisor for n, p in trained if p.grad is not None}

    def set_grads(self, gradients: Mapping[str, torch.Tensor]) -> None:
        for name, gradient in gradients.items():
            parameter = self.module.get_parameter(name)
            parameter.grad = (gradient * self.divisor).to(parameter.dtype)

    def take_edits(self) -> None:
        for parameter, master in self.masters.items():
            edited = parameter.data != self.published[parameter]
            master[edited] = parameter.data.float()[edited]
            self.published[parameter] = parameter.data.clone()

    def step(self, force: bool = False) -> bool:
        if not force and self.seen < self.accumulate and self.accumulate > 1:
            return False
        self.take_edits()
        low = {parameter: parameter.data for parameter in self.masters}
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is not None:
                    parameter.grad = None
                    parameter.data = self.masters.get(parameter, parameter.data)
                    parameter.grad = gradient.to(parameter.dtype) / self.divisor
        self.optimizer.step()
        self.seen = 0
        for parameter in self.module.parameters():
            parameter.grad = None
        for parameter, values in low.items():
            values.copy_(self.masters[parameter])
            parameter.data = values
            self.published[parameter] = values.clone()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        return True

    @contextlib.contextmanager
    def gathered(self, params: Any = None, write: bool = False) -> Iterator[None]:
        yield

    def state_dict(self, rank0_only: bool = True) -> Tensors:
        self.take_edits()
        own = {p.data_ptr(): master for p, master in self.masters.items()}
        state = {}
        for name, value in self.module.state_dict().items():
            if isinstance(value, torch.Tensor):
                value = own.get(value.data_ptr(), value).detach()
                value = value.float() if value.is_floating_point() else value.clone()
            state[name] = value
        return state

    def save(self, _folder: str) -> None:
        """As the engine's; in fp32 alone, for no masters are saved."""
        self.saved = copy.deepcopy((self.module.state_dict(), self.optimizer.state_dict()))

    def load(self, _folder: str) -> None:
        state, optimizer = self.saved
        self.module.load_state_dict(state)
        self.optimizer.load_state_dict(optimizer)

    def close(self, gather: bool = True) -> None:
        self.closed = True


class Trial:
    """What a body is given.

    Attributes:
        plain: this is torch by itself.
        engine: what the last `start()` returned.
        losses: the mean over the samples, of every `loss()`; they must agree.
    """

    def __init__(self, cell: Cell, plain: bool, folder: str = ""):
        self.cell, self.plain, self.folder = cell, plain, folder
        self.rank = 0 if plain else dist.get_rank()
        self.world = 1 if plain else cell.world
        self.engine: Any = None
        self.engines: list[Any] = []
        self.closed: list[int] = []
        self.starts: list[Tensors] = []
        self.losses: list[float] = []

    # ---- set-up

    def start(
        self,
        model: nn.Module | None = None,
        optimizer: Any = adamw,
        lr_scheduler: Any = None,
        **config: Any,
    ) -> Any:
        """An engine for the model; `config` is for the engine alone."""
        model = nets.build() if model is None else model
        try:
            self.starts.append(tensors(model.state_dict()))
        except (RuntimeError, ValueError):  # of no values; the engine is to say so
            self.starts.append({})
        if self.plain:
            self.engine = PlainEngine(model, optimizer, lr_scheduler, self.cell)
        else:
            import penstock  # noqa: PLC0415 - plain torch does without

            self.engine = penstock.initialize(
                model,
                self.cell.config(self.folder) | config,
                optimizer=made(optimizer, model),
                lr_scheduler=lr_scheduler,
            )
        self.engines.append(self.engine)
        return self.engine

    @property
    def model(self) -> Any:
        return self.engine.module

    @property
    def optimizer(self) -> Any:
        return self.engine.optimizer

    # ---- training

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This trial's samples of a micro-batch."""
        features, targets = nets.batch(step, SAMPLES)
        mine = slice(self.rank, None, self.world)
        return features[mine], targets[mine]

    def steps(self, count: int, start: int = 0) -> range:
        """Micro-batches of so many steps."""
        return range(start * self.cell.accumulate, (start + count) * self.cell.accumulate)

    def note(self, loss: torch.Tensor) -> torch.Tensor:
        self.losses.append(float(loss.detach()))
        return loss

    def loss(self, step: int, forward: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Any:
        """Of `forward`, by default the engine, on a micro-batch."""
        features, targets = self.batch(step)
        output = (forward or self.engine)(features)
        return self.note(F.mse_loss(output.float(), targets))

    def train(self, count: int, start: int = 0) -> None:
        """So many steps of the ordinary loop."""
        for step in self.steps(count, start):
            self.engine.backward(self.loss(step))
            self.engine.step()

    # ---- the end

    def close(self, engine: Any = None, **options: Any) -> None:
        engine = engine or self.engine
        self.closed.append(id(engine))
        engine.close(**options)

    def finish(self) -> dict[str, Any]:
        """What must agree with the other trial: the weights, and what close() leaves."""
        weights, left = [], []
        for engine in self.engines:
            closed = id(engine) in self.closed
            weights.append({} if closed else tensors(engine.state_dict()))
            if not closed:
                self.close(engine)
            left.append(tensors(engine.module.state_dict()))
        start = self.starts
        return {"weights": weights, "left": left, "start": start, "losses": self.losses}

    def give_up(self) -> None:
        """After an error."""
        for engine in self.engines:
            if id(engine) not in self.closed:
                with contextlib.suppress(Exception):
                    self.close(engine, gather=False)


def tensors(state: Mapping[str, Any]) -> Tensors:
    return {name: v.detach().clone() for name, v in state.items() if isinstance(v, torch.Tensor)}


def all_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Those that train, whatever the model's own `parameters` says."""
    found = {p for m in _modules(model) for p in m._parameters.values() if p is not None}
    return [p for p in found if p.requires_grad]


def _modules(model: nn.Module) -> Iterator[nn.Module]:
    yield model
    for child in model._modules.values():
        if child is not None:
            yield from _modules(child)


def values(numbers: Any) -> Any:
    """Tensors, numbers and lists of them, as fp32 tensors by name."""
    if isinstance(numbers, dict):
        return {str(key): values(value) for key, value in numbers.items()}
    if isinstance(numbers, (list, tuple)):
        return {str(key): values(value) for key, value in enumerate(numbers)}
    return torch.as_tensor(numbers).detach().float().clone()


def run(idiom: Idiom, cell: Cell, plain: bool, folder: str = "") -> dict[str, Any]:
    """Everything that comes of one row in one cell."""
    trial = Trial(cell, plain, folder)
    torch.manual_seed(5)
    try:
        numbers = idiom.body(trial) or {}
        return trial.finish() | {"numbers": values(numbers)}
    except BaseException as error:
        text = told(error)
        trial.give_up()
        if text is None:
            raise RuntimeError(f"a {type(error).__name__} whose text cannot be read") from None
        raise


def told(error: BaseException) -> str | None:
    """An error's text, which may hold a parameter that cannot be read."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - whatever it is
        return None
