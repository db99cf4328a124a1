"""What happened in training, one flat record per epoch.

Made by `fit`; read by checkpoints, plots and people.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["History"]


@dataclass
class History:
    """Records such as {"epoch": 1, "train_loss": …, "valid_loss": …, "lr": …, "seconds": …}."""

    records: list[dict[str, float]] = field(default_factory=list)

    def append(self, record: Mapping[str, float]) -> None:
        """Add an epoch."""
        self.records.append(dict(record))

    def column(self, name: str) -> list[float]:
        """One value over the epochs, e.g. `valid_loss`."""
        if self.records and name not in self.records[-1]:
            raise ValueError(f"no column {name!r} in the history; it has {', '.join(self.records[-1])}")
        return [record[name] for record in self.records]

    def last(self, name: str) -> float:
        """The value of the last epoch."""
        if not self.records:
            raise ValueError(f"no epoch has been trained, so there is no {name!r}")
        return self.column(name)[-1]

    def best(self, name: str, *, highest: bool = False) -> dict[str, float]:
        """The record of the epoch with the lowest (or highest) value."""
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
        """Read what `save` wrote."""
        return cls(json.loads(Path(path).read_text()))

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[dict[str, float]]:
        return iter(self.records)
