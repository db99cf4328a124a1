"""Coverage-guided fuzzing (atheris) of parsers of foreign bytes: each input is parsed, or rejected as documented.

    python tests/fuzz/parsers.py --seconds 60                 every target for a minute
    python tests/fuzz/parsers.py --seconds 3600 frames hosts  these for an hour

Findings are printed with a traceback and kept in the folder `--found`; their bytes become tests of tests/unit.
`--corpus` keeps inputs that reached new code, from which the next run starts.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import collections
import concurrent.futures
import contextlib
import hashlib
import io
import json
import os
import pickle
import struct
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # simulated_run
KEY = bytes(32)
Target = tuple[Callable[[bytes], object], list[bytes]]  # the function to fuzz, and its initial inputs


def frames() -> Target:
    """Fuzz the body of a genuine frame: a member holds the keys, and may send anything."""
    from hora.errors import AuthenticationError
    from hora.net.wire import Opener, Sealer

    def fuzz(data: bytes) -> None:
        sealer, opener = Sealer(KEY), Opener(KEY, max_payload_bytes=1 << 20)
        with contextlib.suppress(AuthenticationError):
            for body in (data[:60_000], data[:100]):
                for header, payload in opener.feed(sealer.frame(body)):
                    assert isinstance(header, dict)
                    assert len(payload) <= 1 << 20

    return fuzz, [_said({"op": "set", "id": 1, "key": "k", "_n": 5}) + b"value", _said({"_n": 0}), b""]


def hello() -> Target:
    """Fuzz the first bytes of an unauthenticated connection."""
    from hora.errors import AuthenticationError
    from hora.net.wire import ClientHandshake, Credentials, ServerHandshake

    credentials = Credentials(KEY, "job")

    def fuzz(data: bytes) -> None:
        handshake = ServerHandshake(credentials)
        with contextlib.suppress(AuthenticationError):
            while data and handshake.session is None:
                wanted = handshake.wanted_bytes
                assert 0 < wanted <= 80
                handshake.feed(data[:wanted])
                data = data[wanted:]
        assert handshake.session is None

    genuine = ClientHandshake(credentials).hello
    return fuzz, [genuine, genuine[:20], genuine + bytes(18), ClientHandshake(Credentials(KEY, "job", 3)).hello]


class _Peer:
    """A peer that accepts everything and sends nothing."""

    host = where = name = "here"
    number = speaker = -1
    open = broken = True
    error = None

    def send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        json.dumps(header, allow_nan=False)

    def close(self) -> None:
        self.open = False

    @property
    def sock(self) -> _Peer:
        return self

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 1


# Errors for which a server disconnects the sender of a malformed message.
_MALFORMED = (ValueError, KeyError, TypeError, ArithmeticError, RecursionError, struct.error)


def _conversation(data: bytes, take: Callable[[dict[str, Any], bytes], object]) -> None:
    """Pass messages of one member to `take` until one is malformed: lines of JSON, each with a payload after a tab."""
    with contextlib.suppress(*_MALFORMED):
        for line in data.split(b"\n")[:20]:
            text, _, payload = line.partition(b"\t")
            header = json.loads(text)
            if isinstance(header, dict):
                take(header, payload)


class _Control:
    """The operations of the page on a job, without a job."""

    def query(self, question: object, worker: int | None = None) -> None: ...

    def stop(self, why: str) -> None: ...

    def remove(self, worker: int, why: str) -> None: ...


def rendezvous() -> Target:
    """Fuzz the operations of a worker at the rendezvous, with a job's observers behind it."""
    from hora.launch.job import Observation, Watching
    from hora.net.rendezvous import Rendezvous
    from hora.world import World

    observation = Observation()
    observation.observe(Watching(), _Control(), "job", title="t")
    dashboard: Any = observation.observer
    worlds = {number: World(rank=number, size=2, worker=number, hostname="h") for number in range(2)}

    def fuzz(data: bytes) -> None:
        server, peer = Rendezvous("127.0.0.1", secret=KEY, job="job", events=observation), _Peer()
        observation.rendezvous = server
        observation.tell_world(0, worlds)
        try:
            peer.speaker = 1
            _conversation(data, lambda header, payload: server.message(peer, header, payload))  # type: ignore[arg-type]
            server.closed(peer)  # type: ignore[arg-type]
        finally:
            server.close()
        assert observation.observer is dashboard
        shown: concurrent.futures.Future[None] = concurrent.futures.Future()
        dashboard._server._tasks.call(lambda: show(shown))
        shown.result(timeout=20)

    def show(shown: concurrent.futures.Future[None]) -> None:
        try:
            dashboard._server._tick()
            shown.set_result(_show(dashboard._run))
        except Exception as error:
            shown.set_exception(error)

    words = [
        "hello",
        "set",
        "get",
        "add",
        "delete",
        "check",
        "gather",
        "keys",
        "returned",
        "raised",
        "log_line",
        "telemetry",
        "bye",
    ]
    fields = {"id": 1, "key": "k", "keys": ["k"], "amount": 1, "rank": 1, "size": 2, "timeout_s": 0.1, "worker": 1}
    fields |= {"name": "n", "generation": 0, "epoch": "0.0", "kind": "report", "type": "E", "message": "m"}
    fields |= {"traceback": "t", "consequence": False}
    said = [json.dumps({"op": word, **fields}).encode() + b"\tpayload" for word in words]
    for kind, payload in _telemetry():
        said.append(json.dumps({"op": "telemetry", "worker": 1, "kind": kind}).encode() + b"\t" + payload)
    return fuzz, said


