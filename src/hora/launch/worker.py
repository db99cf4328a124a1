"""The worker entry point: `python -m hora.launch.worker` fetches the job's function, runs it, and returns the result.

The function arrives only over the authenticated connection. An exception is reported with its own traceback, and the
process exits with a non-zero status. Commands need no entry point: agents execute them. torch is imported only when the
function needs it. With `--fork-server module …` this process is an agent's fork server, whose forks become workers.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import socket
import sys
import threading
import traceback
from collections.abc import Mapping
from typing import Any, NoReturn

import cloudpickle

from hora import tracebacks
from hora.errors import HorovodInternalError
from hora.launch.agent.fork_server import fork, serve
from hora.launch.environment import replace_variables, variables
from hora.launch.limits import CONNECT_S
from hora.launch.pickling import pickle_exception, pickle_result
from hora.launch.processes import enter, name_process
from hora.launch.program import Program, status_of
from hora.launch.providers.spark.no_driver import NO_DRIVER, forbid_driver
from hora.net.client import FUNCTION_KEY, PATH_KEY, ControlClient
from hora.platforms.detect import detect_world
from hora.telemetry.report import finish as finish_reports

_FETCH_LIMIT_S = 600.0


def become(request: dict[str, Any], descriptors: list[int], agent: socket.socket) -> NoReturn:
    """In a fork of an agent's fork server: run the worker in a second fork, which the agent, a subreaper, adopts."""
    middle = os.getpid()
    try:
        pid = fork()
    except OSError:
        agent.send(b"0")
        os._exit(1)
    if pid:
        agent.send(str(pid).encode())
        os._exit(0)
    while os.getppid() == middle:  # it has nothing left to do
        os.sched_yield()
    agent.close()
    enter(request["agent"], (None, *descriptors), request["cwd"])
    for descriptor in descriptors:
        os.close(descriptor)
    inherited = {name: value for name, value in variables().items() if name not in request["unset"]}
    run_forked(inherited | request["env"], Program.of(request["argv"]))


def run_forked(env: Mapping[str, str], program: Program | None = None) -> NoReturn:
    """In a fork that has its streams: run a worker with this environment to the end of the process. It runs a function,
    or this program.
    """
    name_process(f"hora-rank-{env['HORA_WORKER']}")
    replace_variables(env)
    # NumPy's and torch's generators would be identical in every fork; Python reseeds its own.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules and program is None:  # a program finds the seed with which torch begins
        sys.modules["torch"].default_generator.seed()
    if "hora.torch_backend" in sys.modules:  # torch was loaded in an environment that may have lacked HORA_REPLACE_GLOO
        sys.modules["hora.torch_backend"].register()
    try:
        status = main() if program is None else program.run()
    except BaseException:  # as the interpreter does it at the end of a script
        traceback.print_exc()
        status = 1
    _leave(status)


def main() -> int:
    """Fetch the function, run it and send its result; return the exit status."""
    world = detect_world()
    if variables().get(NO_DRIVER):
        forbid_driver()
    name = f"worker {world.worker}"
    client = ControlClient.connect(world.rendezvous, name=name, worker=world.worker, timeout_s=CONNECT_S)
    with contextlib.closing(client):
        # The caller's module path, so that its modules are importable here too.
        callers_path = json.loads(client.get(PATH_KEY, timeout_s=_FETCH_LIMIT_S))
        sys.path.extend(entry for entry in callers_path if entry not in sys.path and os.path.exists(entry))
        try:
            function, args, kwargs = cloudpickle.loads(client.get(FUNCTION_KEY, timeout_s=_FETCH_LIMIT_S))
            result = function(*args, **kwargs)
            finish_reports(failed=False)  # the job may end as soon as the results are there
            pickled = pickle_result(result, rank=world.rank)
        except SystemExit as error:
            return status_of(error)
        except BaseException as error:  # not swallowed but reported, with its own traceback
            _report(client, error)
            finish_reports(failed=True)
            return 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
        client.send_result(pickled)
        return 0


def _report(client: ControlClient, error: BaseException) -> None:
    # Drop the frame of `main`.
    if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
        error = error.with_traceback(error.__traceback__.tb_next)
    full = variables().get("HORA_FULL_TRACEBACK", "0") == "1"
    text, shown = tracebacks.of_rank(error, full=full, is_first=client.is_first_to_raise)
    print(shown, end="", file=sys.stderr, flush=True)
    try:
        pickled = pickle_exception(error.with_traceback(None))
    except Exception as problem:  # whatever a user's class does, the report must go out
        pickled = b""
        text += f"(the {type(error).__qualname__} itself could not be pickled and stays behind: {_words(problem)})\n"
    client.send_error(
        type_name=type(error).__qualname__,
        message=_words(error),
        traceback=text,
        consequence=isinstance(error, HorovodInternalError),
        pickled=pickled,
    )


def _words(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as problem:  # a class of the user's, once more
        return f"(its text cannot be had: {problem!r})"


def _leave(status: int) -> NoReturn:
    """Exit after threads and exit handlers, without the second that unloading torch takes."""
    threading._shutdown()  # type: ignore[attr-defined]  # what the interpreter does first, and multiprocessing too
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)  # what libraries printed
    os._exit(status)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--fork-server"]:
        # Forked workers inherit the command line, so run under this module's name: `ps` shows them as workers.
        modules, sys.argv[1:] = sys.argv[2:], []  # they are no arguments of the user's function
        serve("hora-forks", modules, become)
    else:
        _leave(main())
