"""Tools that programs import from `horovod.runner`: settings, time limits, secrets, codecs, threads, pipes, addresses.

Hora itself uses only `Timeout`, `ElasticSettings` and `make_secret_key`, for Horovod's signatures on Ray.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import queue
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import IO, Any, NoReturn, TypeVar

import cloudpickle

from hora.launch.agent.protocol import Exited
from hora.launch.controller.launcher import HostLauncher
from hora.launch.controller.output import OutputWriter
from hora.launch.environment import variables
from hora.launch.job import OutputOptions, WorkerSpec
from hora.launch.options import Options, all_options, check
from hora.launch.slots import place_ranks
from hora.net.sockets import interface_address, is_local, resolve, source_address

# horovod.runner.common.util.settings, horovod.runner.elastic.settings


@dataclass(eq=False, kw_only=True)
class BaseSettings:
    """Attributes with Horovod's names and defaults. `key` is a secret and is not shown."""

    num_proc: int | None = None
    verbose: int = 0
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    extra_mpi_args: str | None = None
    tcp_flag: bool | None = None
    binding_args: str | None = None
    key: bytes | None = field(default=None, repr=False)
    start_timeout: Any = None
    output_filename: str | None = None
    run_func_mode: bool | None = None
    nics: Any = None
    elastic: bool = False
    prefix_output_with_timestamp: bool = False


@dataclass(eq=False)
class Settings(BaseSettings):
    """Settings of a job on fixed hosts."""

    hosts: str | None = None


@dataclass(eq=False)
class ElasticSettings(BaseSettings):
    """Settings of an elastic job. `discovery` is not pickled: it belongs to the launcher's process."""

    discovery: Any
    min_num_proc: int | None
    max_num_proc: int | None
    elastic_timeout: float | None
    reset_limit: int | None
    cooldown_range: tuple[int, int] | None = None
    elastic: bool = field(default=True, init=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "discovery": None}


# horovod.runner.common.util.timeout


class TimeoutException(Exception):  # noqa: N818 - Horovod's name
    """A time limit was exceeded. `message` says which."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class Timeout:
    """A limit of `timeout` seconds from now. Unpickled, it continues with the remaining seconds."""

    def __init__(self, timeout: float, message: str) -> None:
        self._timeout = timeout
        self._message = message
        self._ends = time.monotonic() + timeout

    def remaining(self) -> float:
        """Return the remaining seconds, at least 0."""
        return max(0.0, self._ends - time.monotonic())

    def timed_out(self) -> bool:
        return self.remaining() <= 0

    def check_time_out_for(self, activity: str) -> None:
        """Raise TimeoutException if the limit has passed; `{activity}` in the message is replaced."""
        if self.timed_out():
            message = self._message.format(activity=activity)
            raise TimeoutException(f"{message} Timeout after {self._timeout:g} seconds.")

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_ends": self.remaining()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _ends=time.monotonic() + state["_ends"])


# horovod.runner.common.util.secret

SECRET_LENGTH = 32
DIGEST_LENGTH = 32
HOROVOD_SECRET_KEY = "_HOROVOD_SECRET_KEY"  # the variable in which Horovod's processes find their key


def make_secret_key() -> bytes:
    """Return a fresh random key."""
    return secrets.token_bytes(SECRET_LENGTH)


def compute_digest(key: bytes, message: bytes) -> bytes:
    """Return the HMAC-SHA256 of the message."""
    return hmac.digest(key, message, "sha256")


def check_digest(key: bytes, message: bytes, digest: bytes) -> bool:
    """Return whether the digest is the message's, in constant time."""
    return hmac.compare_digest(compute_digest(key, message), digest)


# horovod.runner.common.util.codec


def dumps_base64(obj: Any, to_ascii: bool = True) -> Any:
    """Cloudpickle an object and encode it as base64: a string, or bytes with `to_ascii=False`."""
    encoded = base64.b64encode(cloudpickle.dumps(obj))
    return encoded.decode("ascii") if to_ascii else encoded


def loads_base64(encoded: str | bytes) -> Any:
    """Decode the result of `dumps_base64`. It unpickles, which can run any code."""
    return cloudpickle.loads(base64.b64decode(encoded))


# horovod.runner.util.threads


