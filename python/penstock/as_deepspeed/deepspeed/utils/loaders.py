"""Data loaders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from ..accelerator.real_accelerator import get_accelerator
from ..comm.comm import get_rank, get_world_size


class RepeatingLoader:
    """A loader that starts over after its last batch."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


class DeepSpeedDataLoader:
    """A torch loader over this rank's samples. The shuffled order is the same in every epoch.

    Batches are in host memory, which is pinned with `pin_memory` if ranks train on a device.
    """

    def __init__(  # noqa: PLR0913 - DeepSpeed's signature
        self,
        dataset: Any,
        batch_size: int,
        pin_memory: bool = False,
        collate_fn: Callable[..., Any] | None = None,
        num_local_io_workers: int = 0,
        data_sampler: Any = None,
        dataloader_drop_last: bool = False,
    ) -> None:
        world = get_world_size()
        if data_sampler is None:
            data_sampler = (
                DistributedSampler(dataset, num_replicas=world, rank=get_rank())
                if torch.distributed.is_initialized()
                else RandomSampler(dataset)
            )
        self.data_sampler = data_sampler
        self.dataset, self.batch_size = dataset, batch_size
        self.dataloader = DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=data_sampler,
            collate_fn=collate_fn,
            num_workers=num_local_io_workers,
            pin_memory=pin_memory and get_accelerator().device_name() != "cpu",
            drop_last=dataloader_drop_last,
        )
        self._data: Any = None

    def __iter__(self) -> DeepSpeedDataLoader:
        self._data = iter(self.dataloader)
        return self

    def __len__(self) -> int:
        return len(self.dataloader)

    def __next__(self) -> Any:
        if self._data is None:
            iter(self)
        return next(self._data)
