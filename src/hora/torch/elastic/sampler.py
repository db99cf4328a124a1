"""A sampler that remembers what has been processed, so that a changed world goes on where the old one stopped."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from hora import engine

__all__ = ["ElasticSampler"]


class ElasticSampler(Sampler[int]):
    """Divides the indices that are left of this epoch among the ranks.

    Call `record_batch` after each batch and `set_epoch` at the end of each epoch; the division takes notice of what was
    recorded at the next `reset`, which a change of the world brings about.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.num_replicas = 1
        self.rank = 0
        self.remaining_indices: list[int] = []
        self.num_samples = 0
        self.total_size = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch: everything is left to do. Call it at the end of an epoch."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """All ranks have processed one more batch of this size."""
        self.processed_num += batch_size * self.num_replicas

    def record_indices(self, indices: set[int]) -> None:
        """All ranks together have processed as many more samples as there are indices."""
        self.processed_num += len(indices)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide what is left among the ranks of the world as it is now."""
        world = engine.current_world()
        if world is not None:
            self.num_replicas, self.rank = world.size, world.rank
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        remaining = self.remaining_indices
        if not remaining:
            return iter(())
        # Every rank gets the same number: the head is repeated as often as necessary.
        repeated = remaining * -(-self.total_size // len(remaining))
        return iter(repeated[: self.total_size][self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples
