"""The MPI world of a job's ranks: MPI libraries learn rank and size as they do under `mpirun`.

Programs may ask mpi4py for their rank beside `hvd`. An MPI library asks the launcher for it: Open MPI over PMIx, whose
server is a library that Open MPI brings, and MPICH and Intel MPI over PMI-1, lines of text on an inherited socket. Only
for jobs on one host whose size is fixed, if `HORA_MPI` is 1; elsewhere `mpirun` starts the ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import selectors
import socket
import stat
import sys
import threading
from collections.abc import Callable, Mapping, Sequence

_STRING, _UINT16, _UINT32, _INFO, _ARRAY, _RANK = 3, 13, 14, 24, 39, 40  # pmix_data_type_t
_DONE = (0, -157)  # PMIX_SUCCESS, PMIX_OPERATION_SUCCEEDED
_NAMESPACE = b"hora"
_FIELD = re.compile(r"(\w+)=(\S*)")
_KEY_BYTES, _NAMESPACE_BYTES = 512, 256
_MAX_KEY_CHARS, _MAX_VALUE_CHARS, _MAX_VALUES_PER_RANK = 64, 1024, 4096  # of PMI-1
_READ_BYTES = 64 * 1024
_MAX_UNSENT_BYTES = 16 * 2**20
_ESTABLISHED = "01"  # in /proc/net/tcp

_Item = tuple[str, int, object]  # key, type, value


class _Data(ctypes.Union):
    _fields_ = [
        ("text", ctypes.c_char_p),
        ("number", ctypes.c_uint32),
        ("at", ctypes.c_void_p),
        ("_", ctypes.c_byte * 24),
    ]


class _Info(ctypes.Structure):
    """`pmix_info_t`, with its `pmix_value_t`."""

    _fields_ = [
        ("key", ctypes.c_char * _KEY_BYTES),
        ("flags", ctypes.c_uint32),
        ("type", ctypes.c_uint64),  # 16 bits and padding
        ("data", _Data),
    ]


class _Array(ctypes.Structure):
    """`pmix_data_array_t`."""

    _fields_ = [("type", ctypes.c_uint16), ("size", ctypes.c_size_t), ("at", ctypes.c_void_p)]


class _PmixProc(ctypes.Structure):
    """`pmix_proc_t`."""

    _fields_ = [("namespace", ctypes.c_char * _NAMESPACE_BYTES), ("rank", ctypes.c_uint32)]


def mpi_world(env: Mapping[str, str], folder: str) -> MpiWorld | None:
    """Return the MPI world of the ranks with this environment; None if they get none. `folder`: for temporary files."""
    size = env.get("HOROVOD_SIZE", "1")
    if size == "1" or size != env.get("HOROVOD_LOCAL_SIZE") or "HOROVOD_ELASTIC" in env:
        return None
    return MpiWorld(int(size), folder)


class MpiWorld:
    """A world of `size` ranks, all on this host."""

    def __init__(self, size: int, folder: str) -> None:
        self.size = size
        self._name = f"hora-{os.urandom(8).hex()}"  # MPICH names its shared memory after it
        self._values: dict[str, str] = {}  # what ranks have put, for all ranks
        self._in_barrier: list[_Rank] = []
        self.ranks = selectors.EpollSelector()  # their sockets
        self._pmix: ctypes.CDLL | None = None
        os.makedirs(folder, mode=0o700, exist_ok=True)
        with contextlib.suppress(OSError, AttributeError):  # no Open MPI, or one without PMIx
            self._pmix = _pmix_server(size, folder)
        self._folder = folder

    def variables(self, rank: int) -> dict[str, str]:
        """Return the variables by which Open MPI in a rank finds the PMIx server."""
        if self._pmix is None:
            return {}
        found = ctypes.POINTER(ctypes.c_char_p)()
        self._pmix.PMIx_server_setup_fork(ctypes.byref(_PmixProc(_NAMESPACE, rank)), ctypes.byref(found))
        pairs: list[tuple[str, str, str]] = []
        while (item := found[len(pairs)]) is not None:
            pairs.append(os.fsdecode(item).partition("="))
        return {
            **{name: value for name, _, value in pairs},
            # As for ranks of mpirun, whose daemon they need only to start further ranks.
            "OMPI_MCA_ess": "^singleton",
            "OMPI_MCA_orte_local_daemon_uri": "65536.0;tcp://127.0.0.1:1",
            # Its shared memory goes with the agent's folder, whatever ends the ranks.
            "OMPI_MCA_btl_vader_backing_directory": self._folder,
        }

    def connect(self, rank: int) -> tuple[dict[str, str], socket.socket]:
        """Return the variables by which MPICH in a rank finds its socket, and the end that it inherits."""
        ours, inherited = socket.socketpair()
        ours.setblocking(False)
        self.ranks.register(ours, selectors.EVENT_READ, _Rank(ours))
        inherited.set_inheritable(True)
        names = {"PMI_FD": str(inherited.fileno()), "PMI_RANK": str(rank), "PMI_SIZE": str(self.size)}
        names |= {"MPI_LOCALRANKID": str(rank), "MPI_LOCALNRANKS": str(self.size)}  # which programs read
        return {**names, "MPIR_CVAR_PMI_VERSION": "1"}, inherited  # not PMIx, which MPICH would see too

    def answer(self) -> None:
        """Answer the lines that ranks have sent, as far as they read the answers. Never blocks."""
        for key, _ in self.ranks.select(0):
            rank: _Rank = key.data
            try:
                # A rank sends a line and waits for the answer. One that does not read is not read, either.
                for line in rank.lines() if not rank.unsent else ():
                    self._obey(rank, line)
                self._push(rank)
            except (OSError, KeyError, ValueError, EOFError):
                self._forget(rank)

    def _push(self, rank: _Rank) -> None:
        rank.push()
        self.ranks.modify(rank.sock, selectors.EVENT_WRITE if rank.unsent else selectors.EVENT_READ, rank)

    def _forget(self, rank: _Rank) -> None:
        self.ranks.unregister(rank.sock)
        rank.sock.close()

    def _obey(self, rank: _Rank, line: str) -> None:
        fields = dict(_FIELD.findall(line))
        answers = {
            "init": "response_to_init pmi_version=1 pmi_subversion=1 rc=0",
            "get_maxes": f"maxes kvsname_max=256 keylen_max={_MAX_KEY_CHARS} vallen_max={_MAX_VALUE_CHARS}",
            "get_appnum": "appnum appnum=0",
            "get_my_kvsname": f"my_kvsname kvsname={self._name}",
            "get_universe_size": f"universe_size size={self.size}",
            "finalize": "finalize_ack rc=0",
        }
        match fields["cmd"]:
            case "put":
                answer = self._put(fields["key"], line.partition("value=")[2])
            case "get":
                value = self._values.get(fields["key"])
                found = "rc=0 msg=success" if value is not None else "rc=-1 msg=key_not_found"
                answer = f"get_result {found} value={value}"
            case "barrier_in":
                self._in_barrier.append(rank)
                if len(self._in_barrier) == self.size:
                    for member in self._in_barrier:
                        member.unsent += b"cmd=barrier_out rc=0\n"
                        if member is not rank:
                            with contextlib.suppress(OSError, KeyError, ValueError):  # it died, and the job ends
                                self._push(member)
                    self._in_barrier.clear()
                return
            case other:
                answer = answers.get(other, f"{other} rc=-1 msg=unknown_command")
        rank.unsent += f"cmd={answer}\n".encode()

    def _put(self, key: str, value: str) -> str:
        full = key not in self._values and len(self._values) >= _MAX_VALUES_PER_RANK * self.size
        if full or len(key) > _MAX_KEY_CHARS or len(value) > _MAX_VALUE_CHARS:
            return "put_result rc=-1 msg=too_much"
        self._values[key] = value
        return "put_result rc=0 msg=success"


class _Rank:
    """A rank's socket, the beginning of its next line, and answers that it has not read."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.unsent = bytearray()
        self._begun = b""

    def lines(self) -> list[str]:
        """Return the lines that have arrived. Raises EOFError at their end, or if one has none."""
        data = self.sock.recv(_READ_BYTES)
        *lines, self._begun = (self._begun + data).split(b"\n")
        if not data or len(self._begun) > _READ_BYTES:
            raise EOFError
        return [line.decode() for line in lines]

    def push(self) -> None:
        """Send what the socket takes."""
        with contextlib.suppress(BlockingIOError):
            while self.unsent:
                del self.unsent[: self.sock.send(self.unsent)]


