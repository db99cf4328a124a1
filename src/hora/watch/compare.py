"""The comparison of two runs, phase by phase: which changed by how much, and whether that is more than noise.

A difference is more than noise if neither run's median lies in the middle 80 % of the other's seconds, and it is at
least 1 % of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hora.watch.recording import is_recording, read_run
from hora.watch.verdict import PHASES, Spread, Verdict, make_verdict, read_verdict

_MIN_SHARE = 0.01  # of a step: a smaller difference is no change
_SAME_BYTES = 0.01
_MIN_WINDOWS = 5


def load_verdict(path: str | Path) -> Verdict:
    """Return the verdict in a file, or that of the run recorded in it. ValueError: it holds neither."""
    return make_verdict(read_run(path)) if is_recording(path) else read_verdict(path)


@dataclass(frozen=True)
class Change:
    """A phase of a step, or the whole ("step"), in two runs."""

    name: str
    before: Spread
    after: Spread
    is_real: bool

    @property
    def difference_ms(self) -> float:
        return self.after.median - self.before.median

    @property
    def ratio(self) -> float:
        return self.difference_ms / self.before.median if self.before.median else 0.0


def compare_runs(before: Verdict, after: Verdict, *, other_model: bool = False) -> list[Change]:
    """Return the changes of the step and its phases. ValueError: the runs cannot be compared."""
    for name, run in (("first", before), ("second", after)):
        if run.step is None:
            raise ValueError(f"the {name} run ({run.title}) has no step that was measured")
        if run.num_windows < _MIN_WINDOWS:
            raise ValueError(
                f"the {name} run ({run.title}) trained for {run.num_windows} s after its first second, but a spread "
                f"needs at least {_MIN_WINDOWS} s: let it train longer"
            )
    if before.num_ranks != after.num_ranks:
        raise ValueError(
            f"these runs cannot be compared: the first had {before.num_ranks} ranks, the second {after.num_ranks}"
        )
    most = max(before.bytes_per_step, after.bytes_per_step)
    if not other_model and abs(before.bytes_per_step - after.bytes_per_step) > _SAME_BYTES * most:
        raise ValueError(
            f"these runs cannot be compared: a rank reduced {before.bytes_per_step / 1e6:.2f} MB in a step of the "
            f"first and {after.bytes_per_step / 1e6:.2f} MB in one of the second, so they trained other models or sent "
            "gradients in another way; --other-model compares them all the same"
        )
    assert before.step is not None
    assert after.step is not None
    least = _MIN_SHARE * before.step.median
    pairs = [("step", before.step, after.step)]
    pairs += [(part, before.phases[part], after.phases[part]) for part in before.phases]
    return [Change(name, first, second, _is_real(first, second, least)) for name, first, second in pairs]


def _is_real(before: Spread, after: Spread, least_ms: float) -> bool:
    """Return whether a change is more than noise."""
    apart = after.median > before.high and before.median < after.low
    apart |= after.median < before.low and before.median > after.high
    return apart and abs(after.median - before.median) >= least_ms


def table(before: Verdict, after: Verdict, changes: Sequence[Change]) -> str:
    """Return the comparison as text of at most 80 columns."""
    rows = [("ms a step", "before", "after", "change", "")]
    for change in changes:
        first, second = change.before, change.after
        if max(first.median, second.median) < 0.001 * changes[0].before.median:
            continue
        percent = f"{100 * change.ratio:+.1f} %" if first.median else f"{change.difference_ms:+.3g} ms"
        words = "changed" if change.is_real else "noise"
        rows.append((PHASES.get(change.name, "step"), _of(first), _of(second), percent, words))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = [
        f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]:>{widths[3]}}  {row[4]}".rstrip()
        for row in rows
    ]
    lines.append("medians of the runs' seconds, and the middle 80 % of them")
    if before.samples_per_s and after.samples_per_s:
        lines.append(f"samples/s: {before.samples_per_s:,.0f} before, {after.samples_per_s:,.0f} after")
    for name, run in (("before", before), ("after", after)):
        lines += [f"{name}: {one['claim']}" for one in run.slow[:2]]
    return "\n".join(lines)


def _of(spread: Spread) -> str:
    return f"{spread.median:.3g} ({spread.low:.3g}–{spread.high:.3g})"


def regression(changes: Sequence[Change], limit: float) -> str | None:
    """Return the words of a step that takes more than `limit` (0.05: 5 %) longer, and more than noise; else None."""
    step = changes[0]
    if step.ratio <= limit or not step.is_real:
        return None
    return f"a step takes {100 * step.ratio:.1f} % longer, more than the {100 * limit:g} % that are allowed"