def in_thread(
    target: Callable[..., Any],
    args: Sequence[Any] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Start a thread that calls `target(*args)` and return it. `silent`: exceptions in it are not shown."""
    if not isinstance(args, tuple | list):
        raise ValueError(f"args must be a tuple, not {type(args).__name__}; for one argument write (arg,)")

    def call() -> None:
        with contextlib.suppress(Exception) if silent else contextlib.nullcontext():
            target(*args)

    thread = threading.Thread(target=call, name=name, daemon=daemon)
    thread.start()
    return thread


def on_event(
    event: threading.Event,
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    stop: threading.Event | None = None,
    check_stop_interval_s: float = 1.0,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Start a thread that calls `func(*args)` once the event is set, unless `stop` is set before."""

    def wait() -> None:
        while not event.wait(None if stop is None else check_stop_interval_s):
            if stop is not None and stop.is_set():
                return
        if stop is None or not stop.is_set():
            func(*args)

    return in_thread(wait, name=f"on-event-{getattr(func, '__name__', 'call')}", daemon=daemon, silent=silent)


def execute_function_multithreaded(
    fn: Callable[..., Any],
    args_list: Sequence[Sequence[Any]],
    block_until_all_done: bool = True,
    max_concurrent_executions: int = 1000,
) -> dict[int, Any] | None:
    """Call `fn(*args)` for each entry concurrently; returns the results by index. Raises RuntimeError if a call fails.

    Without `block_until_all_done` the calls continue in the background, and the result is None.
    """
    if not args_list:
        return {} if block_until_all_done else None
    pool = ThreadPoolExecutor(min(len(args_list), max_concurrent_executions), thread_name_prefix="execute")
    calls = [pool.submit(fn, *args) for args in args_list]
    pool.shutdown(wait=block_until_all_done)
    if not block_until_all_done:
        return None
    for index, call in enumerate(calls):
        if error := call.exception():
            raise RuntimeError(f"call {index} of {len(calls)} failed: {type(error).__name__}: {error}") from error
    return {index: call.result() for index, call in enumerate(calls)}


# horovod.runner.util.streams


class Pipe:
    """Text or bytes in the order written. `read` waits for data; after `close` it returns None once all is read."""

    def __init__(self) -> None:
        self._pieces: queue.SimpleQueue[str | bytes | None] = queue.SimpleQueue()
        self._rest: str | bytes | None = None
        self._closed = False

    def write(self, buf: str | bytes) -> int:
        if self._closed:
            raise RuntimeError("Pipe is closed")
        self._pieces.put(buf)
        return len(buf)

    def read(self, length: int = -1, timeout: float | None = None) -> str | bytes | None:
        """Return at most `length` characters (-1: all available).

        Raises TimeoutError after `timeout` seconds without any.
        """
        if not self._rest:
            try:
                self._rest = self._pieces.get(timeout=timeout)
            except queue.Empty:
                raise TimeoutError(f"nothing was written to the pipe within {timeout:g} s") from None
        if self._rest is None:
            self._pieces.put(None)  # for the next reader
            return None
        cut = len(self._rest) if length < 0 else length
        piece, self._rest = self._rest[:cut], self._rest[cut:]
        return piece

    def flush(self) -> None:
        return None

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._pieces.put(None)


# horovod.runner.util.network

T = TypeVar("T")
_LOOPBACK = "127.0.0.1"


def get_local_intfs(nic: str | None = None) -> set[str]:
    """Return the names of the interfaces with an IPv4 address, or only this one if it has one."""
    found = set()
    for _, name in socket.if_nameindex():
        with contextlib.suppress(ValueError):
            interface_address([name])
            found.add(name)
    return found if nic is None else found & {nic}


def get_local_host_addresses() -> set[str]:
    """Return the IPv4 addresses of this machine's interfaces."""
    return {interface_address([name]) for name in get_local_intfs()}


def resolve_host_address(host_name: str) -> str | None:
    """Return an IPv4 address of the host; None if the name has none."""
    return next(iter(resolve(host_name)), None)


def filter_local_addresses(all_host_names: Iterable[str]) -> list[str]:
    """Return the names of other machines. An unresolvable name counts as one."""
    return [name for name in all_host_names if not is_local(name)]


def find_port(server_factory: Callable[[tuple[str, int]], T]) -> tuple[T, int]:
    """Create a server on a free port of all interfaces with `server_factory((host, 0))`; returns it and its port."""
    server = server_factory(("", 0))
    listening: Any = getattr(server, "socket", server)
    return server, int(listening.getsockname()[1])


def get_driver_ip(nics: Collection[str] | None) -> str:
    """Return this machine's address on one of these interfaces; without names, the one that other machines reach."""
    if nics:
        return interface_address(nics)
    try:
        return source_address("192.0.2.1")  # a documentation address: selects the default route's interface
    except OSError:
        return _LOOPBACK


# horovod.runner.common.util.config_parser

_OTHERS = ("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS", "HOROVOD_GLOO_IFACE")
_NAMES = {option.variable for option in all_options().values() if option.variable}.union(_OTHERS)


def variable_name(name: str) -> str:
    """Return a variable's name such as `HOROVOD_TIMELINE`; raises AttributeError for an unknown one."""
    if name in _NAMES:
        return name
    raise AttributeError(f"config_parser has no attribute {name!r}")


def validate_config_args(args: object) -> None:
    """Raise ValueError, naming the flag, for an invalid value."""
    for name, option in all_options().items():
        value = getattr(args, name, None)
        if value is not None:
            check(option, value)


def set_env_from_args(env: dict[str, str], args: object) -> dict[str, str]:
    """Add the variables of these flags to `env`, and return it."""
    env.update(Options.from_args(args, {}).worker_env())
    return env


GRACEFUL_TERMINATION_TIME_S = 5
_POLL_S = 0.1


def execute(
    command: str,
    env: Mapping[str, str] | None = None,
    stdout: IO[Any] | None = None,
    stderr: IO[Any] | None = None,
    index: int | None = None,
    events: Sequence[threading.Event] | None = None,
    prefix_output_with_timestamp: bool = False,
) -> int:
    """Run the command in a shell and return its exit code, 128 + s after signal s. Ends it once one of `events` is set.

    With an `index` each line of output begins with `[index]<stdout>:`.
    """
    options = OutputOptions(
        prefix=index is not None, timestamp=prefix_output_with_timestamp, stdout=stdout, stderr=stderr
    )
    output, exits = OutputWriter(options, {0: index or 0}), queue.SimpleQueue[Exited]()
    reports: Any = SimpleNamespace(output=output.feed, started=lambda worker: None, exited=exits.put)
    launcher, [slot] = HostLauncher(), place_ranks(["localhost"])
    argv, env = ("/bin/sh", "-c", command), variables() if env is None else env
    ended: Exited | None = None
    ending = False
    with contextlib.closing(launcher):
        launcher.start([WorkerSpec(worker=0, slot=slot, argv=argv, env=env, private_files={})], reports)
        while ended is None:
            with contextlib.suppress(queue.Empty):
                ended = exits.get(timeout=_POLL_S)
            if not ending and any(event.is_set() for event in events or ()):
                ending = True
                launcher.terminate([0], grace_s=GRACEFUL_TERMINATION_TIME_S)
    output.end(0)
    return ended.code


def execute_quietly(command: str, env: Mapping[str, str] | None = None) -> tuple[str, int] | None:
    """Run the command in a shell; returns its combined output and its exit code, or None if it cannot run."""
    try:
        done = subprocess.run(
            command,
            shell=True,  # the caller's own command line
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError:
        return None
    return done.stdout, done.returncode


def _version(env: Mapping[str, str] | None) -> str:
    found = execute_quietly("mpirun --version", env)
    return found[0] if found is not None and found[1] == 0 else ""


def mpi_available(env: Mapping[str, str] | None = None) -> bool:
    """Return whether an `mpirun` works here."""
    return bool(_version(env))


def _version_names(*words: str) -> Callable[..., bool]:
    """Return a function that tells whether the version of `mpirun` has one of these words."""
    return lambda env=None: any(word in _version(env) for word in words)


is_open_mpi = _version_names("Open MPI", "OpenRTE")
is_spectrum_mpi = _version_names("IBM Spectrum MPI")
is_mpich = _version_names("MPICH", "HYDRA")
is_intel_mpi = _version_names("Intel(R) MPI")


def mpi_run(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise ValueError: there is no MPI controller; the message names alternatives."""
    raise ValueError(
        "MPI support has not been built; Hora needs none. Use horovod.run(…) or horovodrun, or start the script with "
        "mpirun itself."
    )


js_run = mpi_run