def _telemetry() -> list[tuple[str, bytes]]:
    """Return genuine telemetry of each kind."""
    from hora.telemetry import Report, Sample

    full = Report(
        Sample(5, 2, 1.0, 0.5), waiting=("allreduce.x", 0.5, (0, 1)), metrics={"loss": 0.5}, events=(("note", "t"),),
        host={"num_cpus": 2, "cpu": 0.5, "gpus": [{"name": "g", "busy": 0.1}]}, total_steps=9,
    )  # fmt: skip
    frames = [["f.py", 3, "step", "code", "user"]]
    return [
        ("report", full.encode()),
        ("report", Report(Sample()).encode()),
        ("stall", b"[1]"),
        ("stack", json.dumps({"threads": [["main", frames]]}).encode()),
        ("profile", json.dumps({"num_samples": 2, "seconds": 1.0, "stacks": [[2, frames]]}).encode()),
        ("committed", b""),
    ]


def _show(run: Any) -> None:
    """Show a run as the page, Prometheus and the terminal do."""
    from rich.console import Console

    from hora.watch import terminal, view

    everything = json.loads(view.as_json(view.everything(run)), parse_constant=_refuse)
    view.metrics(run).encode(errors="replace")
    state: dict[str, Any] = {}
    terminal._apply(state, {"everything": everything})
    console = Console(file=io.StringIO(), width=100)
    console.print(terminal._picture(state, 100))
    assert "\x1b" not in console.file.getvalue()  # type: ignore[attr-defined]


def agents() -> Target:
    """Fuzz the messages of agents to the first node."""
    from hora.launch.agent.protocol import Exited, Finished, Join, Leaving, Output, Started
    from hora.launch.controller.agents import Agents
    from hora.net.messages import pack
    from hora.version import version

    def fuzz(data: bytes) -> None:
        nodes, peer = Agents(("127.0.0.1", 0), KEY, num_nodes=2, silence_limit_s=10.0), _Peer()
        try:
            _conversation(data, lambda header, payload: nodes.message(peer, header, payload))  # type: ignore[arg-type]
        finally:
            nodes.closed(peer)  # type: ignore[arg-type]
            nodes.dismiss(0)

    def line(message: Any) -> bytes:
        header, payload = pack(message)
        return json.dumps(header).encode() + b"\t" + payload

    join = line(Join(0, "n", 1, version(), [], []))
    later = [Started(0, 1), Output(0, "stdout", b"x"), Exited(0, 1, "why"), Leaving(), Finished()]
    return fuzz, [join, *(join + b"\n" + line(one) for one in later), b'{"op": "join", "node": 0, "name": "n"}']


