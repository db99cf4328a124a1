"""Process sets: groups of ranks that run collectives among themselves. The engine identifies them by id.

`basics.init` binds the given objects to ids. `add_process_set` and `remove_process_set` are collective over all ranks.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from hora import engine
from hora.errors import HorovodInternalError

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]


def is_mpi_communicator(value: object) -> bool:
    """Return whether the value is an mpi4py communicator, without importing mpi4py."""
    return type(value).__module__.split(".")[0] == "mpi4py"


def _sorted_ranks(ranks: Any) -> list[int]:
    try:
        values = list(ranks)
    except TypeError:
        raise ValueError(
            f"a process set is made from a list of ranks, but got {type(ranks).__name__}: {ranks!r}"
        ) from None
    if any(isinstance(value, bool) or not hasattr(value, "__index__") for value in values):
        raise ValueError(f"the ranks of a process set must be integers, but they are {values!r}")
    return sorted(operator.index(value) for value in values)


class ProcessSet:
    """A set of global ranks. It is usable once `init` or `add_process_set` has registered it.

    Args:
        ranks_or_comm: The list of ranks, or an mpi4py communicator.
    """

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        if is_mpi_communicator(ranks_or_comm):
            raise ValueError(
                "a process set from an MPI communicator needs MPI, which is not built; pass a list of ranks"
            )
        self.process_set_id: int | None = None
        self.ranks: list[int] | None = _sorted_ranks(ranks_or_comm)
        self.mpi_comm = None

    def size(self) -> int | None:
        """Return the number of members; None until registered."""
        if self.process_set_id is None:
            return None
        return len(_registered_ranks(self))

    def rank(self) -> int | None:
        """Return this process's index among the members; None until registered. ValueError if it is no member."""
        if self.process_set_id is None:
            return None
        ranks, mine = _registered_ranks(self), engine.current_runtime().world.rank
        if mine not in ranks:
            raise ValueError(f"Rank {mine} is not a member of the provided process set, whose ranks are {ranks}")
        return ranks.index(mine)

    def included(self) -> bool | None:
        """Return whether this process is a member; None while the ranks are unknown."""
        if self.ranks is None:
            return None
        return runtime_or_value_error().world.rank in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"

    __repr__ = __str__


global_process_set = ProcessSet([])
global_process_set.process_set_id, global_process_set.ranks = 0, None

# Objects that hold an id of the running engine. Weak, so that a dropped set is collected.
_bound: weakref.WeakSet[ProcessSet] = weakref.WeakSet()


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a new set; all ranks call this in the same order. Needs HOROVOD_DYNAMIC_PROCESS_SETS=1 at init.

    Args:
        process_set: A `hvd.ProcessSet`: the ranks concerned; all ranks where it is not given. Other ranks must not
            call.
    """
    if is_mpi_communicator(process_set):
        raise NotImplementedError(
            "adding a process set from an MPI communicator is not supported; pass a list of ranks"
        )
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    runtime = runtime_or_value_error()
    if runtime.status.closing:
        raise ValueError(f"no process set can be added any more: {runtime.status.reason}")
    process_set.process_set_id = runtime.sets.add_process_set(list(process_set.ranks or []))
    _bound.add(process_set)
    return process_set


def host_process_set() -> ProcessSet:
    """Return the set of the ranks on this host, registering the sets of all hosts if needed (collective)."""
    runtime = runtime_or_value_error()
    number = runtime.sets.set_of_this_host()
    if number == 0:
        return global_process_set
    process_set = ProcessSet(runtime.sets.ranks(number))
    process_set.process_set_id = number
    _bound.add(process_set)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Unregister a set on all ranks; returns False if it is the global set or not registered.

    Args:
        process_set: A `hvd.ProcessSet`: the ranks concerned; all ranks where it is not given. Other ranks must not
            call.
    """
    if not isinstance(process_set, ProcessSet):
        raise ValueError(
            f"remove_process_set needs a ProcessSet, but got {type(process_set).__name__}: {process_set!r}"
        )
    runtime = runtime_or_value_error()
    # Ask the engine even about a set it cannot know, because it reports static mode.
    removed = runtime.sets.remove_process_set(-1 if process_set.process_set_id is None else process_set.process_set_id)
    if removed:
        unbind(process_set)
    return removed


def bind(process_sets: Sequence[ProcessSet]) -> None:
    """Give each object the running engine's id for its ranks; `init` calls this on all ranks."""
    runtime = engine.current_runtime()
    world_ranks = list(range(runtime.world.size))
    global_process_set.ranks = world_ranks
    known = {tuple(ranks): process_set_id for process_set_id, ranks in runtime.sets.process_sets().items()}
    seen: dict[tuple[int, ...], int] = {}
    for index, process_set in enumerate(process_sets):
        ranks = tuple(process_set.ranks or [])
        if list(ranks) == world_ranks:
            raise ValueError(
                f"process_sets[{index}] has the ranks {list(ranks)}, as the global process set has already"
            )
        if ranks in seen:
            raise ValueError(f"process_sets[{index}] has the same ranks {list(ranks)} as process_sets[{seen[ranks]}]")
        if ranks not in known:
            raise ValueError(
                f"process_sets[{index}] with the ranks {list(ranks)} is not registered in the running one, "
                f"which knows {sorted(known)}; call shutdown() before init(), or add_process_set()"
            )
        seen[ranks] = index
        process_set.process_set_id = known[ranks]
        _bound.add(process_set)


def unbind(*process_sets: ProcessSet) -> None:
    """Remove the ids from these objects, or from all objects (after a shutdown)."""
    for process_set in process_sets or list(_bound):
        process_set.process_set_id = None
        _bound.discard(process_set)
    if not process_sets:
        global_process_set.ranks = None


def registered_id(process_set: ProcessSet) -> int:
    """Return the engine's id of the set; raises ValueError if it has none."""
    if not isinstance(process_set, ProcessSet):
        what = f"{type(process_set).__name__}: {process_set!r:.100}"
        raise ValueError(f"process_set must be a ProcessSet, but it is {what}")
    if process_set.process_set_id is None:
        raise ValueError(
            f"Process set with ranks {process_set.ranks} does not exist, or has not been registered; pass it "
            "to hvd.init(process_sets=…) or hvd.add_process_set()"
        )
    return process_set.process_set_id


def _registered_ranks(process_set: ProcessSet) -> list[int]:
    assert process_set.process_set_id is not None
    ranks = runtime_or_value_error().sets.process_sets().get(process_set.process_set_id)
    if ranks is None:
        raise ValueError(
            f"Process set with id {process_set.process_set_id} and ranks {process_set.ranks} does not exist, "
            "or has not been registered"
        )
    return list(ranks)


def runtime_or_value_error() -> engine.Runtime:
    """Return the running engine; raises ValueError if there is none."""
    try:
        return engine.current_runtime()
    except HorovodInternalError as error:
        raise ValueError(str(error)) from None
