"""Means of loss and metrics over batches and ranks, exact for unequal batches.

Used by `fit` and `evaluate`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from hora.workflow import peers

__all__ = ["Metric", "Tally", "accuracy"]

Metric = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The fraction of rows whose largest output is the target's class."""
    return (outputs.argmax(dim=-1) == targets).float().mean()


class Tally:
    """Sums of batch means, weighted with the batches' sizes; the last number is the sum of the weights.

    They stay on the device: reading a value in every step would make a GPU wait.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.names = list(names)
        self._sums = torch.zeros(len(self.names) + 1, dtype=torch.float64, device=device)

    def add(self, values: Sequence[torch.Tensor], weight: int) -> None:
        """Count a batch of `weight` rows with these means."""
        ones = torch.ones((), dtype=torch.float64, device=self._sums.device)
        row = torch.stack([*(value.detach().to(self._sums) for value in values), ones])
        self._sums += row * weight

    def mine(self, name: str) -> float:
        """This rank's mean so far (waits for the device)."""
        return float(self._sums[self.names.index(name)] / self._sums[-1])

    def means(self, prefix: str) -> dict[str, float]:
        """The means over all ranks: {"train_loss": …}."""
        sums = peers.sum_floats(self._sums)
        if not sums[-1]:
            raise ValueError(f"the {prefix} loader gave no batch on any rank; it needs at least one row")
        return {f"{prefix}_{name}": float(value / sums[-1]) for name, value in zip(self.names, sums, strict=False)}

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        """For a checkpoint in the middle of an epoch."""
        return {"sums": self._sums.cpu()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """From such a checkpoint."""
        self._sums.copy_(state["sums"])
