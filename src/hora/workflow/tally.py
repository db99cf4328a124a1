"""Means of loss and metrics over batches and ranks. Filled by `step`, read once a pass is over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hora.workflow import peers

__all__ = ["Tally"]


class Tally:
    """Sums of batches' values, times their weights; the last number is the sum of the weights.

    They stay on the device: reading a value in every step would make a GPU wait.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.names = list(names)
        self._sums = torch.zeros(len(self.names) + 1, dtype=torch.float64, device=device)

    def add(self, values: Sequence[torch.Tensor | float], weight: int) -> None:
        """Count a batch of this weight with these means."""
        row = torch.stack([*(self._number(value) for value in values), self._sums.new_ones(())])
        self._sums += row * weight

    def averages(self) -> list[float] | None:
        """The means over all ranks, in the order of the names; None if no rank has counted a batch. Collective."""
        *sums, weight = peers.sum_floats(self._sums).tolist()
        return [value / weight for value in sums] if weight else None

    def means(self, prefix: str) -> dict[str, float]:
        """The means over all ranks by name: {"train_loss": …}. ValueError if there was no batch. Collective."""
        averages = self.averages()
        if averages is None:
            raise ValueError(f"the {prefix} loader gave no batch on any rank; it needs at least one row")
        return {f"{prefix}_{name}": value for name, value in zip(self.names, averages, strict=True)}

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        """For a checkpoint in the middle of an epoch."""
        return {"sums": self._sums.cpu()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """From such a checkpoint."""
        self._sums.copy_(state["sums"])

    def _number(self, value: torch.Tensor | float) -> torch.Tensor:
        return torch.as_tensor(value, dtype=self._sums.dtype, device=self._sums.device).detach().reshape(())