def _pmix_server(size: int, folder: str) -> ctypes.CDLL:
    """Start this process's PMIx server, in threads of its library, for `size` ranks. Raises OSError if it fails."""
    library = ctypes.CDLL("libpmix.so.2")
    callbacks = (ctypes.c_void_p * 64)()  # none: the library itself serves the ranks of one host
    keep: list[object] = []
    place: list[_Item] = [("pmix.srvr.tmpdir", _STRING, folder), ("pmix.sys.tmpdir", _STRING, folder)]
    others = set(os.listdir("/proc/self/fd"))
    _call(library.PMIx_server_init, callbacks, *_packed(place, keep))
    for descriptor in sorted(set(os.listdir("/proc/self/fd")) - others):
        _guard_port(int(descriptor), folder)
    ranks, host = [str(rank) for rank in range(size)], socket.gethostname()
    job: list[_Item] = [
        ("pmix.nmap", _STRING, _generated(library.PMIx_generate_regex, host)),
        ("pmix.pmap", _STRING, _generated(library.PMIx_generate_ppn, ",".join(ranks))),
        ("pmix.lpeers", _STRING, ",".join(ranks)),
        ("pmix.jobid", _STRING, "1"),
        ("pmix.nsdir", _STRING, folder),
        ("pmix.tmpdir", _STRING, folder),
        ("pmix.lldr", _RANK, 0),
        ("pmix.num.nodes", _UINT32, 1),
    ]
    job += [(f"pmix.{name}.size", _UINT32, size) for name in ("univ", "job", "max", "local", "node")]
    for rank in range(size):
        numbers: list[_Item] = [(f"pmix.{name}", _RANK, rank) for name in ("rank", "grank", "apprank")]
        numbers += [(f"pmix.{name}", _UINT16, rank) for name in ("lrank", "nrank")]
        numbers += [("pmix.appnum", _UINT32, 0), ("pmix.nodeid", _UINT32, 0), ("pmix.hname", _STRING, host)]
        job.append(("pmix.pdata", _ARRAY, numbers))
    _call(library.PMIx_server_register_nspace, _NAMESPACE, size, *_packed(job, keep), None, None)
    for rank in range(size):
        process = ctypes.byref(_PmixProc(_NAMESPACE, rank))
        _call(library.PMIx_server_register_client, process, os.getuid(), os.getgid(), None, None, None)
    return library


