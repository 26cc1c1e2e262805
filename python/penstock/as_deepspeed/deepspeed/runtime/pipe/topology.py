"""Topologies: the coordinates of each rank on named axes, and the groups along an axis."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from penstock import ConfigError

from ...comm.comm import get_rank, get_world_size


def _prime_factors(N: int) -> list[int]:  # noqa: N803 - DeepSpeed's name
    """Returns the prime factors of a positive number in ascending order."""
    if N < 1:
        raise ConfigError(f"[deepspeed::_prime_factors] {N} is not a positive number")
    found, factor = [], 2
    while N > 1:
        if N % factor:
            factor += 1
        else:
            found.append(factor)
            N //= factor
    return found


class ProcessTopology:
    """An array of ranks with named axes. The first axis is the outermost.

    Args:
        axes: the names of the axes, such as ["pipe", "data"].
        dims: the number of ranks along each axis.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        if len(axes) != len(dims) or len(set(axes)) < len(axes) or any(one < 1 for one in dims):
            raise ConfigError(
                f"[deepspeed::ProcessTopology] axes are {list(axes)} and dims are {list(dims)}; "
                f"allowed: different names, with a size of 1 or more for each"
            )
        self.axes, self.dims = list(axes), list(dims)
        made: Any = collections.namedtuple  # Any: mypy wants literal field names
        self.ProcessCoord = made("ProcessCoord", self.axes)
        places = itertools.product(*(range(size) for size in self.dims))
        self.mapping: dict[Any, int] = {
            self.ProcessCoord(*place): rank for rank, place in enumerate(places)
        }
        self._places = list(self.mapping)

    def get_rank(self, **coord_kwargs: int) -> int:
        """Returns the rank at the given coordinates, one for each axis."""
        if set(coord_kwargs) != set(self.axes):
            raise ConfigError(
                f"[deepspeed::get_rank] axes {sorted(coord_kwargs)} are given, but all of "
                f"{self.axes} are needed: call filter_match() to select ranks by some of the axes"
            )
        key = self.ProcessCoord(**coord_kwargs)
        if key not in self.mapping:
            raise ConfigError(
                f"[deepspeed::get_rank] {key} is outside the topology, whose sizes are {self.dims}"
            )
        return self.mapping[key]

    def get_axis_names(self) -> list[str]:
        return self.axes

    def get_rank_repr(
        self,
        rank: int,
        omit_axes: Sequence[str] = ("data", "pipe"),
        inner_sep: str = "_",
        outer_sep: str = "-",
    ) -> str:
        """Returns a rank's coordinates as a text for file names: "model_00"."""
        place = self.get_coord(rank)
        return outer_sep.join(
            f"{axis}{inner_sep}{getattr(place, axis):02d}"
            for axis in self.axes
            if axis not in omit_axes
        )

    def get_dim(self, axis: str) -> int:
        """Returns the number of ranks along an axis; 0 if there is no such axis."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """Returns a rank's coordinates as a named tuple."""
        if not 0 <= rank < len(self._places):
            raise ConfigError(
                f"[deepspeed::get_coord] rank is {rank}, but the topology has {len(self._places)} "
                f"ranks, counted from 0"
            )
        return self._places[rank]

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Returns the groups of ranks that differ only along this axis; [] without the axis."""
        if axis not in self.axes:
            return []
        groups: dict[tuple[Any, ...], list[int]] = {}
        at = self.axes.index(axis)
        for place, rank in self.mapping.items():
            groups.setdefault((*place[:at], *place[at + 1 :]), []).append(rank)
        return list(groups.values())

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """Returns the ranks with these coordinates."""
        return [
            rank
            for place, rank in self.mapping.items()
            if all(getattr(place, axis) == value for axis, value in filter_kwargs.items())
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Returns the ranks at one index of an axis."""
        return self.filter_match(**{axis: idx})

    def world_size(self) -> int:
        return len(self._places)

    def __str__(self) -> str:
        return str(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """A topology with the axes pipe (stages) and data."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """A topology with the axes pipe (stages), data and model (tensor ranks)."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


def _field(name: str) -> Callable[[Any], Any]:
    """Returns a method that returns an attribute."""
    return lambda self: getattr(self, name)


class PipelineParallelGrid:
    """This rank's coordinates in a topology, and its process groups. All ranks create it.

    Args:
        topology: a topology with axes among "pipe", "data" and "model"; default: only data ranks.
        process_group: accepted, without effect: the grid always has all ranks.

    Raises ConfigError if the topology has another number of ranks than the run.
    """

    def __init__(self, topology: ProcessTopology | None = None, process_group: Any = None) -> None:
        self.global_rank, self.world_size = get_rank(), get_world_size()
        self._topo = topology or PipeDataParallelTopology(1, self.world_size)
        if self._topo.world_size() != self.world_size:
            raise ConfigError(
                f"[deepspeed::PipelineParallelGrid] the topology has {self._topo.world_size()} "
                f"ranks, but the run has {self.world_size}"
            )
        self.pipe_parallel_size = max(1, self._topo.get_dim("pipe"))
        self.data_parallel_size = max(1, self._topo.get_dim("data"))
        self.model_parallel_size = self.slice_parallel_size = max(1, self._topo.get_dim("model"))
        self.stage_id, self.data_parallel_id = self._at("pipe"), self._at("data")
        self._model_rank = self._at("model")
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1
        self.pp_group, self.pp_proc_group = self._group("pipe")
        self.dp_group, self.dp_proc_group = self._group("data")
        self.slice_group, self.slice_proc_group = self._group("model")

    def __deepcopy__(self, memo: dict[int, Any]) -> PipelineParallelGrid:
        return self  # process groups cannot be copied

    def _group(self, axis: str) -> tuple[list[int], Any]:
        """Returns this rank's group of ranks along an axis, and its process group."""
        own, group = [self.global_rank], None
        for ranks in self._topo.get_axis_comm_lists(axis) or [[r] for r in range(self.world_size)]:
            made = dist.new_group(ranks) if dist.is_initialized() else None
            if self.global_rank in ranks:
                own, group = ranks, made
        return own, group

    def _is_grid_valid(self) -> bool:
        return self._topo.world_size() == self.world_size

    def _at(self, axis: str) -> int:
        return int(getattr(self._topo.get_coord(self.global_rank), axis, 0))

    def topology(self) -> ProcessTopology:
        return self._topo

    get_stage_id = _field("stage_id")
    get_data_parallel_id = _field("data_parallel_id")

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """Returns the rank at a stage. Coordinates that are not given are this rank's."""
        place = self._topo.get_coord(self.global_rank)._asdict()
        return self._topo.get_rank(**{**place, **kwargs, "pipe": stage_id})

    get_global_rank = _field("global_rank")
    get_pipe_parallel_rank = _field("stage_id")
    get_pipe_parallel_world_size = _field("pipe_parallel_size")
    get_pipe_parallel_group = _field("pp_proc_group")
    get_data_parallel_rank = _field("data_parallel_id")
    get_data_parallel_world_size = _field("data_parallel_size")
    get_data_parallel_group = _field("dp_proc_group")
    get_model_parallel_rank = _field("_model_rank")
    get_model_parallel_world_size = _field("model_parallel_size")
    get_model_parallel_group = _field("slice_proc_group")
    get_slice_parallel_rank = get_model_parallel_rank
    get_slice_parallel_world_size = get_model_parallel_world_size
    get_slice_parallel_group = get_model_parallel_group
