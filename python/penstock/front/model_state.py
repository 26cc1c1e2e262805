"""The model's own `state_dict()`, even if a class, an instance or a hook changes what it returns.

While it runs, the modules hold other tensors in place of their parameters: full values for
`Engine.state_dict()`, or tensors without values to find out what else a checkpoint must keep.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from penstock._native import ConfigError
from penstock.front import module_tree
from penstock.front.forward_guard import Hook

_METHODS = (
    "state_dict",
    "load_state_dict",
    "_save_to_state_dict",
    "_load_from_state_dict",
)
_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_EXTRA = "_extra_state"  # torch's key of get_extra_state()


def filled_state_dict(
    model: torch.nn.Module,
    full: Mapping[int, torch.Tensor],
    device: torch.device | str | None = None,
) -> Any:
    """Returns the model's state_dict() with the values in `full`, whose keys are ids of parameters.

    The values are not copied; other tensors, such as buffers, are copied to `device`.
    """
    with _replaced(model, full):
        found: Any = model.state_dict()
    if not isinstance(found, Mapping):
        return found
    ours = {_storage(value): value for value in full.values()}
    state: OrderedDict[str, Any] = OrderedDict()
    for name, value in found.items():
        if not isinstance(value, torch.Tensor):
            state[name] = value
        elif _storage(value) not in ours:  # a buffer, or from an override
            copied = value.detach().clone()
            state[name] = copied if device is None else copied.to(device)
        else:
            whole = ours[_storage(value)]
            state[name] = whole if _is_all_of(value, whole) else value
    state._metadata = getattr(found, "_metadata", OrderedDict())  # type: ignore[attr-defined]
    return state


class OwnState:
    """What `state_dict()` of a model returns besides parameters, buffers and `get_extra_state()`.

    It has the methods of a module with extra state, so that a checkpoint treats it as one.

    Attributes:
        kind: the class whose `state_dict()` is not torch's, or "".
    """

    NAME = "state_dict()"

    def __init__(self, engine: Any) -> None:
        self._model, self._tensor = engine.module, engine._tensor
        self.kind = overriding_class(self._model)

    def get_extra_state(self) -> dict[str, Any]:
        """Returns the values by key: numbers, strings, and lists and dicts of them.

        Raises ConfigError for a tensor, and if state_dict() needs the values of parameters.
        """
        return {key: value for key, value in self._found().items() if self._is_own(key, value)}

    def set_extra_state(self, values: Mapping[str, Any]) -> None:
        """Passes the values to the model's load_state_dict(). The parameters do not change."""
        with self._tensor, _replaced(self._model, _without_values(self._model)):
            self._model.load_state_dict({**self._state(), **values})

    def check_names(self) -> None:
        """Raises ConfigError if state_dict() has keys that are not names of the model."""
        found = self._found() if self.kind else {}
        names = {name for name, _ in module_tree.params_of(self._model, repeats=True)}
        names.update(name for name, _ in module_tree.named_buffers_of(self._model))
        others = [key for key in found if key not in names and not key.endswith(_EXTRA)]
        if others:
            raise ConfigError(
                f"[front::export_hf] state_dict() of {self.kind} has the key "
                f'"{others[0]}", but an export has only the names of parameters and buffers. Save '
                f"engine.state_dict() with safetensors.torch.save_file() instead"
            )

    def _found(self) -> Mapping[str, Any]:
        if not self.kind:
            return {}
        with self._tensor, _replaced(self._model, _without_values(self._model)):
            return self._state()

    def _state(self) -> Mapping[str, Any]:
        try:
            found: Any = self._model.state_dict()
        except Exception as error:
            raise ConfigError(
                f"[front::save] {self.kind} changes state_dict(), which raised "
                f"{type(error).__name__} when called without the parameters' values: {error}. The "
                f"engine cannot tell which values the class adds. Call "
                f"torch.save(engine.state_dict(), path), or return these values from "
                f"get_extra_state()"
            ) from error
        return found if isinstance(found, Mapping) else {}

    def _is_own(self, key: str, value: Any) -> bool:
        if isinstance(value, FakeTensor) or key.endswith(_EXTRA):
            return False
        if not isinstance(value, torch.Tensor):
            return True
        buffers = {_storage(one) for one in module_tree.buffers_of(self._model)}
        if _storage(value) in buffers or key in dict(module_tree.named_buffers_of(self._model)):
            return False
        raise ConfigError(
            f'[front::save] {self.kind} adds the tensor "{key}" to state_dict(), but a checkpoint '
            f"holds only parameters and buffers. Make it a buffer (register_buffer)"
        )


def extra_states(engine: Any) -> Iterator[tuple[str, Any]]:
    """Yields the modules with extra state by name, then the model's `OwnState` if it has values.

    Raises ConfigError if an `OwnState` has values and the model is a pipeline.
    """
    for name, module in module_tree.modules_of(engine.module):
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
            yield name, module
    own = OwnState(engine)
    if not own.get_extra_state():
        return
    if engine.config.mesh.pipeline > 1:
        raise ConfigError(
            f"[front::save] {own.kind} adds values to state_dict() that cannot be copied from "
            f"one stage to other stages yet. Keep these values outside of the model"
        )
    yield OwnState.NAME, own


def overriding_class(model: torch.nn.Module) -> str:
    """Returns the class of the first module whose state_dict() or load_state_dict() a method or a
    hook changes; "" if there is none."""
    for _, module in module_tree.modules_of(model):
        own = vars(module)
        methods = any(
            name in own or getattr(type(module), name) is not getattr(torch.nn.Module, name)
            for name in _METHODS
        )
        hooks = [hook for name in _HOOKS for hook in own.get(name, {}).values()]
        if methods or any(not isinstance(hook, Hook) for hook in hooks):
            return type(module).__name__
    return ""


def _is_all_of(value: torch.Tensor, whole: torch.Tensor) -> bool:
    same = value.shape == whole.shape and value.stride() == whole.stride()
    return same and value.data_ptr() == whole.data_ptr()


def _storage(value: torch.Tensor) -> int:
    return int(value.untyped_storage()._cdata)


@contextlib.contextmanager
def _replaced(model: torch.nn.Module, values: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """In the context, each parameter whose id is in `values` is replaced by one with that value."""
    made: dict[int, Any] = {}
    places = [
        (module._parameters, name, param)
        for _, module in module_tree.modules_of(model)
        for name, param in module._parameters.items()
        if id(param) in values
    ]
    try:
        for params, name, param in places:
            if id(param) not in made:
                made[id(param)] = _like(param, values[id(param)])
            params[name] = made[id(param)]
        yield
    finally:
        for params, name, param in places:
            params[name] = param


def _like(param: Any, value: torch.Tensor) -> torch.nn.Parameter:
    trains = bool(param.requires_grad) and value.is_floating_point()
    made = torch.nn.Parameter(value, requires_grad=trains)
    vars(made).update(vars(param))  # attributes that an override may read
    return made


def _without_values(model: torch.nn.Module) -> dict[int, torch.Tensor]:
    """Returns a tensor without values for each parameter, by its id."""
    # Only results that come from these tensors have no values. All other tensors of an override
    # keep their values.
    with FakeTensorMode(allow_non_fake_inputs=True):
        return {
            id(param): torch.empty(param.shape, dtype=param.dtype, device=param.device)
            for _, param in module_tree.params_of(model)
        }
