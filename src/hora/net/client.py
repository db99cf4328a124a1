"""The control client: a worker's connection to the launcher's rendezvous. Uses neither torch nor pickle.

The engine meets its peers through it (`gather`, `set`, `get`, …), the worker entry point fetches its function and
returns results and errors, and elastic training requests its next world. One reader thread per client receives answers
and notices; any number of threads may call.

    connected --broken, while it is a worker's--> reconnecting --within a limit--> connected
              --`close`, or broken--> closed                         --refused, or too late--> closed
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hora.errors import AuthenticationError, HorovodInternalError
from hora.net import requests
from hora.net.keys import read_held_secret
from hora.net.messages import Pong
from hora.net.requests import Request
from hora.net.wire import RECONNECT_PAUSE_S, Connection, Credentials, Header, connect, cut_parts
from hora.platforms.detect import detect_world
from hora.world import RendezvousEndpoint, World

# A worker finds its function and the search path of the caller's modules under these keys.
FUNCTION_KEY = "hora/function"
PATH_KEY = "hora/path"

# The server enforces a request's time limit and reports what was missing; only a dead server exceeds this.
_SLACK_S = 10.0
_QUICK_S = 60.0
_LAST_WORDS_S = 1.0  # of a worker that is about to end
# A message's header carries an error's text and has room for little more.
_MESSAGE_BYTES, _TRACEBACK_BYTES = 12 * 1024, 40 * 1024

# Not idempotent: the other ranks of an all-gather may have its failure, and an amount may have been added.
_ONCE = (requests.Gather, requests.Add)

Notice = dict[str, Any]


@dataclass(frozen=True)
class RankGroup:
    """The ranks of a group that have met."""

    members: dict[int, bytes]  # the value of each, by rank in ascending order
    index: int  # the group's position among all groups
    num_groups: int
    above: tuple[int, bytes] | None  # the first rank of the parent group, with its value


def _fitted(text: str, limit_bytes: int) -> str:
    """Shorten a text that is too long for the wire to both its ends: the start of a traceback, and the exception."""
    fitted, half = text, limit_bytes // 2
    while len(json.dumps(fitted)) > limit_bytes:
        fitted = f"{text[:half]}\n[… {len(text) - 2 * half} characters …]\n{text[-half:]}"
        half = half * 3 // 4
    return fitted


def _message(request: Request, number: int) -> tuple[Header, bytes]:
    fields = request._asdict()
    data = fields.pop("data", b"")
    return {"op": requests.NAMES[type(request)], "id": number, **fields}, data


class _Pending:
    """A request that waits for its answer."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.done = threading.Event()
        self.header: Header = {}
        self.payload = b""

    def answer(self, header: Header, payload: bytes = b"") -> None:
        self.header, self.payload = header, payload
        self.done.set()


