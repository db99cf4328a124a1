"""The difference between ranks, in words: which ranks, since which step, what, and what to change. Pure.

Facts are what one rank sends: its rank, the number of steps, the history of its hyperparameters as [step, group, name,
value], digests of tensors by name, and the step after which each of them last agreed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

Facts = Mapping[str, Any]

REPLACED = "replacements of "  # before the name of a parameter whose `.data` was set
_ROUNDING = 1e-5
_WORDS = {"lr": "learning rate", "learning_rate": "learning rate", "weight_decay": "weight decay"}
_SCHEDULER = "a scheduler that sees only its rank's loss? average it first: hvd.allreduce(loss)"
_SETTING = "set it to the same value on all ranks, or send rank 0's: "


class Remedies(NamedTuple):
    """Calls that make the ranks equal, in the words of a front."""

    parameters: str = "hvd.broadcast_parameters(model.state_dict(), root_rank=0)"
    settings: str = "hvd.broadcast_optimizer_state(optimizer, root_rank=0)"


TORCH = Remedies()


@dataclass(frozen=True)
class Difference:
    """A difference between ranks."""

    text: str  # for the user
    is_rounding: bool = False  # as much as other kernels or processors make


def of_settings(of_all: Sequence[Facts], remedies: Remedies = TORCH) -> Difference:
    """Return the earliest difference of hyperparameters, or of the numbers of steps."""
    found = min(_earliest(of_all), default=None, key=lambda one: one[0])
    if found is not None:
        step, group, name, values = found
        num_groups = 1 + max(entry[1] for facts in of_all for entry in facts["history"])
        what = _WORDS.get(name, name)
        hint = _SCHEDULER if what == "learning rate" else _SETTING + remedies.settings
        if name.startswith(REPLACED):
            what, hint = f"{name}.data", "with sharded=True set p.data alike on all ranks: each rank's slice is its own"
        elif num_groups > 1:
            what += f" of parameter group {group}"
        since = f"since step {of_all[0]['begin'] + step}"
        return Difference(f"{_begin(since)}: {_listed(what, of_all, values)}: {hint}")
    steps = [facts["steps"] for facts in of_all]
    if len(set(steps)) > 1:
        listed = ", ".join(f"{count} on {ranks}" for count, ranks in _by_value(of_all, steps))
        since = f"at step {of_all[0]['begin'] + min(steps) + 1} or before"
        return Difference(
            f"{_begin(since)}: the number of applied steps is {listed}: a step that one rank leaves out? decide "
            "it on all ranks alike, by an averaged value: hvd.allreduce"
        )
    return Difference(
        f"{_begin('in an earlier step')}: the hyperparameters were not the same on all ranks: {_SETTING}"
        f"{remedies.settings}"
    )


def _earliest(of_all: Sequence[Facts]) -> Iterator[tuple[int, int, str, list[Any]]]:
    """Yield, for every hyperparameter that ever differed, when it did so first, and its values then."""
    histories = [_by_setting(facts["history"]) for facts in of_all]
    for key in dict.fromkeys(key for history in histories for key in history):
        changes = [history.get(key, []) for history in histories]
        for step in sorted({step for its in changes for step, _ in its}):
            values = [next((value for at, value in reversed(its) if at <= step), None) for its in changes]
            if any(value != values[0] for value in values):
                yield step, *key, values
                break


def _by_setting(history: Sequence[Any]) -> dict[tuple[int, str], list[tuple[int, Any]]]:
    found: dict[tuple[int, str], list[tuple[int, Any]]] = {}
    for step, group, name, value in history:
        found.setdefault((group, name), []).append((step, value))
    return found


def differing_names(of_all: Sequence[Mapping[str, int]]) -> list[str]:
    """Return the names of the tensors that not all ranks have alike."""
    names = dict.fromkeys(name for one in of_all for name in one)
    return [name for name in names if len({one.get(name) for one in of_all}) > 1]


def of_names(field: str, of_all: Sequence[Facts]) -> Difference:
    """Return the difference of ranks that have other tensors."""
    name = next(name for facts in of_all for name in facts[field] if not all(name in one[field] for one in of_all))
    there = [facts["rank"] for facts in of_all if name in facts[field]]
    return Difference(
        f"{_begin('')}: only {_ranks(there)} of {len(of_all)} have the {field[:-1]} {name}: build the same model on "
        "all ranks"
    )


def of_tensor(
    field: str,
    name: str,
    names: Sequence[str],
    of_all: Sequence[Facts],
    distances: Sequence[float],
    remedies: Remedies = TORCH,
) -> Difference:
    """Return the difference of parameters or buffers. `distances`: of tensor `name` from the first rank's."""
    others = [facts["rank"] for facts, distance in zip(of_all, distances, strict=True) if distance]
    agreed = min((facts[f"{field} agreed"].get(name, -1) for facts in of_all), default=-1)
    since = f"since a step after {agreed}" if agreed >= 0 else "from the first steps on"
    more = f" and {len(names) - 1} more {field}" if len(names) > 1 else ""
    text = (
        f"{_begin(since)}: {field[:-1]} {name}{more} on {_ranks(others)}: not as on rank {of_all[0]['rank']}, by "
        f"{100 * max(distances):.2g} %"
    )
    differs = len({facts["machine"] for facts in of_all}) > 1
    if max(distances) < _ROUNDING and (differs or "cuda" in str(of_all[0]["machine"]).lower()):
        return Difference(
            f"{text}, as much as rounding: other processors, or kernels that add in no fixed order; nothing is "
            "compared any more",
            is_rounding=True,
        )
    if field == "buffers":
        hint = (
            "it is computed from each rank's own data? average it: hvd.allreduce, or declare it local: "
            f'DistributedOptimizer(..., local=["{name}"])'
        )
    elif agreed < 0:
        hint = f"were they sent before the training? {remedies.parameters}"
    else:
        hint = "changed on one rank alone, beside optimizer.step()? change it alike on all ranks, or send it: "
        hint += remedies.parameters
    return Difference(f"{text}: {hint}")


def _begin(since: str) -> str:
    return f"the ranks have drifted apart{f', {since}' if since else ''}"


def _listed(what: str, of_all: Sequence[Facts], values: Sequence[Any]) -> str:
    pairs = _by_value(of_all, values)
    return f"{what} " + ", ".join(f"{_shown(value)} on {ranks}" for value, ranks in pairs)


def _by_value(of_all: Sequence[Facts], values: Sequence[Any]) -> list[tuple[Any, str]]:
    """Return the values, each with its ranks; fewest ranks first, and rank 0's after its equals."""
    found: list[tuple[Any, list[int]]] = []
    for facts, value in zip(of_all, values, strict=True):
        its = next((ranks for other, ranks in found if other == value), None)
        if its is None:
            found.append((value, its := []))
        its.append(facts["rank"])
    found.sort(key=lambda pair: (len(pair[1]), -pair[1][0]))
    return [(value, _ranks(ranks)) for value, ranks in found]


def _shown(value: Any) -> str:
    return "not set" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 0, 2-5"."""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0])]
    listed = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"