def _guard_port(descriptor: int, folder: str) -> None:
    """If the library listens at a port there, let through to it only connections of our own user, or of root.

    It reads from a connection before it knows whose it is, and reads nothing else meanwhile. So this process accepts at
    the port and passes on what may pass, through a socket in a folder of its own, which the library gets instead.
    """
    if not _is_socket(descriptor):
        return
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as found:
        if found.family != socket.AF_INET or not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return
        opened = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)  # its own name may be too long for a socket
        place = f"/proc/{os.getpid()}/fd/{opened}/pmix"
        with socket.socket(socket.AF_UNIX) as inner:
            inner.bind(place)
            inner.listen(128)
            inner.setblocking(False)
            os.dup2(inner.fileno(), descriptor, inheritable=False)
        gate = Gate(found.dup(), place)
        threading.Thread(target=gate.run, name="hora-pmix-gate", daemon=True).start()
        # The library may wait at the port still: it wakes up and finds the other socket.
        socket.create_connection(found.getsockname()[:2]).close()


def _is_socket(descriptor: int) -> bool:
    with contextlib.suppress(OSError):  # it was there only while descriptors were listed
        return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    return False


class Gate:
    """Forwards connections to a port of this process to a local socket, if they come from this user."""

    def __init__(self, listener: socket.socket, place: str) -> None:
        self._listener, self._place = listener, place
        self._selector = selectors.EpollSelector()
        self._others: dict[socket.socket, socket.socket] = {}  # the two ends of each connection
        self._unsent: dict[socket.socket, bytearray] = {}
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def run(self) -> None:
        while True:
            for key, events in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._others:
                    self._serve(key.fileobj, events)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            outer, address = self._listener.accept()
            try:
                if _user_at(address, self._listener.getsockname()) not in (os.getuid(), 0):
                    raise PermissionError
                inner = socket.socket(socket.AF_UNIX)
                try:
                    inner.connect(self._place)
                except OSError:
                    inner.close()
                    raise
            except OSError:
                outer.close()
                return
            for one, other in ((outer, inner), (inner, outer)):
                one.setblocking(False)
                self._others[one], self._unsent[one] = other, bytearray()
                self._selector.register(one, selectors.EVENT_READ)

    def _serve(self, sock: socket.socket, events: int) -> None:
        other = self._others[sock]
        try:
            if events & selectors.EVENT_READ:
                data = sock.recv(_READ_BYTES)
                if not data or len(self._unsent[other]) > _MAX_UNSENT_BYTES:
                    raise EOFError
                self._unsent[other] += data
            for end in (sock, other):
                with contextlib.suppress(BlockingIOError):
                    while self._unsent[end]:
                        del self._unsent[end][: end.send(self._unsent[end])]
        except (OSError, EOFError):
            for end in (sock, other):
                self._selector.unregister(end)
                del self._others[end], self._unsent[end]
                end.close()
            return
        for end in (sock, other):
            self._selector.modify(end, selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent[end] else 0))


