"""Creation of process groups from the arguments that torch passes to a backend.

The default group starts the engine, unless `hvd.init()` has started it with the same ranks. Ranks meet at the
rendezvous of Hora's launcher, or under other launchers in torch's store. Every other group is a process set that only
its members register.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hora import engine
from hora.config import EngineConfig
from hora.engine import Runtime
from hora.engine.queue import OperationQueue
from hora.engine.rendezvous import close_store, world_of_store
from hora.platforms.detect import detect_world
from hora.requirements import require
from hora.torch.distributed.backend import HoraBackend
from hora.torch.distributed.endpoint import Endpoint
from hora.torch.distributed.group import HoraProcessGroup
from hora.torch.distributed.live import remember
from hora.torch.distributed.phases import phases
from hora.torch.distributed.reconfigure import alone as a_world_alone
from hora.torch.distributed.shape import HAS_BACKENDS
from hora.torch.untraced import leave_untraced
from hora.world import World

_End = TypeVar("_End", bound=Endpoint)


def create(options: Any, backend_options: Any, *, hooked: bool) -> HoraProcessGroup | HoraBackend:
    """Create a group; called by torch (`extended_api`). `hooked`: torch will attach hooks to it."""
    # Before 2.7 C++ code, such as DDP's, loses the Python half of a work object and never returns.
    require("torch", torch.__version__, feature='the backend "hora" of torch.distributed', floor="2.7")
    alone = _is_alone(sys._getframe(2).f_locals.get("backend_config"))
    leave_untraced()
    ranks, timeout = list(options.global_ranks_in_group), options.timeout
    if getattr(options, "enable_reconfigure", False):
        return _make_unconnected(options, timeout, alone=alone)
    place = options.group_id, options.store, options.group_rank, options.group_size, timeout, ranks
    return _make_group(hooked, *place) if alone else HoraBackend(_make_endpoint(*place))


def _make_group(
    hooked: bool, name: str, store: Any, rank: int, size: int, timeout: timedelta, global_ranks: Sequence[int]
) -> HoraProcessGroup:
    """Return this rank's end of a group as a group of torch (collective among its members)."""
    entered = _enter(name, store, rank, size, timeout, global_ranks)
    group = HoraProcessGroup(store, rank, size, *entered, partial(_make_group, hooked))
    group.attach(name, watched=hooked)
    return _begin(group, name, global_ranks)


def _make_unconnected(options: Any, timeout: timedelta, *, alone: bool) -> HoraProcessGroup:
    """Return a group without members, until the program calls `reconfigure`."""
    if list(options.global_ranks_in_group) or not alone or engine.is_initialized():
        raise ValueError(
            "enable_reconfigure=True needs the default group, with this backend alone, in a process that has not "
            "called hvd.init(): the members of its engine are those of the group"
        )
    engine.init(world=a_world_alone())
    runtime = engine.current_runtime()
    queue = runtime.sets.add_group([0], options.group_id, limit_s=timeout.total_seconds())
    group = HoraProcessGroup(options.store, 0, 1, runtime, queue, timeout, _end_engine, partial(_make_group, False))
    group.attach(options.group_id, watched=False)
    group.start_unconnected(options.group_rank, options.group_size)
    return group


def _make_endpoint(
    name: str, store: Any, rank: int, size: int, timeout: timedelta, global_ranks: Sequence[int]
) -> Endpoint:
    """Return this rank's end of a group that has other backends, too (collective among its members)."""
    end = Endpoint(store, rank, size, *_enter(name, store, rank, size, timeout, global_ranks), _make_endpoint)
    end.setGroupName(name)
    return _begin(end, name, global_ranks)


def _enter(
    name: str, store: Any, rank: int, size: int, timeout: timedelta, global_ranks: Sequence[int]
) -> tuple[Runtime, OperationQueue, timedelta, Callable[[], None] | None]:
    """Return the engine, the group's queue, its timeout and how it ends. Without global ranks: the default group."""
    limit_s = timeout.total_seconds()
    if not global_ranks:
        owns = _start_engine(store, rank, size, limit_s)
        runtime = engine.current_runtime()
        ranks: Sequence[int] = range(size)
    else:
        owns, runtime, ranks = False, engine.current_runtime(), global_ranks
        outside = [one for one in ranks if not 0 <= one < runtime.world.size]
        if outside:
            raise ValueError(
                f"the group names the rank(s) {outside}, but the ranks of this job are 0 to {runtime.world.size - 1}"
            )
    queue = runtime.sets.add_group(ranks, name, limit_s=limit_s)
    return runtime, queue, timeout, _end_engine if owns else None  # else `hvd` uses the engine, too


def _begin(end: _End, name: str, global_ranks: Sequence[int]) -> _End:
    remember(end, name)
    if not global_ranks:
        if EngineConfig.from_env().telemetry_s:
            phases.install()
        # A rank that destroys its group at once would end the engine during the others' init.
        end.wait_for_all("init_process_group")
    return end


def _end_engine() -> None:
    """Stop the engine that `make_group` started, unless `hvd.init()` has been called since."""
    if engine.current_runtime().used_by_hvd:
        return
    point = engine.current_runtime().world.rendezvous
    engine.shutdown()
    if point.kind != "hora":  # a launcher hears of its ranks over this connection until they end
        close_store(point)


def _start_engine(store: Any, rank: int, size: int, limit_s: float) -> bool:
    """Start the engine if it is not running; returns whether this call started it."""
    if engine.is_initialized():
        world = engine.current_runtime().world
        if (world.rank, world.size) != (rank, size):
            raise ValueError(
                f"init_process_group was called for rank {rank} of {size}, but hvd.init() has made this process rank "
                f"{world.rank} of {world.size}: give both the same place, or call hvd.shutdown() first"
            )
        return False
    try:
        world = detect_world()
    except ValueError:  # another launcher may set some of the variables
        world = World()
    if size == 1 and engine.is_newcomer(world):
        engine.init()  # alone, until it joins the others
        return True
    if world.rendezvous.kind != "hora" or (world.rank, world.size) != (rank, size):
        world = world_of_store(store, rank, size, config=EngineConfig.from_env(), limit_s=limit_s)
    engine.init(world=world)
    return True


def _is_alone(config: Any) -> bool:
    """Return whether a group has this backend alone. Raises ValueError where torch would silently drop all others."""
    names = set(config.get_device_backend_map().values()) if isinstance(config, dist.BackendConfig) else {"hora"}
    if len(names) > 1 and not HAS_BACKENDS:
        raise ValueError(
            f"torch {torch.__version__} cannot have several backends in one process group with one of them from a "
            f'package, but the backend is "{config}": use init_process_group("hora"), which serves CPU and CUDA '
            "tensors, or torch 2.14 or newer"
        )
    return len(names) == 1
