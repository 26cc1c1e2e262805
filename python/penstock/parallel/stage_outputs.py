"""The outputs of a pipeline's last stage, on every rank of the pipeline."""

import dataclasses
import pickle
from typing import Any

import torch
from torch.utils import _pytree as pytree

from penstock._native import RuntimeFault


@dataclasses.dataclass(frozen=True)
class _Place:
    """Takes the place of a tensor or, if `given`, of an object among the call's arguments."""

    index: int
    given: bool


@dataclasses.dataclass(frozen=True)
class NotSent:
    """Takes the place of an output that stages cannot send to each other. Any use of it raises
    RuntimeFault.

    Attributes:
        kind: the name of the output's class.
    """

    kind: str

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # pickle and copy look for methods that the class may lack
            raise AttributeError(name)
        raise self._fault()

    def __len__(self) -> int:
        raise self._fault()

    def __iter__(self) -> Any:
        raise self._fault()

    def __getitem__(self, _: Any) -> Any:
        raise self._fault()

    def _fault(self) -> RuntimeFault:
        return RuntimeFault(
            f"[front::forward] the model's outputs contain a {self.kind}, which the last stage of "
            f"a pipeline cannot send to the other stages. If it is a cache, pass one as an argument"
        )


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def shared(ranks: Any, is_last: bool, outputs: Any, arguments: Any) -> Any:
    """Returns the last stage's outputs on every rank of the pipeline. All of them call it. An
    output that is neither a tensor, nor a plain value, nor an argument becomes `NotSent`.

    Args:
        ranks: the pipeline's ranks.
        is_last: whether this rank computes the last stage.
        outputs: the model's outputs, if `is_last`.
        arguments: those of the model's forward. An output that is one of them (a cache) becomes the
            argument of each rank.
    """
    objects = [one for one in pytree.tree_leaves(arguments) if not isinstance(one, _PLAIN)]
    tensors: list[torch.Tensor] = []
    text = pickle.dumps(_taken_out(outputs, objects, tensors)) if is_last else b""
    text, tensors = ranks.share_outputs(text, tensors)
    places, spec = pytree.tree_flatten(pickle.loads(text))
    return pytree.tree_unflatten([_put_in(one, objects, tensors) for one in places], spec)


def _taken_out(outputs: Any, objects: list[Any], tensors: list[torch.Tensor]) -> Any:
    """Returns `outputs` with places, and appends its tensors to `tensors`."""
    given = {id(one): index for index, one in enumerate(objects)}
    leaves, spec = pytree.tree_flatten(outputs, is_leaf=lambda one: id(one) in given)
    places: list[Any] = []
    for one in leaves:
        if id(one) in given:
            places.append(_Place(given[id(one)], given=True))
        elif isinstance(one, torch.Tensor):
            places.append(_Place(len(tensors), given=False))
            tensors.append(one.detach())
        elif isinstance(one, _PLAIN):
            places.append(one)
        else:
            places.append(NotSent(type(one).__name__))
    return pytree.tree_unflatten(places, spec)


def _put_in(one: Any, objects: list[Any], tensors: list[torch.Tensor]) -> Any:
    if not isinstance(one, _Place):
        return one
    return objects[one.index] if one.given else tensors[one.index]
