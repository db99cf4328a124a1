"""The public worker functions, and the choice of the session that serves them:

1. Inside a worker: the session that started it, so that all workers have the same master.
2. A session that `hora workers launch` keeps for this folder.
3. Otherwise a session of this process's own, which ends with it. Under `hora.compat` its name is in the environment, so
   that the processes it starts speak to it too.
4. A process that has none, in a second terminal, lists, awaits and stops the workers of the first script that has
   launched some in the same folder.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import numbers
import os
import threading
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hora.launch.environment import variables
from hora.workers.gateway import Gateway, call_session, find, named, new_name, runs
from hora.workers.session import WorkerSession


@dataclass(frozen=True)
class StopResponse:
    """The part of the response to a stop request that callers read."""

    id: str
    status_code: int

    @property
    def ok(self) -> bool:
        return self.status_code < 400


Session = WorkerSession | tuple[str, str]  # of this process, or the name and key of one in another


def _call(session: Session, call: str, *, limit_s: float | None = 60.0, **request: Any) -> Any:
    if isinstance(session, WorkerSession):
        return getattr(session, call)(**request)
    return call_session(*session, call=call, limit_s=limit_s, **request)


_lock = threading.Lock()
_own: tuple[int, Gateway] | None = None  # with the process it belongs to: a forked child has none


def _session(*, launching: bool = False) -> Session:
    given = named()
    if given is not None and (variables().get("CDSW_MASTER_ID") or (_own is None and runs(given[0]))):
        return given
    found = find(os.getcwd())
    if found is None and not launching and (_own is None or _own[0] != os.getpid()):
        found = find(os.getcwd(), "script")
    return found or _own_session(launching=launching)


def _own_session(*, launching: bool) -> Session:
    global _own
    with _lock:
        if _own is None or _own[0] != os.getpid():
            name, key = named() or new_name()
            try:
                gateway = Gateway(name, key)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                return name, key  # of the process that started this one
            atexit.register(_close, os.getpid())
            _own = os.getpid(), gateway
        gateway = _own[1]
        if launching and gateway.published is None:
            with contextlib.suppress(OSError):  # another script of this folder was the first
                gateway.publish(os.getcwd(), "script")
        return gateway.session


def _close(owner: int) -> None:
    global _own
    with _lock:
        own, _own = _own, None
    if own is not None and owner == os.getpid():
        own[1].close()


def launch_workers(
    n: int,
    cpu: float,
    memory: float,
    nvidia_gpu: int = 0,
    kernel: str = "python3",
    script: str = "",
    code: str = "",
    accelerator_label_id: object = None,
    resource_profile_id: object = None,
    resource_group_id: object = None,
    env: Mapping[str, str] | None = None,
    name: str = "",
    *,
    all_or_nothing: bool = False,
    wait_seconds: float = 0,
    strict: bool = False,
    raise_on_error: bool = False,
    log_dir: str = "",
    backend: str = "auto",
) -> list[dict[str, Any]]:
    """Start workers without waiting for them.

    A launch that was refused is a dict without `id`, with `message`, and a warning. The accelerator and resource
    arguments of the original are accepted and have no meaning here.

    Args:
        n: How many workers.
        cpu: Cores of each. Where there are fewer, the workers share them, with a warning.
        memory: GiB of each.
        nvidia_gpu: GPUs of each.
        kernel: python3, the only one.
        script: A file to run; wins over `code`.
        code: Python text to run.
        env: More environment variables.
        name: Shown in lists.
        all_or_nothing: If one does not fit, start none.
        wait_seconds: How long to wait for room, with `all_or_nothing`.
        strict: Refuse if there are too few cores, as if memory or GPUs are missing.
        raise_on_error: Raise RuntimeError for a refused launch.
        log_dir: A folder for the output of each worker.
        backend: "local" processes, tasks of the active "spark" session, or "auto": Spark where this process has a
            session on a cluster.

    Returns:
        One dict for each worker, in order.

    Raises:
        ValueError: An argument is invalid.
    """
    if kernel not in ("python3", "python2", "r", "scala", ""):
        raise ValueError(f"kernel must be python3, but it is {kernel!r}")
    if kernel not in ("python3", ""):
        raise ValueError(f"only the python3 kernel can run here, but {kernel!r} was requested")
    if backend not in ("auto", "local", "spark"):
        raise ValueError(f"backend must be auto, local or spark, but it is {backend!r}")
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"n must be a whole number of workers, at least 1, but it is {n!r}")
    if not script and not code:
        raise ValueError("workers need something to run: give them code= or script=")
    if wait_seconds and not all_or_nothing:
        raise ValueError(f"wait_seconds={wait_seconds} is for all_or_nothing=True; otherwise what fits starts at once")
    if script and not os.path.exists(script):
        raise ValueError(f"there is no script {script!r} in {os.getcwd()}")
    if not isinstance(code, str):
        raise ValueError(f"code must be Python text, but it is {code!r}")
    for what, value in (("cpu", cpu), ("memory", memory), ("nvidia_gpu", nvidia_gpu)):
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise ValueError(f"{what} must be a number, but it is {value!r}")
    request = {
        "cpu": float(cpu),
        "memory": float(memory),
        "nvidia_gpu": int(nvidia_gpu),
        "script": os.path.abspath(script) if script else "",
        "code": code,
        "env": {str(key): str(value) for key, value in (env or {}).items()},
        "name": name,
        "all_or_nothing": all_or_nothing,
        "strict": strict,
        "wait_s": float(wait_seconds),
        "log_dir": os.path.abspath(log_dir) if log_dir else "",
        "backend": backend,
    }
    answers = _call(_session(launching=True), "launch", limit_s=wait_seconds + 60.0, n=n, request=request)
    refused = [answer["message"] for answer in answers if "id" not in answer]
    notes = [answer["message"] for answer in answers if "id" in answer and answer["message"]]
    if notes:
        warnings.warn(notes[0], stacklevel=2)
    if refused:
        text = f"{len(refused)} of {n} workers were not launched: {refused[0]}"
        if raise_on_error:
            raise RuntimeError(text)
        warnings.warn(text, stacklevel=2)
    return answers


def list_workers() -> list[dict[str, Any]]:
    """Return all workers of the session, in any state, in launch order."""
    return _call(_session(), "workers")


def await_workers(
    ids: Any, wait_for_completion: bool = True, timeout_seconds: float = 60
) -> dict[str, list[dict[str, Any]]]:
    """Wait until the workers have completed, or until they run.

    Args:
        ids: What `launch_workers` returned, or ids of workers.
        wait_for_completion: False: only until they run.
        timeout_seconds: 0: no limit.
    """
    timeout_s = max(float(timeout_seconds), 0.0)
    request = {"ids": _ids(ids), "for_completion": bool(wait_for_completion), "timeout_s": timeout_s}
    return _call(_session(), "wait", limit_s=timeout_s + 30.0 if timeout_s else None, **request)


def stop_workers(*ids: Any) -> list[StopResponse] | None:
    """Stop these workers, or all of the session, and wait for their end. Returns None if there was nothing to stop."""
    session = _session()
    if not ids:
        chosen = [worker["id"] for worker in _call(session, "workers") if worker["finished_at"] is None]
        if not chosen:
            return None
    else:
        chosen = [worker for item in ids for worker in _ids(item)]
    return [StopResponse(worker, status) for worker, status in _call(session, "stop", ids=chosen)]


def keep_session() -> None:
    """Let the workers of this folder outlive this process, until `end_session` or an hour without workers."""
    from hora.workers import daemon  # which is run as a module: not to be imported with its package

    daemon.start(os.getcwd())


def end_session() -> bool:
    """End the session that `keep_session` or `hora workers launch` started, with its workers; False if none runs."""
    from hora.workers import daemon

    return daemon.end(os.getcwd())


def worker_output(worker: Any) -> str:
    """Return the tail of a worker's output."""
    (chosen,) = _ids(worker)
    return _call(_session(), "tail", worker=chosen)


def _ids(given: Any) -> list[str]:
    """Return the ids of one id, one worker dict, or an iterable of them."""
    if isinstance(given, str | int):
        return [str(given)]
    if isinstance(given, Mapping):
        found = given.get("id", given.get("engineId"))
        if found is None:
            raise ValueError(f"this dict describes no worker: it has neither id nor engineId: {dict(given)}")
        return [str(found)]
    if isinstance(given, Iterable):
        return [worker for item in given for worker in _ids(item)]
    raise ValueError(
        f"worker ids must be strings, worker dicts or a list of them, but {type(given).__name__} was given"
    )
