"""Turns: threads that train optimizers of their own agree one after another, on all ranks in the same order.

An agreement is several collectives whose names do not tell which optimizer they are for. Before it, the members of the
process set compare the names of the parameters that it is about. If they differ, the first member's optimizer is next:
the others' wait until another thread of their process has brought it.

    waiting --no other turn here--> asking --the same everywhere--> agreeing --> done
       ^                               |
       +-- another thread has agreed --+ the first member has another optimizer
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from hora import engine
from hora.engine.status import WorldStatus
from hora.errors import HorovodInternalError
from hora.torch.compression import described
from hora.torch.functions import allgather_object
from hora.torch.optimizer.bucket_plan import is_channels_last
from hora.torch.optimizer.reducer import ReduceOptions, summed

_LOOK_S = 0.1  # between two looks at the world's status
_LIMIT_S = 60.0


@dataclass(slots=True)
class _Turn:
    """The turn of one process set, in this process."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    owner: int = 0  # the thread that asks or agrees
    num_done: int = 0


_turns: defaultdict[int, _Turn] = defaultdict(_Turn)
_known: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()


def register(optimizer: object, names: Iterable[str]) -> None:
    """Note that this process trains an optimizer with parameters of these names."""
    _known[optimizer] = _digest(names)


@contextlib.contextmanager
def turn(options: ReduceOptions, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Hold the turn to agree about these parameters (collective); an error if other members have others."""
    with _held(options, [options.names[parameter] for parameter in parameters]) as alike:
        if not alike:
            raise_difference([told(parameter, options.names) for parameter in parameters], options)
        yield


@contextlib.contextmanager
def _held(options: ReduceOptions, names: Collection[str]) -> Iterator[bool]:
    """Hold the turn of the optimizer with parameters of these names (collective).

    Yields False if a member has no such optimizer; then all members get it.
    """
    own, status, mine = _turns[options.process_set_id], engine.current_runtime().status, threading.get_ident()
    if own.owner == mine:
        yield True
        return
    identity = _digest(names)
    while True:
        _wait_for(own, lambda: not own.owner, status, "another thread's agreement", take=mine)
        try:
            asked, is_known = _vote(options, identity)
            if len(set(asked)) == 1 or not is_known:
                own.num_done += 1
                yield is_known
                return
            num_done = own.num_done
        finally:
            with own.changed:
                own.owner = 0
                own.changed.notify_all()
        if asked[0] == identity:
            continue  # the other members' threads with this optimizer are still to come
        what = f"the thread with the optimizer that rank {_first_rank(options)} trains first"
        _wait_for(own, lambda num_done=num_done: own.num_done > num_done, status, what)  # type: ignore[misc]


def _digest(names: Iterable[str]) -> int:
    """Return a number for a set of names, never 0."""
    return 1 + int.from_bytes(hashlib.sha256(repr(sorted(names)).encode()).digest()[:5], "little")


def _vote(options: ReduceOptions, identity: int) -> tuple[list[int], bool]:
    """Return the members' optimizers, and whether all train the first one, whose turn it is (collective).

    Joined ranks do not count.
    """
    ballot = [0] * options.num_members
    ballot[options.member] = identity
    asked = [found for found in summed(ballot, options, "optimizer.turn") if found]
    if all(found == identity for found in asked):
        return asked, True
    known = summed([asked[0] in (identity, *_known.values())], options, "optimizer.turn.known")[0]
    return asked, known == len(asked)


def _first_rank(options: ReduceOptions) -> int:
    return engine.current_runtime().sets.ranks(options.process_set_id)[0]


def _wait_for(own: _Turn, happened: Callable[[], bool], status: WorldStatus, what: str, *, take: int = 0) -> None:
    """Wait until something has happened, at most a minute; `take`: this thread then owns the turn."""
    until = time.monotonic() + _LIMIT_S
    with own.changed:
        while not happened():
            status.check_open()
            if time.monotonic() > until:
                raise HorovodInternalError(
                    f"Mismatched order of optimizers: this rank has waited for {_LIMIT_S:g} s for {what}; all ranks "
                    "must step their optimizers in the same order, or each in a thread of its own on all ranks"
                )
            own.changed.wait(_LOOK_S)
        own.owner = take or own.owner


def told(parameter: torch.Tensor, names: dict[torch.Tensor, str]) -> tuple[str, tuple[int, ...], str]:
    """Return what must be equal on all ranks for their bytes of this parameter to mean the same."""
    order = " in channels_last" if is_channels_last(parameter) else ""
    return names[parameter], tuple(parameter.shape), str(parameter.dtype).removeprefix("torch.") + order


def raise_difference(mine: list[tuple[str, tuple[int, ...], str]], options: ReduceOptions) -> None:
    told = (described(options.compression), mine)
    compressions, of_all = zip(
        *allgather_object(told, name="optimizer.parameters", process_set=options.process_set), strict=True
    )
    ranks = engine.current_runtime().sets.ranks(options.process_set_id)
    for rank, theirs in zip(ranks, compressions, strict=True):
        if theirs != compressions[0]:
            raise HorovodInternalError(
                f"Mismatched compression of a DistributedOptimizer: rank {ranks[0]} has {compressions[0]}, rank "
                f"{rank} has {theirs}; name the same compression on all ranks"
            )
    for member, theirs in enumerate(of_all):
        for here, there in itertools.zip_longest(of_all[0], theirs):
            if here != there:
                raise HorovodInternalError(
                    f"Mismatched parameters of a DistributedOptimizer: member 0 of the process set has {here}, member "
                    f"{member} has {there}; all ranks must build the same model with the same parameter names and the "
                    "same memory format"
                )
    raise AssertionError("digests differ although the parameters do not")