def sessions() -> Target:
    """Fuzz the messages of a session's client: numbers, acknowledgements, and reconnects."""
    from hora.net.session import SessionPeer, Sessions

    class Handler:
        def message(self, peer: SessionPeer, header: dict[str, Any], payload: bytes) -> None:
            assert "_q" not in header
            peer.send({"op": "answer"}, payload)

        def closed(self, peer: SessionPeer) -> None:
            assert not peer.open

    def fuzz(data: bytes) -> None:
        server = Sessions(Handler(), limit_s=0.0)
        for part in data.split(b"\n\n")[:3]:  # connections in sequence
            peer: Any = _Peer()
            _conversation(part, lambda header, payload, peer=peer: server.message(peer, header, payload))
            server.closed(peer)

    first, back = b'{"session": "s", "received": 0}', b'{"session": "s", "received": 1}'
    said = [b'{"op": "x", "_q": 1}\tpayload', b'{"_r": 1}', b'{"op": "y", "_q": 2}', b'{"_bye": true}']
    return fuzz, [b"\n".join([first, *said]), b"\n".join([first, said[0], b"", back, said[2]]), back]


def local_agents() -> Target:
    """Fuzz the frames that the controller reads from the socket of a local agent."""
    from hora.launch.agent.protocol import MESSAGES, Exited, Output, Start, Started
    from hora.net.messages import Frames, frame

    def fuzz(data: bytes) -> None:
        frames: Frames[Any] = Frames(MESSAGES)
        with contextlib.suppress(ValueError, RecursionError):
            for piece in (data[:7], data[7:]):
                for message in frames.feed(piece):
                    frame(message)

    exited, said = frame(Exited(0, 0, "")), frame(Output(1, "stdout", b"text\n"))
    order = frame(Start(0, ["true"], {"A": "b"}, True, None, {}, ["torch"]))
    return fuzz, [exited, said + exited, frame(Started(0, 1)), order]


def _in_a_file(read: Callable[[Path], object]) -> Callable[[bytes], None]:
    folder = tempfile.TemporaryDirectory()
    path = Path(folder.name) / "file"

    def fuzz(data: bytes, _folder: object = folder) -> None:
        path.write_bytes(data)
        with contextlib.suppress(ValueError):
            read(path)

    return fuzz


def recordings() -> Target:
    """Fuzz a recorded run for `hora view`: its facts, and its entries before compression."""
    from hora.watch.recording import read_run
    from simulated_run import Simulation

    show_file = _in_a_file(lambda path: _show(read_run(path)))

    def fuzz(data: bytes) -> None:
        facts, _, body = data.partition(b"\n")
        block = zlib.compress(body, 1)
        show_file(b"HORA-RUN 2\n" + facts + b"\n" + struct.pack("<I", len(block)) + block)

    kinds = ("world", "report", "joined", "exited", "failed", "line", "event", "stack", "profile", "end")
    simulation = Simulation(num_ranks=2, began=1_000_000.0)
    entries = [
        struct.pack("<dBiI", one.at, kinds.index(one.kind), one.worker, len(one.data)) + one.data
        for one in simulation.entries(3.0)
    ]
    later = [
        (7, b'{"threads": [["main", [["f.py", 3, "step", "code", "user"]]]]}'),
        (8, b'{"num_samples": 2, "seconds": 1.0, "stacks": [[2, []]]}'),
        (6, b'{"kind": "note", "text": "t"}'),
        (3, b'{"code": 1, "reason": ""}'),
        (9, b'{"outcome": "failed", "text": "t"}'),
    ]
    entries += [struct.pack("<dBiI", 1_000_003.0, kind, 0, len(text)) + text for kind, text in later]
    facts = json.dumps(simulation.facts).encode() + b"\n"
    return fuzz, [facts + b"".join(entries), facts + b"".join(entries[:4]), b'{"began": 1}\n']


