"""`DriftWatch`: the members of a process set compare whether they still train the same model.

Ranks that apply the same averaged gradients to the same parameters with the same hyperparameters stay equal. So nothing
is sent to keep them equal, and no rank notices when they part. The watch compares right after a reduction, when all
members have met anyway:

    hyperparameters   of every step, and how many steps were applied
    parameters        a part at a time, all of them within 1,000 steps, and all of them in the first comparison
    buffers           that should agree, likewise

One small allreduce carries the digests (`digest`). Comparisons take about two thousandths of the time. The members
agree on the interval, so they compare in the same steps. All members come to the same decision, exchange what differs
(`difference`), and report it once.

How a front uses it, in lockstep on all members:

    watch = DriftWatch("optimizer's name", DriftSettings(on_drift="warn"), process_set_id=0)
    watch.reduced(groups, parameters)   after every reduction; groups: hyperparameters, parameters: (name, tensor)
    watch.applied(groups)               after every step in which the reduced gradients were applied
    watch.restart()                     after a broadcast of parameters or hyperparameters
    watch.abstains = True               this rank steps without a reduction, by intent

`reduced` is `is_due`, `compute_digests` and `compare` together: a front whose ranks may change parameters of others, or
that waits for a reduction, takes digests before the wait. Tensors share memory with the front's own: for numpy arrays
use torch.from_numpy. A new world needs a new watch.
"""

from __future__ import annotations

import json
import logging
import math
import numbers
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from hora import engine
from hora.config import strict
from hora.engine.repeated import CallPlan
from hora.engine.request import Kind, Request
from hora.errors import DriftError
from hora.telemetry.meters import meter
from hora.torch.drift import difference
from hora.torch.drift.difference import REPLACED
from hora.torch.drift.digest import NUM_SUMS, all_equal, combined, digest, digest_of_text, flat, sums_of

Named = Iterable[tuple[str, torch.Tensor]]
_Tensors = Mapping[str, torch.Tensor]

_log = logging.getLogger("hora")
_EARLY = (3, 5, 8, 16, 32)  # reductions until the first comparisons; then an interval that the members agree on
_SHORTEST, _LONGEST = 32, 100
_WHOLE_WITHIN = 800  # reductions in which every parameter has its turn
_SHARE_OF_TIME = 2e-3
_HISTORY = 4096
_LEAST_BYTES = 4096
# A scheduler's own notes, and settings that only choose an implementation.
_NOT_COMPARED = frozenset(("params", "param_names", "initial_lr", "foreach", "fused", "capturable", "differentiable"))
_CHOICES = ("warn", "error", "ignore")
_FIELDS = ("settings", "parameters", "buffers")


@dataclass(frozen=True, kw_only=True)
class DriftSettings:
    """The user's settings of the comparison."""

    on_drift: str = "warn"  # or "error", "ignore"
    local: Collection[str] = ()  # names of hyperparameters, parameters, buffers or modules that differ by intent
    buffers: Callable[[], Named] = tuple  # returns the buffers of the model, by name
    remedies: difference.Remedies = difference.TORCH

    def __post_init__(self) -> None:
        if self.on_drift not in _CHOICES:
            raise ValueError(f"on_drift must be one of {', '.join(_CHOICES)}, but it is {self.on_drift!r}")
        if isinstance(self.local, str) or not all(isinstance(name, str) for name in self.local):
            raise ValueError(f"local must be a list of names, but it is {self.local!r:.100}")


class _Piece(NamedTuple):
    name: str
    elements: torch.Tensor


