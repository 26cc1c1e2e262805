"""Reports to the core when a model's forwards begin and end. The caller of a forward may be the
engine, the model itself, one of its modules alone, or its `generate`.

The engine's hooks and replaced `forward` methods belong to the model's own module objects. A copy
or a pickle of the model has none of them and is a plain model.
"""

import contextlib
import copy
import dataclasses
import functools
import os
import sys
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from penstock._native import RuntimeFault
from penstock.front import buffer_dtypes, module_tree
from penstock.front.model_structure import Structure


def nothing(*_args: Any, **_kwargs: Any) -> None:
    """Replaces an engine's hook on a copy of the module."""


def _plain_hook() -> Callable[..., None]:
    return nothing


class Hook:
    """A forward hook of one module. It does nothing on copies of the module."""

    def __init__(self, module: torch.nn.Module, call: Callable[..., None]) -> None:
        self._module, self._call = id(module), call

    def __call__(self, module: torch.nn.Module, *others: Any) -> None:
        if id(module) == self._module and not torch.compiler.is_exporting():
            self._call(*others)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return nothing

    def __reduce__(self) -> Any:
        return _plain_hook, ()


class Forward:
    """Replaces a method of a module: a call becomes `around(method, *args, **kwargs)`.

    To callers, this object looks like the class's bound method. Each call looks that method up
    again, because the class may change. See [Note: Copies by dict].

    Args:
        module: the module.
        around: called instead of the method.
        name: name of the method.
        inside: objects that have replaced the method before call this one. Default: it calls them.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        around: Callable[..., Any],
        name: str = "forward",
        inside: bool = False,
    ) -> None:
        # Replace the compiled call, so that `around` stays outside of the compiled code.
        compiled = name == "forward" and module_tree.is_compiled_in_place(module)
        self._name = "_compiled_call_impl" if compiled else name
        self._module, self._around = module, around
        self._had = module.__dict__.get(self._name)  # None: the method is the class's
        outer = None  # the innermost of those that call this one, with `inside`
        while inside and isinstance(self._had, Forward):
            outer, self._had = self._had, self._had._had
        method = self._method(module)  # libraries inspect the signature, see __getattr__()
        self.__doc__, self.__module__ = method.__doc__, getattr(method, "__module__", __name__)
        if outer is None:
            module.__dict__[self._name] = self
        else:
            outer._had = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_exporting():  # exports a plain model
            return self._method(self._module)(*args, **kwargs)
        frame, caller = sys._getframe(1), self._module
        # Locals of other frames are not read: before Python 3.13, reading them would keep their
        # objects alive.
        if frame.f_code.co_filename == _TORCH_MODULES:
            caller = frame.f_locals.get("self", caller)
        if caller is self._module or not self._is_copied_to(caller):
            return self._around(self._method(self._module), *args, **kwargs)
        if caller._parameters is self._module._parameters:  # copy.copy(): the same weights
            return self._around(self._method(caller), *args, **kwargs)
        self._leave(caller)
        return getattr(caller, self._name)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the method: its name, its code, its defaults, `__self__`."""
        if name in ("_module", "_had", "_name"):  # not set yet
            raise AttributeError(name)
        return getattr(self._method(self._module), name)

    @property
    def __wrapped__(self) -> Any:
        """The class's bound method, whose signature `inspect` shows."""
        return self._method(self._module)

    @property
    def __func__(self) -> Callable[..., Any]:
        """The function that `types.MethodType` may bind again, to this module or to a different
        one."""
        method: Any = self._method(self._module)

        @functools.wraps(method.__func__)
        def function(module: Any, *args: Any, **kwargs: Any) -> Any:
            if module is self._module:
                return self(*args, **kwargs)
            return method.__func__(module, *args, **kwargs)

        return function

    def remove(self) -> None:
        """Restores the module's own method. If the user has replaced this method, the user's method
        stays. If that method calls this one, this one calls the module's own."""
        self._around = _alone
        outer = self._module.__dict__.get(self._name)
        if outer is self:
            self._leave(self._module, self._had)
            return
        while isinstance(outer, Forward) and outer._had is not self:
            outer = outer._had
        if isinstance(outer, Forward):
            outer._had = self._had

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self._had is not None:
            return copy.deepcopy(self._had, memo)
        return self._plain(memo.get(id(self._module), self._module))

    def __reduce__(self) -> Any:
        if self._had is not None:
            return copy.copy, (self._had,)
        return getattr, (self._module, self._name)  # unpickled before the module's attributes

    def _plain(self, module: torch.nn.Module) -> Any:
        return types.MethodType(getattr(type(module), self._name), module)

    def _method(self, module: Any) -> Any:
        """Returns what the module's method would be without this one."""
        if isinstance(self._had, Forward):  # inside this one, of a cut or tiled layer
            return self._had if module is self._module else self._had._method(module)
        if self._had is not None:
            return self._had
        for kind in type(module).__mro__:
            if self._name in vars(kind):
                found = vars(kind)[self._name]
                bind = getattr(type(found), "__get__", None)
                return found if bind is None else bind(found, module, type(module))
        return type(module).__getattr__(module, self._name)

    def _is_copied_to(self, module: Any) -> bool:
        """Whether the module has this method because its `__dict__` is a copy."""
        if not isinstance(module, torch.nn.Module) or vars(module).get(self._name) is not self:
            return False
        ours = vars(self._module)
        return any(
            value is ours.get(name) for name, value in vars(module).items() if type(value) in _DICTS
        )

    def _leave(self, module: torch.nn.Module, had: Any = None) -> None:
        """Removes this method from a module and restores `had` (default: what the user had set)."""
        if had is None:
            had = self._had
            while isinstance(had, Forward):
                had = had._had
        if had is None:
            del module.__dict__[self._name]
        else:
            module.__dict__[self._name] = had


