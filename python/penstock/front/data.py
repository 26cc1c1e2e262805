"""A data loader that goes on where a checkpoint was saved, on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from penstock._native import ConfigError
from penstock.front import ranks


class _Batches:
    """Indices of this rank's batches, from a position on: the batch sampler of a DataLoader."""

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

    All ranks go through one order of the samples together: of each global batch a rank has its
    part. The position counts the samples of the epoch that the loop has got, not those that workers
    have fetched, so `state_dict()` between two steps is where the loop is. It is the same on every
    rank and does not depend on their number: a run with other ranks goes on with the next sample.

    Register it before `engine.save()` and `engine.load()`:

        loader = penstock.ResumableLoader(dataset, batch_size=8, seed=1, num_workers=2)
        engine.register_for_checkpointing(loader)
        engine.load("auto")
        while loader.epoch < epochs:
            for batch in loader:
                ...

    Args:
        dataset: with a length and items by index.
        batch_size: samples of this rank.
        shuffle: another order in each epoch, by `seed`; else the dataset's.
        seed: of the order.
        place: which of how many parts of a global batch is this rank's. Default: its rank, of all;
            with `mesh.tensor` or `mesh.sequence`: (engine.data_rank, engine.data_size).
        options: more of DataLoader's arguments (num_workers, collate_fn, pin_memory, ...), but for
            its own ways to choose samples.

    Samples at an epoch's end that do not fill a batch on every rank are left out, as by DDP's
    sampler with drop_last.
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
                raise ConfigError(f"[front::ResumableLoader] {name} is the loader's own")
        length = len(dataset)  # type: ignore[arg-type]
        if batch_size < 1 or length < batch_size * self._world:
            raise ConfigError(
                f"[front::ResumableLoader] {length} samples are less than one batch of "
                f"{batch_size} on {self._world} ranks"
            )
        self.epoch = 0
        self._dataset, self._batch_size, self._length = dataset, batch_size, length
        self._shuffle, self._seed, self._options = shuffle, seed, options
        self._samples = 0  # of this epoch, over all ranks

    def _order(self) -> torch.Tensor:
        if not self._shuffle:
            return torch.arange(self._length)
        generator = torch.Generator().manual_seed((self._seed << 20) + self.epoch)
        return torch.randperm(self._length, generator=generator)

    def __iter__(self) -> Iterator[Any]:
        """The rest of this epoch; then the next one begins."""
        batches = _Batches(self._order(), self._samples, self._batch_size, self._rank, self._world)
        # Of its own, for its workers' seeds: beginning in the middle draws nothing from torch's.
        place = hash((self._seed, self.epoch, self._samples, self._rank))
        generator = torch.Generator().manual_seed(place & (2**62 - 1))
        options = {"generator": generator} | self._options
        for batch in DataLoader(self._dataset, batch_sampler=batches, **options):
            self._samples += self._batch_size * self._world
            yield batch
        self.epoch += 1
        self._samples = 0

    def __len__(self) -> int:
        """Batches of a whole epoch."""
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
        """Raises ConfigError for a state of another dataset's length, or another order."""
        for name, now in self.state_dict().items():
            if name not in ("epoch", "samples") and state[name] != now:
                raise ConfigError(
                    f"[front::ResumableLoader] {name} is {now}, and {state[name]} in the "
                    f"checkpoint: the position would be among other samples"
                )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Before the next `iter()`; one that is under way goes on as it was.

        Raises:
            ConfigError: of another dataset's length, or another order.
        """
        self.check_state_dict(state)
        self.epoch, self._samples = state["epoch"], state["samples"]