class Rotation:
    """Goes through tensors a part at a time, the same one on every rank. Digests of a GPU's tensors come a turn later,
    so that no rank waits for it.
    """

    def __init__(self) -> None:
        self.agreed_at: dict[str, int] = {}  # the step after which a tensor was last the same everywhere
        self.since = 0  # the step before which this turn's digests were taken
        self._at = 0
        self._turn: tuple[list[str], list[Any], int] = ([], [], 0)

    def next_digest(self, tensors: Named, share: float, step: int) -> int:
        """Return the digest of the next `share` of the tensors, after `step` steps."""
        pieces = self._next(sorted((name, flat(tensor)) for name, tensor in tensors), share)
        turn = [piece.name for piece in pieces], [digest(piece.elements) for piece in pieces], step
        late = any(isinstance(one, torch.Tensor) for one in turn[1])
        now, self._turn = (self._turn, turn) if late else (turn, turn)
        self.names, found, self.since = now
        total = len(self.names)
        for one in found:
            for number in one.tolist() if isinstance(one, torch.Tensor) else [one]:
                total = combined(total, number)
        return total

    def _next(self, tensors: Sequence[tuple[str, torch.Tensor]], share: float) -> list[_Piece]:
        total = sum(elements.nbytes for _, elements in tensors)
        wanted = min(max(math.ceil(total * min(share, 1.0)), _LEAST_BYTES), total)
        if share >= 1.0:
            self._at = 0
        begin, end, at, pieces = self._at, self._at + wanted, 0, []
        for turn in (0, total):  # the end of the last one is followed by the first one
            at = turn
            for name, elements in tensors:
                first, last = max(begin, at) - at, min(end, at + elements.nbytes) - at
                if first < last:
                    size = elements.dtype.itemsize
                    pieces.append(_Piece(name, elements[first // size : -(-last // size)]))
                at += elements.nbytes
        self._at = end % total if total else 0
        return pieces

    def agreed(self) -> None:
        """Note that all members have this turn's digest."""
        self.agreed_at.update(dict.fromkeys(self.names, self.since))


class DriftWatch:
    """One member's part of the comparisons; see the module."""

    def __init__(
        self,
        label: str,
        settings: DriftSettings,
        *,
        process_set_id: int = 0,
        finish: Callable[[Request], object] = Request.result,
    ) -> None:
        self.abstains = False  # this rank differs by intent
        self.num_left: float  # reductions until the next comparison
        self.num_steps = 0
        self._runtime = engine.current_runtime()
        self._label, self._set_id = f"drift.{label}", process_set_id
        self._finish = finish  # waits for a request
        self._ranks = self._runtime.sets.ranks(process_set_id)
        self._is_error = settings.on_drift == "error" or strict()
        self._local = frozenset(settings.local)
        self._remedies = settings.remedies
        self._ended = set(_FIELDS if settings.on_drift == "ignore" else ())  # what is not compared any more
        self._exchange_s = math.inf
        self._plan: CallPlan | None = None
        self.restart()

    @property
    def is_current(self) -> bool:
        """Return whether its world is the running one."""
        return self._runtime.is_current

    def restart(self) -> None:
        """Begin anew (on all members): they have just been made equal, or a member has missed steps."""
        self.num_joins = self._runtime.num_joins
        self.abstains = False
        self._begin = self.num_steps
        self._num_checks, self._gap = 0, _EARLY[0]
        self._expect(self._gap)
        self._since = time.perf_counter()
        self._chain = 0
        self._keys: list[list[str]] = []
        self._getters: list[Callable[[Mapping[str, Any]], Sequence[Any]]] = []
        self._seen: list[Sequence[Any]] = []  # of the last step, by group
        self._settings: dict[tuple[int, str], Any] = {}
        self._history: deque[tuple[int, int, str, Any]] = deque(maxlen=_HISTORY)
        self._are_apart = False
        self._rotations = {"parameters": Rotation(), "buffers": Rotation()}
        self._digests: dict[str, int] = {}

    # --- every step ---------------------------------------------------------------------------------------------------

    def applied(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Note a step with these hyperparameters."""
        self.num_steps += 1
        try:
            values = [get(group) for get, group in zip(self._getters, groups, strict=True)]
            if values != self._seen:
                self._note(values)
        except (KeyError, ValueError, RuntimeError):  # other names; arrays that cannot be compared as a whole
            self._look_again(groups)

    def _look_again(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Note all hyperparameters; tensors may have been changed in place."""
        self._keys = [[key for key in group if key not in _NOT_COMPARED and key not in self._local] for group in groups]
        self._getters = [_getter(keys) for keys in self._keys]
        self._seen = [[...] * len(keys) for keys in self._keys]
        self._note([get(group) for get, group in zip(self._getters, groups, strict=True)])

    def _note(self, values: list[Sequence[Any]]) -> None:
        seen, self._seen = self._seen, values
        for number, (keys, olds, news) in enumerate(zip(self._keys, seen, values, strict=True)):
            for key, old, new in zip(keys, olds, news, strict=True):
                if new is old:
                    continue
                value = plain(new)
                if self._settings.get((number, key), ...) != value:
                    self._settings[number, key] = value
                    self._add(number, key, value)

    def replaced(self, name: str) -> None:
        """Note that this rank has given other memory to a parameter that all of them share: every rank must."""
        key = 0, f"{REPLACED}{name}"
        value = self._settings[key] = self._settings.get(key, 0) + 1
        self._add(*key, value)

    def _add(self, group: int, key: str, value: Any) -> None:
        step = self.num_steps - self._begin
        self._history.append((step, group, key, value))
        self._chain = combined(self._chain, digest_of_text(f"{step} {group} {key} {value!r}"))

    # --- a comparison -------------------------------------------------------------------------------------------------

    def reduced(self, groups: Sequence[Mapping[str, Any]], parameters: Named, buffers: Named = ()) -> None:
        """Count a reduction, and compare when it is time (collective then)."""
        if self.is_due():
            tensors = list(parameters), list(buffers)
            self.compute_digests(groups, *tensors)
            self.compare(*tensors)

    def is_due(self) -> bool:
        """Count a reduction; return whether the members compare after it."""
        if self.num_joins != self._runtime.num_joins:
            self.restart()
        self.num_left -= 1
        return self.num_left <= 0

    def compute_digests(self, groups: Sequence[Mapping[str, Any]], parameters: Named, buffers: Named = ()) -> None:
        """Compute this rank's digests, before or after the reduction."""
        if any(isinstance(value, torch.Tensor) for values in self._seen for value in values):
            self._look_again(groups)
        share = 1.0 if not self._num_checks else self._gap / _WHOLE_WITHIN
        self._digests = {"settings": combined(self._chain, self.num_steps - self._begin)}
        for (field, rotation), tensors in zip(self._rotations.items(), (parameters, buffers), strict=True):
            self._digests[field] = rotation.next_digest(self._compared(tensors), share, self.num_steps)

    def _compared(self, tensors: Named) -> list[tuple[str, torch.Tensor]]:
        if not self._local:
            return list(tensors)
        return [(name, tensor) for name, tensor in tensors if not is_local(name, self._local)]

    def compare(self, parameters: Named, buffers: Named = ()) -> None:
        """Compare the digests with the others' (collective). Raises DriftError if the settings of a member say so."""
        began = time.perf_counter()
        step_s = max((began - self._since) / self._gap, 1e-9)
        wanted = max(min(self._exchange_s / (_SHARE_OF_TIME * step_s), _LONGEST), _SHORTEST)
        mine = [not self.abstains, self._is_error, int(wanted)]
        mine += [number for field in _FIELDS for number in sums_of(self._digests[field])]
        ballot = torch.tensor(mine, dtype=torch.int64, device="cpu")
        self._add_up(ballot)
        num_members, num_errors, interval, *sums = ballot.tolist()
        self._since = time.perf_counter()
        self._exchange_s = min(self._exchange_s, self._since - began)
        self._num_checks += 1
        early = self._num_checks < len(_EARLY)
        self._gap = _EARLY[self._num_checks] if early else interval // len(self._ranks) or _SHORTEST
        self._expect(self._gap)
        were_apart, self._are_apart = self._are_apart, num_members < len(self._ranks)
        if self._are_apart or were_apart:  # a member has joined, or differs by intent: begin anew when all are back
            self._begin, self._chain = self.num_steps, 0
            return
        parts = zip(_FIELDS, (sums[at : at + NUM_SUMS] for at in range(0, len(sums), NUM_SUMS)), strict=True)
        differing = [field for field, its in parts if not all_equal(its, num_members) and field not in self._ended]
        for field, rotation in self._rotations.items():
            if field not in differing:
                rotation.agreed()
        if differing:
            tensors = {"parameters": dict(self._compared(parameters)), "buffers": dict(self._compared(buffers))}
            self._report(differing, tensors, is_error=num_errors > 0)

    def _add_up(self, ballot: torch.Tensor) -> None:
        """Add up the members' ballots in place: on one host with the fast path of repeated calls."""
        if self._plan is not None and self._plan.path.carry_out(self._plan, ballot, ballot, self._finish):
            return
        request = self._run(Kind.ALLREDUCE, ballot, ballot, self._label)
        if self._plan is None:
            sets = self._runtime.sets
            self._plan = sets.repeated_plan(sets.queue(self._set_id), request.signature)

    def _expect(self, num_reductions: int) -> None:
        """Set the next comparison; there is none once everything has been reported."""
        self.num_left = math.inf if len(self._ended) == len(_FIELDS) else num_reductions

    # --- a difference -------------------------------------------------------------------------------------------------

    def _report(self, fields: Sequence[str], tensors: Mapping[str, _Tensors], *, is_error: bool) -> None:
        """Find out what differs (collective), and report it once."""
        self._ended.update(_FIELDS)
        self._expect(self._gap)
        of_all = self._exchange(self._facts(fields, tensors))
        found = difference.of_settings(of_all, self._remedies) if "settings" in fields else None
        for field in fields:
            if found is None and field != "settings":
                found = self._find_tensor(field, tensors[field], of_all)
        if found is None:  # other bits of the same numbers
            self._ended = set(fields)
            self._expect(self._gap)
            return
        if self._ranks[0] == self._runtime.world.rank:
            meter.event("drift", found.text)
            if not is_error or found.is_rounding:
                _log.warning("%s", found.text)
        if is_error and not found.is_rounding:
            raise DriftError(found.text)

    def _facts(self, fields: Sequence[str], tensors: Mapping[str, _Tensors]) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "rank": self._runtime.world.rank,
            "begin": self._begin,
            "steps": self.num_steps - self._begin,
            "history": list(self._history) if "settings" in fields else [],
            "machine": _machine(),
        }
        for field in fields:
            if field in tensors:
                facts[field] = {name: _number(digest(flat(tensor))) for name, tensor in tensors[field].items()}
                facts[f"{field} agreed"] = self._rotations[field].agreed_at
        return facts

    def _run(
        self, kind: Kind, tensor: torch.Tensor, output: torch.Tensor | None, name: str, *, root_rank: int = -1
    ) -> Request:
        """Run a collective of the members; returns it with its results."""
        request = self._runtime.submit(
            kind,
            [tensor],
            outputs=None if output is None else [output],
            name=name,
            root_rank=root_rank,
            process_set_id=self._set_id,
            background=False,
        )
        self._finish(request)
        return request

    def _exchange(self, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return every member's facts (collective)."""
        line = torch.frombuffer(bytearray(json.dumps(facts).encode() + b"\n"), dtype=torch.uint8)
        (lines,) = self._run(Kind.ALLGATHER, line, None, f"{self._label}.facts").result()
        return [json.loads(one) for one in lines.numpy().tobytes().splitlines()]

    def _find_tensor(
        self, field: str, tensors: _Tensors, of_all: Sequence[difference.Facts]
    ) -> difference.Difference | None:
        """Return the difference of the first tensor that differs, with its size (collective)."""
        names = difference.differing_names([facts[field] for facts in of_all])
        if not all(name in facts[field] for facts in of_all for name in names):
            return difference.of_names(field, of_all)
        for name in names:
            mine = tensors[name].detach().to("cpu").contiguous()
            first = torch.empty_like(mine)
            self._run(Kind.BROADCAST, mine, first, f"{self._label}.{field}", root_rank=self._ranks[0])
            distances = self._exchange({"distance": _distance(mine, first)})
            if any(one["distance"] for one in distances):
                sizes = [float(one["distance"]) for one in distances]
                return difference.of_tensor(field, name, names, of_all, sizes, self._remedies)
        return None


def is_local(name: str, local: Collection[str]) -> bool:
    """Return whether a name, or the name of a module that it is in, was declared as local."""
    return name in local or any(name.startswith(f"{one}.") for one in local)


def plain(value: Any) -> Any:
    """Return a hyperparameter as JSON has it, equal for equal numbers."""
    if isinstance(value, torch.Tensor):
        value = float(value) if value.numel() == 1 else str(tuple(value.shape))
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, numbers.Real) or hasattr(value, "__float__"):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, (tuple, list)):
        return [plain(one) for one in value]
    return type(value).__name__


def _getter(keys: Sequence[str]) -> Callable[[Mapping[str, Any]], Sequence[Any]]:
    return itemgetter(*keys) if len(keys) > 1 else lambda group: [group[key] for key in keys]


def _number(found: int | torch.Tensor) -> int:
    return combined(*found.tolist()) if isinstance(found, torch.Tensor) else found


def _distance(mine: torch.Tensor, first: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest number; 0.0 for NaN at the same places."""
    mine, first = (torch.view_as_real(one) if one.is_complex() else one for one in (mine, first))
    mine, first = mine.double().reshape(-1), first.double().reshape(-1)
    same = (mine == first) | (mine.isnan() & first.isnan())
    if bool(same.all()):
        return 0.0
    apart = float((mine - first)[~same].abs().nan_to_num(math.inf).max())
    return min(apart / max(float(first[~same].abs().nan_to_num(0.0).max()), 1e-30), 1e30)


def _machine() -> str:
    """Return what may round in another way on another rank."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_initialized() else ""
    return f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()} {gpu}"