class ControlClient:
    """An authenticated connection to the rendezvous. Thread-safe."""

    def __init__(self, connection: Connection, endpoint: RendezvousEndpoint, name: str) -> None:
        self._connection, self._endpoint, self._name = connection, endpoint, name
        self._send_lock = threading.Lock()
        self._state_lock = threading.Lock()
        self._ids = itertools.count(1)
        self._requests: dict[int, _Pending] = {}
        self._listeners: list[Callable[[Notice], None]] = []
        self._notices: list[Notice] = []
        self._why_closed: str | None = None
        self._reopen: Callable[[float], Connection] | None = None  # set once the connection is a worker's
        self._hello = requests.Hello(name)
        self._term = endpoint.term  # of the latest leader, in a job whose leaders change
        self._reader = threading.Thread(target=self._read, name=f"hora-control {name}", daemon=True)
        self._reader.start()

    @classmethod
    def connect(
        cls,
        endpoint: RendezvousEndpoint,
        *,
        name: str,
        timeout_s: float,
        worker: int = -1,
        credentials: Credentials | None = None,
    ) -> ControlClient:
        """`name` appears in messages. `worker`: this connection belongs to that worker (this process); if it ends
        without `close`, the worker counts as lost. `credentials`: other than those from the launcher.
        """
        proof = credentials or Credentials(read_held_secret(endpoint.secret_file), endpoint.job, endpoint.worker)
        deadline, left_s = time.monotonic() + timeout_s, timeout_s
        while True:
            try:
                client = cls(cls._open(endpoint, proof, left_s), endpoint, name)
            except ConnectionError as error:
                left_s = deadline - time.monotonic()
                if not endpoint.leaderless_s or left_s <= 0 or not isinstance(error.__cause__, ConnectionRefusedError):
                    raise
                time.sleep(RECONNECT_PAUSE_S)  # the launcher may be started again
                continue
            try:
                client._hello = requests.Hello(name, worker)
                client._request(client._hello, limit_s=left_s)
                if worker >= 0:
                    client._reopen_with(functools.partial(cls._open, endpoint, proof))
                return client
            except ConnectionError:
                # A flood of strangers can displace a peer whose proof has not been read yet, and a launcher that is
                # started again can have another one's address: retry.
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise
                if endpoint.leaderless_s:
                    time.sleep(RECONNECT_PAUSE_S)

    @staticmethod
    def _open(endpoint: RendezvousEndpoint, credentials: Credentials, timeout_s: float) -> Connection:
        try:
            return connect(endpoint.where, credentials, timeout_s=timeout_s)
        except AuthenticationError as error:
            raise AuthenticationError(f"{endpoint.endpoint}, the rendezvous of job {endpoint.job}: {error}") from None
        except TimeoutError as error:
            raise TimeoutError(
                f"Timed out waiting for the rendezvous of job {endpoint.job} at {endpoint.endpoint} ({error}). "
                f"Timeout after {timeout_s:g} seconds."
            ) from None
        except OSError as error:
            raise ConnectionError(
                f"cannot reach the rendezvous of job {endpoint.job} at {endpoint.endpoint}: {error}. "
                "Has the launcher ended, or does a firewall block this port?"
            ) from error

    # ---- meeting the other ranks --------------------------------------------------------------------------

    def gather(
        self, key: str, value: bytes, *, rank: int, size: int, timeout_s: float, group: str = "", fanout: int = 0
    ) -> RankGroup:
        """Return the values of all ranks in the same group, once every rank has called.

        A key may be reused once all ranks have their answers. With `fanout` the groups, ordered by their first ranks,
        form a tree with that many children each. TimeoutError names the missing ranks; HorovodInternalError reports a
        lost one.
        """
        request = requests.Gather(key, rank, size, timeout_s, value, group, fanout)
        header, payload = self._request(request, waiting_for=f"all-gather {key!r}", limit_s=timeout_s)
        values = cut_parts(payload, int(header["values"]))
        num_members = int(header["members"])
        above = values[num_members] if num_members < len(values) else None
        return RankGroup(dict(values[:num_members]), int(header["index"]), int(header["groups"]), above)

    def set(self, key: str, value: bytes) -> None:
        self._request(requests.Set(key, value))

    def get(self, key: str, *, timeout_s: float) -> bytes:
        """Return the value of the key, as soon as a worker or the launcher has set it."""
        return self._request(requests.Get(key, timeout_s), waiting_for=f"key {key!r}", limit_s=timeout_s)[1]

    def add(self, key: str, amount: int, *, limit_s: float = _QUICK_S) -> int:
        """Add to a counter (0 if absent) and return its new value."""
        return int(self._request(requests.Add(key, amount), limit_s=limit_s)[1])

    def delete(self, key: str) -> bool:
        """Return whether the key existed."""
        return self._request(requests.Delete(key))[1] == b"1"

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are set."""
        return self._request(requests.Check(list(keys)))[1] == b"1"

    def rank_keys(self, world: World, epoch: str, towards: Sequence[int], *, timeout_s: float) -> bytes:
        """Return this rank's keys (`hora.net.keys`). HorovodInternalError: this process has no such rank at present."""
        ranks = struct.pack(f">{len(towards)}I", *towards)
        request = requests.Keys(world.rank, world.generation, epoch, ranks)
        return self._request(request, waiting_for="the keys of this world", limit_s=timeout_s)[1]

    # ---- reporting to the launcher -----------------------------------------------------------------------------------

    def send_result(self, result: bytes) -> None:
        """Send this worker's result; returns once the launcher has it."""
        self._request(requests.Returned(result), limit_s=max(_QUICK_S, len(result) / 1e6))

    def send_error(
        self, *, type_name: str, message: str, traceback: str, consequence: bool, pickled: bytes = b""
    ) -> None:
        """See `requests.Raised`."""
        message, traceback = _fitted(message, _MESSAGE_BYTES), _fitted(traceback, _TRACEBACK_BYTES)
        request = requests.Raised(type_name[:200], message, traceback, consequence, pickled)
        self._request(request, limit_s=max(_QUICK_S, len(pickled) / 1e6))

    def is_first_to_raise(self, text: str) -> bool:
        """Return whether no other worker has raised this traceback; True if the launcher does not answer at once."""
        key = f"raised/{hashlib.sha256(text.encode(errors='replace')).hexdigest()}"
        try:
            return self.add(key, 1, limit_s=_LAST_WORDS_S) == 1
        except (OSError, HorovodInternalError):
            return True

    def say(self, text: str) -> None:
        """Print a line where the job was started. Does not wait."""
        self._send(requests.LogLine(text.encode(errors="replace")))

    def tell(self, kind: str, data: bytes, *, worker: int) -> None:
        """Send this worker's telemetry (`hora.telemetry`) to the launcher. Does not wait."""
        self._send(requests.Telemetry(kind, worker, data))

    # ---- worlds that change -------------------------------------------------------------------------------

    def next_world(self, world: World, *, timeout_s: float) -> World | None:
        """Return this worker's world in the first generation after `world`; None if it has no place there."""
        request = requests.NextWorld(world.generation, timeout_s)
        header, _ = self._request(
            request, waiting_for=f"a world after generation {world.generation}", limit_s=timeout_s
        )
        if header.get("error") == "removed":
            return None
        env = {str(key): str(value) for key, value in header["world"].items()}
        renewed = detect_world(env | {"HORA_SECRET_FILE": self._endpoint.secret_file})
        return replace(renewed, rendezvous=self._endpoint, hostname=world.hostname, worker=world.worker)

    def on_notice(self, listener: Callable[[Notice], None]) -> None:
        """Call the listener with every past and future notice, on the reader's thread: it must be quick.

        `{"notice": "lost", "rank": r, "generation": g, "how": text}`: a rank's process died. `{"notice": "closed",
        "why": text}`: the connection ended; this is the last notice. The launcher may send others.
        """
        with self._state_lock:
            self._listeners.append(listener)
            past = list(self._notices)
        for notice in past:
            listener(notice)

    @property
    def closed(self) -> bool:
        return self._why_closed is not None

    def close(self) -> None:
        """Disconnect in order. Idempotent."""
        self._reopen = None
        if self._why_closed is None:
            # If the launcher has ended first, no goodbye is needed.
            with contextlib.suppress(ConnectionError, TimeoutError):
                self._request(requests.Bye(), limit_s=5.0)
        self._connection.shutdown()
        if threading.current_thread() is not self._reader:
            self._reader.join(timeout=5.0)

    # ---- the wire -----------------------------------------------------------------------------------------

    def _request(
        self, request: Request, *, waiting_for: str = "the launcher", limit_s: float = _QUICK_S
    ) -> tuple[Header, bytes]:
        number, pending = next(self._ids), _Pending(request)
        with self._state_lock:
            self._requests[number] = pending
        try:
            self._send(request, number)
            if not pending.done.wait(limit_s + _SLACK_S):
                raise TimeoutError(
                    f"{self._name}: no answer from the launcher at {self._endpoint.endpoint} while waiting "
                    f"for {waiting_for}. Timeout after {limit_s + _SLACK_S:g} seconds."
                )
        finally:
            with self._state_lock:
                self._requests.pop(number, None)
        self._raise_for(pending.header, waiting_for, limit_s)
        return pending.header, pending.payload

    def _raise_for(self, header: Header, waiting_for: str, limit_s: float) -> None:
        match header.get("error"):
            case "timeout":
                raise TimeoutError(
                    f"{self._name}: Timed out waiting for {waiting_for}: {header['message']}. "
                    f"Timeout after {limit_s:g} seconds."
                )
            case "lost":
                raise HorovodInternalError(f"{self._name}, waiting for {waiting_for}: {header['message']}")
            case "refused" | "mismatch":
                raise HorovodInternalError(f"{self._name}: {header['message']}")
            case "closed":
                raise ConnectionError(
                    f"{self._name}: the connection to the launcher at {self._endpoint.endpoint} has ended "
                    f"({header['message']})"
                )

    def _send(self, request: Request, number: int = 0) -> None:
        try:
            with self._send_lock:
                if self._why_closed is None:
                    self._connection.send(*_message(request, number))
        except OSError as error:
            # The reader notices too, and answers all waiting threads or resends their requests.
            self._connection.shutdown()
            if self._why_closed is None and self._reopen is None:
                self._why_closed = str(error)
        if self._why_closed is not None:
            self._raise_for({"error": "closed", "message": self._why_closed}, "", 0.0)

    def _read(self) -> None:
        why = "closed by this process"
        try:
            while True:
                try:
                    self._receive()
                except (EOFError, OSError) as error:
                    why = str(error) if isinstance(error, EOFError) else f"{type(error).__name__}: {error}"
                    if not self._come_back(why):
                        break
        except AuthenticationError as error:
            why = f"{type(error).__name__}: {error}"
        finally:
            self._end(why)

    def _receive(self) -> None:
        while True:
            header, payload = self._connection.receive()
            self._check_term(header)
            if header.get("notice") == "ping":
                self._send(Pong())
            elif "notice" in header:
                self._tell(header)
            else:
                self._resolve(header, payload)

    def _reopen_with(self, reopen: Callable[[float], Connection]) -> None:
        """Reconnect from now on. Raises ConnectionError if the connection has ended already."""
        with self._send_lock:
            self._reopen = reopen
            if self._why_closed is not None:
                raise ConnectionError(self._why_closed)

    def _come_back(self, why: str) -> bool:
        """Reconnect and resend unanswered requests; no thread sends anything meanwhile."""
        with self._send_lock:
            self._connection.close()
            if self._reconnected():
                return True
            self._why_closed = self._why_closed or why
            return False

    def _reconnected(self) -> bool:
        leaderless_s = self._endpoint.leaderless_s
        deadline = time.monotonic() + max(self._endpoint.return_s, leaderless_s)
        while (reopen := self._reopen) is not None and (left_s := deadline - time.monotonic()) > 0:
            try:
                connection = reopen(left_s)
                connection.send(*_message(self._hello, 0))
                answer, _ = connection.receive(limit_s=left_s)
                connection.sock.settimeout(None)
                self._connection = connection
                self._check_term(answer)
                if "error" in answer:
                    return False
                self._resend()
                return True
            except AuthenticationError:
                return False
            except (OSError, EOFError) as error:
                if isinstance(error.__cause__, ConnectionRefusedError) and not leaderless_s:
                    return False  # the launcher is gone
                self._connection.close()
                time.sleep(RECONNECT_PAUSE_S)
        return False

    def _check_term(self, header: Header) -> None:
        term = int(header.get("term", self._term))
        if term < self._term:
            raise ConnectionError("an outdated leader")
        self._term = term

    def _resend(self) -> None:
        with self._state_lock:
            waiting = list(self._requests.items())
        for number, pending in waiting:
            if isinstance(pending.request, _ONCE):
                pending.answer({"error": "lost", "message": "the connection to the launcher broke and was restored"})
            else:
                self._connection.send(*_message(pending.request, number))

    def _resolve(self, header: Header, payload: bytes) -> None:
        with self._state_lock:
            pending = self._requests.get(header["re"])
        if pending is not None:  # None: the caller has timed out
            pending.answer(header, payload)

    def _tell(self, notice: Notice) -> None:
        with self._state_lock:
            if notice["notice"] != "question":  # not for later listeners
                self._notices.append(notice)
            listeners = list(self._listeners)
        for listener in listeners:
            listener(notice)

    def _end(self, why: str) -> None:
        self._connection.close()
        with self._state_lock:
            self._why_closed = self._why_closed or why
            waiting = list(self._requests.values())
        for pending in waiting:
            pending.answer({"error": "closed", "message": self._why_closed})
        self._tell({"notice": "closed", "why": why, "at": time.time()})
