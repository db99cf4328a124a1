"""The grid: what every rank did, over the whole run, in a number of bins that never grows.

When a run outlives its bins, every two neighbours become one and bins last twice as long. So the page shows an hour as
readily as a minute, and a week of training takes no more memory than a day.
"""

from __future__ import annotations

from array import array

from hora.telemetry import Sample

__all__ = ["Grid"]

# What a cell holds: these fields of a sample, added up (all that are durations and counts), and the longest step.
_SUMS = (1, 3, 5, 6, 7, 8, 9, 10, 11, 12, 13)
_LONGEST = 4
_WIDTH = len(_SUMS) + 1
_EMPTY = bytes(8)


class _Row:
    """One rank's cells, one after the other."""

    __slots__ = ("values",)

    def __init__(self, num_bins: int) -> None:
        self.values = array("d", _EMPTY * (_WIDTH * num_bins))

    def add(self, index: int, sample: Sample) -> None:
        values, place = self.values, index * _WIDTH
        for column in _SUMS:
            values[place] += sample[column]
            place += 1
        if sample[_LONGEST] > values[place]:
            values[place] = sample[_LONGEST]

    def cell(self, index: int) -> Sample | None:
        (
            steps,
            step_s,
            data_s,
            backward_s,
            between_s,
            wait_s,
            reduce_s,
            hidden_s,
            optimizer_s,
            num_bytes,
            num_samples,
            longest_s,
        ) = self.values[index * _WIDTH : (index + 1) * _WIDTH]
        if not steps:
            return None
        sums = (data_s, backward_s, between_s, wait_s, reduce_s, hidden_s, optimizer_s, num_bytes, num_samples)
        return Sample(0, int(steps), 0.0, step_s, longest_s, *sums)

    def halve(self) -> None:
        values, half = self.values, len(self.values) // _WIDTH // 2
        merged = array("d")
        for index in range(half):
            left = values[2 * index * _WIDTH : (2 * index + 1) * _WIDTH]
            right = values[(2 * index + 1) * _WIDTH : (2 * index + 2) * _WIDTH]
            merged.extend(a + b for a, b in zip(left[:-1], right[:-1], strict=True))
            merged.append(max(left[-1], right[-1]))
        self.values = merged + array("d", _EMPTY * len(merged))


def _paired(values: array[float]) -> array[float]:
    merged = array("d", (a + b for a, b in zip(values[::2], values[1::2], strict=True)))
    return merged + array("d", _EMPTY * len(merged))


class Grid:
    """Bins of `bin_s` seconds from `began` on. `epoch` counts how often they were made longer."""

    def __init__(self, began: float, *, bin_s: float = 1.0, num_bins: int = 1200) -> None:
        assert num_bins % 2 == 0, num_bins
        self.began = began
        self.bin_s = bin_s
        self.num_bins = num_bins
        self.num_used = 0
        self.epoch = 0
        self._rows: dict[int, _Row] = {}
        self._metrics: dict[str, tuple[array[float], array[float]]] = {}  # sums and counts

    @property
    def ranks(self) -> list[int]:
        return sorted(self._rows)

    @property
    def metrics(self) -> list[str]:
        return list(self._metrics)

    def index(self, at: float) -> int:
        """The bin of this moment; makes room for it."""
        while (index := int(max(at - self.began, 0.0) / self.bin_s)) >= self.num_bins:
            self._halve()
        self.num_used = max(self.num_used, index + 1)
        return index

    def add(self, rank: int, at: float, sample: Sample) -> None:
        index = self.index(at)
        row = self._rows.get(rank)
        if row is None:
            row = self._rows[rank] = _Row(self.num_bins)
        row.add(index, sample)

    def add_metric(self, name: str, at: float, value: float) -> None:
        index = self.index(at)
        if name not in self._metrics:
            self._metrics[name] = array("d", _EMPTY * self.num_bins), array("d", _EMPTY * self.num_bins)
        sums, counts = self._metrics[name]
        sums[index] += value
        counts[index] += 1

    def metric(self, name: str, index: int) -> float | None:
        """The mean of what was reported in a bin."""
        sums, counts = self._metrics[name]
        return sums[index] / counts[index] if counts[index] else None

    def cell(self, rank: int, index: int) -> Sample | None:
        """Return a rank's sample of a bin; None when it ended no step there."""
        row = self._rows.get(rank)
        return None if row is None else row.cell(index)

    def column(self, index: int) -> dict[int, Sample]:
        """Return the ranks' samples of a bin."""
        return {rank: cell for rank, row in self._rows.items() if (cell := row.cell(index)) is not None}

    def _halve(self) -> None:
        for row in self._rows.values():
            row.halve()
        self._metrics = {name: (_paired(sums), _paired(counts)) for name, (sums, counts) in self._metrics.items()}
        self.bin_s *= 2
        self.num_used = -(-self.num_used // 2)
        self.epoch += 1
