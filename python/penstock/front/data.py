"""A data loader that resumes at the position of a checkpoint, on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from penstock._native import ConfigError
from penstock.front import ranks


class _Batches:
    """A batch sampler that yields the indices of this rank's batches, starting at a position."""

    def __init__(self, order: torch.Tensor, first: int, batch: int, rank: int, world: int):
        self._order, self._first, self._batch = order, first, batch
        self._rank, self._world = rank, world

    def __iter__(self) -> Iterator[list[int]]:
        step = self._batch * self._world
        for first in range(self._first, len(self._order) - step + 1, step):
            own = first + self._rank * self._batch
            yield self._order[own : own + self._batch].tolist()

    def __len__(self) -> int:
        return max(0, len(self._order) - self._first) // (self._batch * self._world)


class ResumableLoader:
    """A `torch.utils.data.DataLoader` with a position.

    All ranks follow one order of the samples, and each rank takes its part of every global batch.
    The position counts samples that the loop has received in this epoch; samples that workers have
    fetched do not count. The position is the same on every rank and does not depend on the number
    of ranks. So a run on a different number of ranks continues with the next sample.

    Register the loader before `engine.save()` and `engine.load()`:

        loader = penstock.ResumableLoader(dataset, batch_size=8, seed=1, num_workers=2)
        engine.register_for_checkpointing(loader)
        engine.load("auto")
        while loader.epoch < epochs:
            for batch in loader:
                ...

    Args:
        dataset: a dataset with a length and items by index.
        batch_size: samples per batch of this rank.
        shuffle: a new order in each epoch, from `seed`; False keeps the order of the dataset.
        seed: seed of the order.
        place: (part, number of parts) of a global batch for this rank. Default: (rank, world
            size). With `mesh.tensor` or `mesh.sequence`: (engine.data_rank, engine.data_size).
        options: other arguments of DataLoader (num_workers, collate_fn, pin_memory, ...), except
            those that choose samples.

    At the end of an epoch, the loader drops samples that do not fill a batch on every rank, as
    DDP's sampler does with drop_last.

    Raises:
        ConfigError: if an option chooses samples, or if the dataset cannot give each rank one
            batch.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        place: tuple[int, int] | None = None,
        **options: Any,
    ) -> None:
        self._rank, self._world = place or (ranks.rank(), ranks.world())
        for name in ("sampler", "batch_sampler", "drop_last"):
            if name in options:
                raise ConfigError(
                    f"[front::ResumableLoader] {name} is not allowed, because the loader chooses "
                    f"the samples itself"
                )
        length = len(dataset)  # type: ignore[arg-type]
        if batch_size < 1 or length < batch_size * self._world:
            raise ConfigError(
                f"[front::ResumableLoader] the dataset has {length} samples, less than one batch "
                f"of {batch_size} on {self._world} ranks"
            )
        self.epoch = 0
        self._dataset, self._batch_size, self._length = dataset, batch_size, length
        self._shuffle, self._seed, self._options = shuffle, seed, options
        self._samples = 0  # samples of this epoch over all ranks

    def _order(self) -> torch.Tensor:
        if not self._shuffle:
            return torch.arange(self._length)
        generator = torch.Generator().manual_seed((self._seed << 20) + self.epoch)
        return torch.randperm(self._length, generator=generator)

    def __iter__(self) -> Iterator[Any]:
        """Yields the rest of this epoch, then begins the next epoch."""
        batches = _Batches(self._order(), self._samples, self._batch_size, self._rank, self._world)
        # A separate generator for the workers' seeds leaves torch's default generator unchanged.
        place = hash((self._seed, self.epoch, self._samples, self._rank))
        generator = torch.Generator().manual_seed(place & (2**62 - 1))
        options = {"generator": generator} | self._options
        for batch in DataLoader(self._dataset, batch_sampler=batches, **options):
            self._samples += self._batch_size * self._world
            yield batch
        self.epoch += 1
        self._samples = 0

    def __len__(self) -> int:
        """The number of batches in a whole epoch."""
        return self._length // (self._batch_size * self._world)

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "samples": self._samples,
            "length": self._length,
            "shuffle": self._shuffle,
            "seed": self._seed,
        }

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ConfigError if the state has another dataset length or order."""
        for name, now in self.state_dict().items():
            if name not in ("epoch", "samples") and state[name] != now:
                raise ConfigError(
                    f"[front::ResumableLoader] {name} is {now} here and {state[name]} in the "
                    f"checkpoint, so the position would mean different samples. Use the same {name}"
                )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the position for the next `iter()`. An open iterator does not change.

        Raises:
            ConfigError: if the state has another dataset length or order.
        """
        self.check_state_dict(state)
        self.epoch, self._samples = state["epoch"], state["samples"]
