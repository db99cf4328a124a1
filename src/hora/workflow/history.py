"""History of a training: means of loss and metrics over batches and ranks, one flat record per epoch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hora.workflow import peers


@dataclass
class History:
    """Records such as {"epoch": 1, "train_loss": …, "valid_loss": …, "lr": …, "seconds": …}."""

    records: list[dict[str, float]] = field(default_factory=list)

    def append(self, record: Mapping[str, float]) -> None:
        """Add an epoch."""
        self.records.append(dict(record))

    def column(self, name: str) -> list[float]:
        """Return one value over the epochs, such as `valid_loss`."""
        if self.records and name not in self.records[-1]:
            raise ValueError(f"no column {name!r} in the history; it has {', '.join(self.records[-1])}")
        return [record[name] for record in self.records]

    def last(self, name: str) -> float:
        """Return the value of the last epoch."""
        if not self.records:
            raise ValueError(f"no epoch has been trained, so there is no {name!r}")
        return self.column(name)[-1]

    def best(self, name: str, *, highest: bool = False) -> dict[str, float]:
        """Return the record of the epoch with the lowest (or highest) value."""
        values = self.column(name)
        if not values:
            raise ValueError(f"no epoch has been trained, so there is no best {name!r}")
        return self.records[values.index(max(values) if highest else min(values))]

    @property
    def seconds(self) -> float:
        """Time spent training and validating, over all epochs."""
        return sum(self.column("seconds"))

    def save(self, path: str | Path) -> None:
        """Write the records as JSON."""
        Path(path).write_text(json.dumps(self.records, indent=1))

    @classmethod
    def load(cls, path: str | Path) -> History:
        """Read the records from a file of `save`."""
        return cls(json.loads(Path(path).read_text()))

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[dict[str, float]]:
        return iter(self.records)


class Tally:
    """Weighted sums of batches' values and the sum of the weights, kept on the device to avoid synchronization."""

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.names = list(names)
        self.sums = torch.zeros(len(self.names) + 1, dtype=torch.float64, device=device)

    def add(self, values: Sequence[torch.Tensor | float], weight: int) -> None:
        """Add a batch of this weight with these means."""
        dtype, device = self.sums.dtype, self.sums.device
        row = [torch.as_tensor(value, dtype=dtype, device=device).detach().reshape(()) for value in values]
        self.sums += torch.stack([*row, self.sums.new_ones(())]) * weight

    def averages(self) -> list[float] | None:
        """Return the means over all ranks, in the order of the names; None if no rank has added a batch. Collective."""
        *sums, weight = peers.sum_floats(self.sums).tolist()
        return [value / weight for value in sums] if weight else None

    def means(self, prefix: str) -> dict[str, float]:
        """Return the means over all ranks by name: {"train_loss": …}. Raises ValueError without a batch. Collective."""
        averages = self.averages()
        if averages is None:
            raise ValueError(f"the {prefix} loader has no batch on any rank; it needs at least one row")
        return {f"{prefix}_{name}": value for name, value in zip(self.names, averages, strict=True)}

    def clear(self) -> None:
        self.sums.zero_()

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        return {"sums": self.sums.cpu()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        self.sums.copy_(state["sums"])