def timelines() -> Target:
    """Fuzz a timeline for `hora view`."""
    from hora.watch import view
    from hora.watch.replay import read_timeline

    def show(path: Path) -> None:
        json.loads(view.as_json(read_timeline(path)), parse_constant=_refuse)

    events = [
        {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "w", "start_time_since_epoch_in_micros": 5}},
        {"ph": "B", "pid": 1, "name": "NEGOTIATE_ALLREDUCE", "ts": 1},
        {"ph": "X", "pid": 1, "name": "0", "ts": 1},
        {"ph": "X", "pid": 1, "name": "1", "ts": 2.5},
        {"ph": "E", "pid": 1, "ts": 3},
        {"ph": "B", "pid": 1, "name": "ALLREDUCE", "ts": 3},
        {"ph": "E", "pid": 1, "ts": 4},
    ]
    text = "[\n" + ",\n".join(map(json.dumps, events))
    return _in_a_file(show), [text.encode(), (text + "\n]").encode(), json.dumps({"traceEvents": events}).encode()]


def models() -> Target:
    """Fuzz the two files of a model: a card with a new signature, or weights with their checksum.

    Loading must run no code.
    """
    import torch

    from hora.errors import ModelFileError
    from hora.workflow import Feature, load, save
    from hora.workflow.architectures import MLP

    folder = Path(tempfile.mkdtemp())
    torch.manual_seed(0)
    save(folder, MLP([2, 3, 2]), classes=["a", "b"], features=[Feature(name="x"), Feature(name="y")])
    card = json.loads((folder / "model.json").read_text())
    card.pop("sha256")
    genuine = (folder / card["weights"]["file"]).read_bytes()

    def write(card: dict[str, Any], weights: bytes) -> None:
        digest = hashlib.sha256(weights).hexdigest()
        for old in folder.iterdir():
            old.unlink()
        name = f"weights-{digest[:16]}.safetensors"
        (folder / name).write_bytes(weights)
        signed = {**card, "weights": {"file": name, "num_bytes": len(weights), "sha256": digest}}
        text = json.dumps(signed, sort_keys=True).encode()
        (folder / "model.json").write_text(json.dumps({**signed, "sha256": hashlib.sha256(text).hexdigest()}))

    def fuzz(data: bytes) -> None:
        if data[:1] == b"{":
            try:
                changed = json.loads(data)
            except (ValueError, RecursionError):
                return
            write(changed, genuine)
        else:
            write(card, data)
        with contextlib.suppress(ModelFileError):
            load(folder)

    write(card, genuine)
    load(folder)  # fails if the signature written here differs from the one checked there
    return fuzz, [genuine, json.dumps(card).encode()]


def hosts() -> Target:
    """Fuzz `-H`, a hostfile, and the output of a discovery script; no name may look like an option of ssh."""
    from hora.launch.controller.hosts import parse_discovered
    from hora.launch.slots import parse_host_files, parse_hosts

    read_file = _in_a_file(parse_host_files)

    def fuzz(data: bytes) -> None:
        text = data.decode(errors="surrogateescape")
        found = []
        for parse in (parse_hosts, lambda text: parse_discovered(text, 2)):
            with contextlib.suppress(ValueError):
                found += parse(text)
        read_file(data)
        for host in found:
            assert host.hostname
            assert not host.hostname.startswith("-")
            assert not any(letter.isspace() for letter in host.hostname), host.hostname
            assert host.slots >= 0

    return fuzz, [b"a:4,b:2", b"[::1]:2", b"a slots=2\nb:1 # comment\n", b"127.0.0.1:1", b"a.b-c:2,d"]


