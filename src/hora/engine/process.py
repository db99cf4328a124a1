"""The runtime of this process: created by `init`, returned by `current_runtime`, ended by `shutdown` or at exit."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from hora import lifeline, logs, tracebacks
from hora.config import EngineConfig, misspelt_variables, strict
from hora.engine.rendezvous import control_client, open_rendezvous
from hora.engine.runtime import Runtime
from hora.errors import HorovodInternalError
from hora.memory import keep_freed_memory
from hora.net.client import ControlClient
from hora.platforms.detect import detect_world, export
from hora.requirements import advisories
from hora.telemetry.meters import meter, meter_checkpoints, meter_data_loaders
from hora.telemetry.reporter import Reporter
from hora.world import PLAN_KEY, World

log = logging.getLogger("hora")

_lock = threading.RLock()
_runtime: Runtime | None = None
_runtimes: weakref.WeakSet[Runtime] = weakref.WeakSet()  # also those that start, stop or have stopped
_inherited: Runtime | None = None  # of the parent, in a forked child
_num_starts: dict[int, int] = {}  # per generation of the world: ranks meet under the same number
_registered_exit = False
_last_place: World | None = None
_reporters: dict[ControlClient, Reporter] = {}
_watched: list[ControlClient] = []  # connections that report lost ranks
_broken_generations: set[int] = set()  # those that have lost a rank
_ADMITS_LATER = "newcomers begin alone"
# A newcomer waits for the others' next commit; the launcher decides how long.
_LAUNCHER_DECIDES_S = 7 * 24 * 3600.0


def init(process_sets: Sequence[Sequence[int]] = (), *, dynamic: bool = False, world: World | None = None) -> None:
    """Start the runtime with these process sets unless it runs. `dynamic`: sets may be added and removed later."""
    global _runtime, _registered_exit
    with _lock:
        if _runtime is not None:
            return
        place = detect_world() if world is None else world
        config = EngineConfig.from_env()
        if dynamic:
            config = replace(config, dynamic_process_sets=True)
        elastic = has_elastic_launcher(place)
        if elastic and place.generation < 0:
            # A newcomer prepares its training in a world of its own while the others train, and `restart` takes it to
            # them. Process sets are possible only among them.
            place = _next_place(place, config) if process_sets or _last_place is not None else _alone(place)
        while _runtime is None:
            try:
                _runtime = _start(place, config, process_sets)
            except HorovodInternalError as error:
                if not elastic:
                    raise
                # A rank died while the ranks met: the launcher announces another generation.
                log.warning("the ranks of generation %d did not meet: %s", place.generation, error)
                place = _next_place(place, config)
        if not _registered_exit:
            _registered_exit = True
            atexit.register(shutdown)


def shutdown(*, behind: bool = False) -> None:
    """Stop the runtime on all ranks; a no-op if none is running. `behind`: see `Runtime.shutdown`."""
    global _runtime
    with _lock:
        runtime, _runtime = _runtime, None
    if runtime is not None:
        runtime.is_current = False
        runtime.shutdown(behind=behind)


def restart() -> None:
    """Leave the world and join its next generation; without an elastic launcher, the same world again."""
    place = _place()
    shutdown(behind=True)
    if has_elastic_launcher(place):
        place = _next_place(place, EngineConfig.from_env())
    init(world=place)


def current_place(place: World) -> World:
    """Return this process's place now: in an elastic job that has lost a rank, or for a newcomer, that in the next
    generation.
    """
    if _runtime is None and has_elastic_launcher(place):
        config = EngineConfig.from_env()
        client = open_rendezvous(place, limit_s=config.init_timeout_s).client
        _watch(client)
        if place.generation < 0 and client.check([_ADMITS_LATER]):
            return _alone(place)
        if place.generation < 0 or place.generation in _broken_generations:
            return _next_place(place, config)
    return place


def _alone(place: World) -> World:
    return replace(place, rank=0, size=1, local_rank=0, local_size=1, cross_rank=0, cross_size=1)


def admit_later() -> None:
    """Let newcomers of this job begin alone, although it does not use `hvd`: they join its ranks by `restart`."""
    client = control_connection()
    if client is not None:
        client.set(_ADMITS_LATER, b"1")


def has_elastic_launcher(place: World | None = None) -> bool:
    """Return whether a launcher creates a new world for this process when one breaks."""
    place = place or _place()
    return place.elastic and place.rendezvous.kind == "hora"


def is_newcomer(place: World | None = None) -> bool:
    """Return whether this process has no rank in its job yet: `restart` waits for one."""
    place = place or _place()
    return place.elastic and place.generation < 0


def _as_told(world: World) -> World:
    """Return the world to report: for a newcomer, the one with its device and its future rank."""
    return detect_world() if is_newcomer(world) else world


def _advice_of_elastic_job() -> str:
    """Return what to change in a program whose job would go on without the lost rank."""
    if _last_place is None or not has_elastic_launcher(_last_place):
        return ""
    return (
        "The job was started to go on without lost ranks (--min-np), but the program does not: call its training "
        "function through @hvd.elastic.run, or protect its DistributedDataParallel with hora.elastic.protect. For a "
        "script of one process, `hora init --from SCRIPT --elastic NEW` writes a copy that does.\n"
    )


def _is_first_to_raise(text: str) -> bool:
    client = control_connection()
    return client is None or client.is_first_to_raise(text)


@functools.cache
def _name_misspelt_variables() -> None:
    for text in misspelt_variables():
        logging.getLogger("hora").warning("%s", text)


def _start(place: World, config: EngineConfig, process_sets: Sequence[Sequence[int]]) -> Runtime:
    global _last_place
    _last_place = place
    logs.set_up(config.log_level, hide_time=config.log_hide_time, rank=_as_told(place).rank)
    tracebacks.install(full=config.full_traceback, is_first=_is_first_to_raise, advice=_advice_of_elastic_job)
    _name_misspelt_variables()
    _refuse_vulnerable_torch()
    if config.keep_freed_memory:
        keep_freed_memory()
    if config.lifeline:
        with contextlib.suppress(OSError):  # a process that a worker has started elsewhere
            lifeline.own(config.lifeline)
    if place.elastic or (place.size > 1 and place.rendezvous.kind == "hora"):
        # Before the ranks meet, because a rank may be lost meanwhile; and an elastic world of one may grow.
        open_rendezvous(place, limit_s=config.init_timeout_s)
    client = control_client(place)
    if client is not None and place.rendezvous.planned:
        plan = client.get(PLAN_KEY, timeout_s=config.init_timeout_s)
        _last_place = place = replace(place, generation=int(plan))
    epoch = _num_starts.get(place.generation, 0)
    _num_starts[place.generation] = epoch + 1
    if client is not None:
        _watch(client)
    runtime = Runtime(place, config, epoch)
    _runtimes.add(runtime)
    runtime.start(process_sets)
    meter.world_formed(place.rank, place.size)
    if not is_newcomer(place):
        _start_reporting(place, config)
    return runtime


def _refuse_vulnerable_torch() -> None:
    """Raise ValueError under HORA_STRICT=1 if this torch's `torch.load` can be made to run code."""
    known = advisories(torch.__version__)
    if known and strict():
        raise ValueError(
            f"refused because of HORA_STRICT=1: torch {torch.__version__} has known vulnerabilities "
            f"({', '.join(known)}), by which a file passed to torch.load can run code; install a newer one"
        )


