"""Sharding of rows over ranks, and loaders of the shards. `fit` itself only calls `set_epoch`.

Unlike torch's DistributedSampler it reads rank and size when iterated, and for validation it neither repeats nor drops
a row, so a metric over all ranks is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from hora.telemetry.meters import meter
from hora.workflow import peers


class Loaders(NamedTuple):
    """Loaders that `fit` trains and validates (or None) on."""

    train: Any
    valid: Any = None


class ShardSampler(Sampler[int]):
    """This rank's share of `num_rows` rows: shuffled and padded to equal length for training, exact for validation.

    Args:
        num_rows: Of the whole dataset.
        shuffle: Whether rows come in random order.
        seed: Of the order of rows; the same on every rank.
    """

    def __init__(self, num_rows: int, *, shuffle: bool = True, seed: int = 0) -> None:
        if num_rows < 1:
            raise ValueError(f"a sampler needs at least one row, but the data has {num_rows}")
        self.num_rows = num_rows
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.num_done = 0  # rows done of this epoch; elastic ranks divide the rest again when their number changes

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch. Each has its own order, which is the same after a resume."""
        self.epoch, self.num_done = epoch, 0

    def indices(self) -> torch.Tensor:
        """Return this rank's rows, in the order of this epoch."""
        if not self.shuffle:
            return torch.arange(self.num_rows)[peers.rank() :: peers.size()]
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(self.num_rows, generator=generator)[self.num_done :]
        total = len(self) * peers.size()
        return order.repeat(-(-total // max(len(order), 1)))[:total][peers.rank() :: peers.size()]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices().tolist())

    def __len__(self) -> int:
        if self.shuffle:
            return -(-max(self.num_rows - self.num_done, 0) // peers.size())
        return len(range(peers.rank(), self.num_rows, peers.size()))


class TensorLoader:
    """Batches sliced from tensors in memory: no worker process, no row-by-row collation.

    `transform` gets a batch of inputs (augmentation, normalization); it may use torch's random numbers.
    """

    def __init__(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        *,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        transform: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        if len(inputs) != len(targets):
            raise ValueError(f"there are {len(inputs)} inputs but {len(targets)} targets")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, but it is {batch_size}")
        self.inputs = inputs
        self.targets = targets
        self.batch_size = batch_size
        self.transform = transform
        self.sampler = ShardSampler(len(inputs), shuffle=shuffle, seed=seed)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        indices = self.sampler.indices().to(self.inputs.device)
        for chosen in indices.split(self.batch_size) if len(indices) else ():
            inputs = self.inputs[chosen]
            meter.num_samples += len(chosen)
            yield (inputs if self.transform is None else self.transform(inputs)), self.targets[chosen]

    def __len__(self) -> int:
        return -(-len(self.sampler) // self.batch_size)


def make_loaders(
    train: Dataset[Any], valid: Dataset[Any] | None = None, *, batch_size: int, seed: int = 0, **options: Any
) -> Loaders:
    """Return loaders of this rank's share of the datasets.

    Args:
        train: The dataset for training, shuffled anew in each epoch.
        valid: The dataset for validation, in order.
        batch_size: Rows of a batch on this rank.
        seed: Of the order of rows; the same on every rank.
        options: Passed to torch's DataLoader.
    """

    def loader(dataset: Dataset[Any], shuffle: bool) -> DataLoader[Any]:
        sampler = ShardSampler(len(dataset), shuffle=shuffle, seed=seed)  # type: ignore[arg-type]
        return DataLoader(dataset, batch_size=batch_size, sampler=sampler, **options)

    return Loaders(loader(train, True), None if valid is None else loader(valid, False))