def requests() -> Target:
    """Fuzz a request to the live page."""
    from hora.watch.http import BadRequest, read_request

    async def read(data: bytes) -> None:
        reader = asyncio.StreamReader(limit=16 * 1024)
        reader.feed_data(data)
        reader.feed_eof()
        with contextlib.suppress(BadRequest):
            request = await read_request(reader)
            assert request is None or request.path.startswith("/")

    loop = asyncio.new_event_loop()
    post = b"POST /api/stop HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
    return lambda data: loop.run_until_complete(read(data)), [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", post]


def telemetry() -> Target:
    """Fuzz a rank's telemetry: its kind, and the bytes after a line's end."""
    from hora.telemetry.parsing import parse

    def fuzz(data: bytes) -> None:
        kind, _, payload = data.partition(b"\n")
        with contextlib.suppress(ValueError):
            parse(kind.decode(errors="replace"), payload)

    return fuzz, [kind.encode() + b"\n" + payload for kind, payload in _telemetry()]


def pickles() -> Target:
    """Fuzz the careful reader: a pickle, an archive of torch.save, and its old format."""
    import torch

    from hora.safe_load import load_pickle, load_torch

    def fuzz(data: bytes) -> None:
        for load in (load_pickle, load_torch):
            with contextlib.suppress(ValueError):
                load(data)

    value = {"a": torch.arange(4.0), "b": [1, "x", None], "c": collections.OrderedDict(d=(2.5, True))}
    seeds = [pickle.dumps([1, "x", {"y": (2.5, None)}], protocol) for protocol in (0, 2, 5)]
    for archive in (True, False):
        file = io.BytesIO()
        torch.save(value, file, _use_new_zipfile_serialization=archive)
        seeds.append(file.getvalue())
    return fuzz, seeds


TARGETS = {
    target.__name__: target
    for target in (
        frames,
        hello,
        rendezvous,
        agents,
        sessions,
        local_agents,
        recordings,
        timelines,
        models,
        hosts,
        requests,
        telemetry,
        pickles,
    )
}


def _said(header: dict[str, Any]) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack(">H", len(text)) + text


_DEEP = b"[" * 970 + b"]" * 970  # about the deepest JSON that is parsed


def _refuse(constant: str) -> float:
    raise AssertionError(f"{constant} would be served")


def _run(name: str, seconds: int, corpus: Path, found: Path) -> None:
    """Run in a process of its own, because the fuzzer ends it."""
    try:
        import atheris
    except ModuleNotFoundError:
        raise SystemExit("coverage-guided fuzzing needs atheris: pip install atheris") from None
    with atheris.instrument_imports(include=["hora"]):
        fuzz, seeds = TARGETS[name]()
    corpus.mkdir(parents=True, exist_ok=True)
    found.mkdir(parents=True, exist_ok=True)
    for seed in [*seeds, *(seed.replace(b"1", _DEEP, 1) for seed in seeds if b"{" in seed)]:
        (corpus / f"seed-{hashlib.sha256(seed).hexdigest()[:16]}").write_bytes(seed)
        fuzz(seed)
    limits = [f"-max_total_time={seconds}", "-timeout=20", "-rss_limit_mb=4096", "-max_len=16384"]
    atheris.Setup([sys.argv[0], *limits, f"-artifact_prefix={found}/", "-print_final_stats=1", str(corpus)], fuzz)
    atheris.Fuzz()


def _report(name: str, status: int, log: str, found: Path, before: set[Path]) -> None:
    numbers = [line.split()[-1] for line in log.splitlines() if "number_of_executed_units" in line]
    print(
        f"{name}: {'nothing found' if status == 0 else 'FOUND'} in {numbers[-1] if numbers else '?'} inputs", flush=True
    )
    if status:
        print("\n".join(log.splitlines()[-40:]))
        for path in set(found.glob("*")) - before:
            print(f"{path}: {base64.b64encode(path.read_bytes()).decode()[:2000]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="target", help=", ".join(TARGETS))
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--corpus", type=Path, default=Path("out/fuzz/corpus"))
    parser.add_argument("--found", type=Path, default=Path("out/fuzz/found"))
    parser.add_argument("--here", action="store_true", help="fuzz one target in this process")
    arguments = parser.parse_args()
    unknown = set(arguments.targets) - set(TARGETS)
    if unknown:
        parser.error(f"there is no target {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    failed = False
    for name in arguments.targets or TARGETS:
        corpus, found = arguments.corpus / name, arguments.found / name
        if arguments.here:
            _run(name, arguments.seconds, corpus, found)
        before = set(found.glob("*"))
        line = [sys.executable, __file__, "--here", "--seconds", str(arguments.seconds), name]
        line += ["--corpus", str(arguments.corpus), "--found", str(arguments.found)]
        # A target exits without cleaning up, so its files lie in memory, in a folder that this process removes.
        memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
        with tempfile.TemporaryDirectory(dir=memory) as folder:
            env = {**os.environ, "TMPDIR": folder}
            done = subprocess.run(line, capture_output=True, text=True, errors="replace", env=env)
        _report(name, done.returncode, done.stdout + done.stderr, found, before)
        failed = failed or done.returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