def _user_at(client: tuple[str, int], server: tuple[str, int]) -> int | None:
    """Return the user whose socket is the client's end of this connection on this machine; None: it has none (now)."""
    wanted = [
        f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{port:04X}" for host, port in (client, server)
    ]
    with open("/proc/net/tcp") as file:
        for fields in map(str.split, file):
            if fields[1:3] == wanted and fields[3] == _ESTABLISHED:
                return int(fields[7])
    return None


def _call(function: Callable[..., int], *args: object) -> None:
    status = function(*args)
    if status not in _DONE:
        raise OSError(f"PMIx: status {status}")


def _generated(function: Callable[..., int], text: str) -> bytes:
    result = ctypes.c_char_p()
    _call(function, text.encode(), ctypes.byref(result))
    return result.value or b""


def _packed(items: Sequence[_Item], keep: list[object]) -> tuple[ctypes.Array[_Info], ctypes.c_size_t]:
    """Return items as the library takes them: an array and its length. `keep` owns what they point to."""
    infos = (_Info * len(items))()
    for info, (key, kind, value) in zip(infos, items, strict=True):
        info.key, info.type = key.encode(), kind
        if kind == _ARRAY:
            inner, length = _packed(value, keep)  # type: ignore[arg-type]
            array = _Array(_INFO, length.value, ctypes.addressof(inner))
            keep += [inner, array]
            info.data.at = ctypes.addressof(array)
        elif kind == _STRING:
            info.data.text = value if isinstance(value, bytes) else str(value).encode()
        else:
            info.data.number = value
    keep.append(infos)
    return infos, ctypes.c_size_t(len(items))