def _start_reporting(place: World, config: EngineConfig) -> None:
    """Answer the launcher's questions and, with `HORA_TELEMETRY_S`, send telemetry: one reporter per connection."""
    if place.rendezvous.kind != "hora":
        return
    if config.telemetry_s:
        open_rendezvous(place, limit_s=config.init_timeout_s)  # a world of one has not opened it
    client = control_client(place)
    if client is None or client in _reporters:
        return

    # If no launcher has numbered the processes (Ray's actors), their ranks are their numbers.
    worker = place.worker if place.worker >= 0 else place.rank

    def send(kind: str, data: bytes) -> None:
        client.tell(kind, data, worker=worker)

    def late(ranks: Sequence[int]) -> None:
        with contextlib.suppress(ConnectionError):
            send("stall", json.dumps(list(ranks)).encode())

    reporter = Reporter(meter, send, machine=place.local_rank == 0)
    _reporters[client] = reporter
    meter.on_stall = late
    client.on_notice(lambda notice: reporter.answer(notice) if notice["notice"] == "question" else None)
    send("here", b"")  # the launcher may send questions from now on
    if config.telemetry_s:
        meter_data_loaders()
        meter_checkpoints()
        reporter.start(config.telemetry_s)
        atexit.register(reporter.stop)


def _next_place(place: World, config: EngineConfig) -> World:
    """Return this worker's world in the next generation. Exits if it has no place there."""
    client = open_rendezvous(place, limit_s=config.init_timeout_s).client
    renewed = client.next_world(place, timeout_s=_LAUNCHER_DECIDES_S)
    if renewed is None:
        log.info("this worker has no place in the new world and ends")
        raise SystemExit(0)
    export(renewed)
    return renewed


def _watch(client: ControlClient) -> None:
    if client not in _watched:
        _watched.append(client)
        client.on_notice(_on_notice)


def _on_notice(notice: dict[str, Any]) -> None:
    """Handle a lost rank: the ranks' own connections may take longer to notice it."""
    if notice["notice"] == "lost":
        _broken_generations.add(int(notice["generation"]))
    for runtime in list(_runtimes):
        if notice["notice"] == "lost" and runtime.world.generation == notice.get("generation"):
            runtime.lost(int(notice["rank"]), str(notice["how"]))


def control_connection() -> ControlClient | None:
    """Return the connection to the launcher, if a Hora launcher runs this process and the runtime has connected."""
    return control_client(_place())


def _place() -> World:
    return _runtime.world if _runtime is not None else _last_place or detect_world()


def is_initialized() -> bool:
    return _runtime is not None


def current_runtime() -> Runtime:
    runtime = _runtime
    if runtime is None:
        if _inherited is not None:
            raise HorovodInternalError(
                f"this process was forked from rank {_inherited.world.rank}: it may ask for its place (hvd.rank(), "
                "hvd.size(), …), but collectives belong to the process that called hvd.init()"
            )
        raise HorovodInternalError("Horovod has not been initialized; use hvd.init().")
    return runtime


def current_world() -> World | None:
    """Return this process's place: a forked child (a DataLoader's worker) has its parent's, a newcomer a likely one."""
    runtime = _runtime or _inherited
    return None if runtime is None else _as_told(runtime.world)


def _forget_in_child() -> None:
    """Forget the runtime in a forked child: only the parent uses it. It is kept so that it is not destroyed here."""
    global _runtime, _lock, _inherited
    _inherited, _runtime, _lock = _runtime or _inherited, None, threading.RLock()
    if _inherited is not None:
        _inherited.is_current = False


os.register_at_fork(after_in_child=_forget_in_child)