# [Note: Copies by dict] Libraries copy a module with `type(module).__new__` and a copy of its
# `__dict__`, to give the copy other parameters (learn2learn, data parallel replicas). The copy then
# has the original's `Forward` object, which does not know which module was called. But the calling
# frame is torch's, and its `self` is this module. The copy is a plain module: at its first call it
# loses the engine's methods.
_TORCH_MODULES = torch.nn.Module._call_impl.__code__.co_filename
_DICTS = (dict, OrderedDict)


@dataclasses.dataclass
class Pace:
    """How ranks run forwards.

    Attributes:
        uneven: inside `uneven()`. There, other ranks may run no forward while this rank runs one.
        resident: number of open `inference()` contexts whose parameters are whole. There, ranks
            exchange nothing and need not run the same forwards.
        staged: each rank runs a part of the model (a pipeline).
    """

    uneven: bool = False
    resident: int = 0
    staged: bool = False


class Forwards:
    """The forwards of an engine's model, one at a time. A nested call is part of the outer one."""

    def __init__(
        self,
        module: torch.nn.Module,
        core: Any,
        structure: Structure,
        pace: Pace,
        installed: list[Any],
        around: Any,
    ) -> None:
        self._core, self._structure, self._pace = core, structure, pace
        self._model, self._around = module, around  # around.begin() and .end() at each forward
        self._open = False  # whether a forward runs
        self._process, self._thread = os.getpid(), 0  # process of the engine, thread of the forward
        self._installed = installed  # the engine's hooks on modules
        core.calls.name_threads(_name_of_thread)
        self._installed.append(Forward(module, self.run))
        self._installed.append(Forward(module, self._zero_grad, "zero_grad"))
        generate = getattr(module, "generate", None)
        if core.needs_unit_events and callable(generate):
            # `generate` may belong to an inner module and come from `__getattr__`.
            owner = getattr(generate, "__self__", module)
            owner = owner if isinstance(owner, torch.nn.Module) else module
            self._installed.append(Forward(owner, self._generate, "generate"))

    def _zero_grad(self, method: Any, *args: Any, **kwargs: Any) -> None:
        """torch's method finds no gradients to set to zero, because the engine has them."""
        none = args[0] if args else kwargs.get("set_to_none", True)
        if none or getattr(method, "__func__", None) is not torch.nn.Module.zero_grad:
            return method(*args, **kwargs)  # type: ignore[no-any-return]
        self._core.zero_grad(False)

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls `forward` as a forward of the whole model.

        Raises RuntimeFault if another thread is in a forward, a backward or a step.
        """
        if self._runs_here():
            return forward(*args, **kwargs)
        if in_backward():
            return self._run(forward, args, kwargs)
        self._around.before(functools.partial(self.run, forward), args, kwargs)
        self._core.calls.enter("forward")
        try:
            return self._run(forward, args, kwargs)
        finally:
            self._core.calls.leave()

    def _run(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        try:
            self._begin()
            if not in_backward():
                self._around.begin(self._model, (args, kwargs))
            output = forward(*args, **kwargs)
            if not in_backward():
                self._around.end()
        except BaseException as error:
            if not in_backward():  # checkpointing stops a recomputation early with an exception
                self._fail(error)
                self._explain(error, (args, kwargs))
            raise
        finally:  # a signal may raise anywhere
            self._open = False
        self._end(output)
        return output

    def _generate(self, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._pace.uneven:
            return generate(*args, **kwargs)
        with self.uneven():
            return generate(*args, **kwargs)

    def announce(self) -> None:
        """Tells the other ranks, inside `uneven()`, that this rank is about to run a forward."""
        if self._pace.uneven:
            self._core.any_forward(True)

    def reset(self) -> None:
        """Clears the state that an interrupted forward of this thread left."""
        if self._thread == threading.get_ident():
            self._open = False

    @contextlib.contextmanager
    def resident(self) -> Iterator[None]:
        """For a time in which all parameters stay whole on every rank."""
        self._pace.resident += 1
        try:
            yield
        finally:
            self._pace.resident -= 1

    def uneven(self) -> "Uneven":
        """Within the context ranks may call the model a different number of times."""
        return Uneven(self._pace, self._core)

    def watch(self, module: torch.nn.Module, unit: int) -> None:
        """Reports to the core when the forward of a unit's module begins and ends."""
        core = self._core
        # The thread in which the module is called alone (a forward in which all other units are
        # idle), or 0.
        alone = 0

        def begin(*inputs: Any) -> None:
            nonlocal alone
            if not in_backward() and not self._runs_here():
                self._refuse_threads(module)
                core.calls.enter("forward")
                alone = threading.get_ident()
                self._begin()
                self._around.begin(self._model, inputs)
            core.unit_begin(unit, True)

        def end(inputs: Any = None, output: Any = None) -> None:
            nonlocal alone
            error = sys.exc_info()[1] if output is None else None
            was_alone = alone == threading.get_ident()
            try:
                if error is None:
                    core.unit_end(unit, list(module_tree.tensors_in(output)))
                if was_alone and error is None:
                    self._around.end()
                    self._end(output)
                elif was_alone and error is not None:
                    self._fail(error)
                    params = [param for _, param in module_tree.params_of(self._model)]
                    buffer_dtypes.note_inputs(error, params, module_tree.tensors_in(inputs))
            finally:
                if was_alone:
                    alone, self._open = 0, False
                    core.calls.leave()

        if module_tree.is_compiled_in_place(module):
            self._installed.append(Forward(module, _around(begin, end)))
            return
        # nn.Module's own methods, because the module's class may override them.
        before, after = Hook(module, begin), Hook(module, end)
        plain = torch.nn.Module
        self._installed.append(plain.register_forward_pre_hook(module, before, prepend=True))
        self._installed.append(plain.register_forward_hook(module, after, always_call=True))

    def watch_part(self, module: torch.nn.Module) -> None:
        """Watches a module that has parameters, is outside of the units and may be called alone."""
        self._installed.append(Forward(module, self.run_part))

    def run_part(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls `forward` as `run` does. Inside a forward or a backward it is a plain call."""
        if self._runs_here() or in_backward():
            return forward(*args, **kwargs)
        self._refuse_threads(getattr(forward, "__self__", self._model))
        return self.run(forward, *args, **kwargs)

    def _runs_here(self) -> bool:
        """Whether a forward runs in this thread."""
        return self._open and self._thread == threading.get_ident()

    def _refuse_threads(self, module: torch.nn.Module) -> None:
        """Raises RuntimeFault if another thread runs a forward, perhaps one that calls `module`."""
        names = {one.ident: one.name for one in threading.enumerate()}
        if not self._open or self._thread not in names:
            return
        raise RuntimeFault(
            f"[front::forward] a {type(module).__name__} was called from another thread "
            f'("{threading.current_thread().name}") while a forward of the model was running '
            f'(in "{names[self._thread]}"). Sharded parameters are gathered in the order of one '
            f'thread. Call the module in the thread of the forward, or use "zero2"'
        )

    def _begin(self) -> None:
        if not in_backward():
            if self._core.needs_unit_events and os.getpid() != self._process:
                raise RuntimeFault(
                    "[front::forward] the model was called in a process other than the engine's "
                    "(for example a DataLoader worker). That process has no parameters. Give the "
                    "worker a copy of the model, made inside engine.gathered()"
                )
            self._thread = threading.get_ident()
            self._structure.check_engine()
            if self._structure.look():
                self._core.relearn()
            if not self._pace.staged:
                self.announce()
            self._open = True
        self._core.unit_begin(0, torch.is_grad_enabled())

    def _end(self, output: Any) -> None:
        self._open = False  # a module called alone does not pass through run()
        self._core.unit_end(0, list(module_tree.tensors_in(output)))

    def _explain(self, error: BaseException, inputs: Any) -> None:
        """Explains an error about operands of different dtypes: adds a note to it, or raises a
        RuntimeFault that names buffers."""
        params = [param for _, param in module_tree.params_of(self._model)]
        buffers = module_tree.named_buffers_of(self._model)
        mixture = buffer_dtypes.explained(error, params, buffers)
        if mixture:
            raise RuntimeFault(mixture) from error
        buffer_dtypes.note_inputs(error, params, module_tree.tensors_in(inputs))

    def _fail(self, error: BaseException) -> None:
        self._open = False
        self._core.forward_failed(f"{type(error).__name__}: {error}")


class Uneven:
    """The context of `Forwards.uneven`. When a rank leaves the context, it joins the forwards
    of the other ranks until all ranks have left."""

    def __init__(self, pace: Pace, core: Any) -> None:
        self._pace, self._core = pace, core

    def __enter__(self) -> None:
        self._pace.uneven = self._core.needs_unit_events and not self._pace.resident

    def __exit__(self, kind: Any, _error: Any, _trace: Any) -> None:
        uneven, self._pace.uneven = self._pace.uneven, False
        while uneven and kind is None and self._core.any_forward(False):
            if self._pace.staged:
                raise RuntimeFault(
                    "[front::forward] ranks run different numbers of forwards, which the stages of "
                    'a pipeline cannot. Use engine.inference("resident"), or run the same forwards '
                    "on all ranks (generate() with min_new_tokens equal to max_new_tokens)"
                )
            self._core.unit_begin(0, False)
            self._core.unit_end(0, [])


def remove(installed: list[Any]) -> None:
    """Restores the modules. If it is interrupted, it may be called again."""
    for one in reversed(installed):  # a later one may wrap an earlier one
        one.remove()
    installed.clear()


def in_backward() -> bool:
    """Whether this thread runs a backward, which may recompute a forward."""
    return torch._C._current_graph_task_id() != -1


def _name_of_thread(number: int) -> str:
    """Returns a thread's name by its number in the operating system; "" if Python lacks it."""
    names = [one.name for one in threading.enumerate() if one.native_id == number]
    return f'"{names[0]}"' if names else ""


def _alone(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return inner(*args, **kwargs)


def _around(begin: Callable[..., None], end: Callable[..., None]) -> Callable[..., Any]:
    def call(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        begin(args, kwargs)
        try:
            output = inner(*args, **kwargs)
        except BaseException:
            end(args)
            raise
        end(args, output)
        return output

    return call
