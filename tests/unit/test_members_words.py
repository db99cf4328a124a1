"""Words of members: whatever a rank says, the launcher's rendezvous, the page and the terminal go on."""

from __future__ import annotations

import http.client
import io
import json
import logging
import random
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from hora.launch.job import Observation, Watching
from hora.net.key_value_store import WORKERS_BYTES
from hora.net.rendezvous import Rendezvous
from hora.net.wire import Connection, Credentials, connect, new_secret, worker_key
from hora.telemetry import Report, Sample
from hora.watch.terminal import show, snapshots
from hora.world import World

LIMIT_S = 30.0
SECRET = new_secret()
SAMPLE = Sample(step=10, num_steps=5, window_s=1.0, step_s=1.0)
ESCAPES = "x\x1b]52;c;cm0gLXJmIH4=\x07\x9b2J\ud800"
FRAME = ["f.py", 3, "step", "code", "user"]


class _Control:
    """The operations of the page on a job, without a job."""

    def query(self, question: Any, worker: int | None = None) -> None: ...

    def stop(self, why: str) -> None: ...

    def remove(self, worker: int, why: str) -> None: ...


def answer(worker: Connection) -> dict[str, Any]:
    """Return the header of the next answer, behind any notices."""
    while "re" not in (header := worker.receive(limit_s=LIMIT_S)[0]):
        assert "notice" in header
    return header


class Job:
    """A rendezvous with the observers of a job, and its two workers."""

    def __init__(self) -> None:
        self.observation = Observation()
        self.observation.observe(Watching(page=True), _Control(), "j", title="t")
        self.dashboard = self.observation.observer
        self.rendezvous = self.observation.rendezvous = Rendezvous(
            "127.0.0.1", secret=SECRET, job="j", events=self.observation
        )
        worlds = {n: World(rank=n, size=2, worker=n, hostname=f"host{n}") for n in range(2)}
        self.observation.tell_world(0, worlds)
        self.rendezvous.publish(0, worlds)
        self.rendezvous.flush()
        self.workers = [self.connect(number) for number in range(2)]

    def connect(self, worker: int) -> Connection:
        where = ("127.0.0.1", self.rendezvous.port)
        connection = connect(where, Credentials(worker_key(SECRET, worker), "j", worker), timeout_s=LIMIT_S)
        connection.send({"op": "hello", "id": 1, "name": ESCAPES.encode("ascii", "replace").decode(), "worker": worker})
        assert connection.receive(limit_s=LIMIT_S) == ({"re": 1}, b"")
        return connection

    def says(self, kind: str, data: bytes) -> None:
        """Worker 1 says this, and the launcher has taken it."""
        self.workers[1].send({"op": "telemetry", "kind": kind, "worker": 1}, data)
        self.workers[1].send({"op": "check", "id": 7, "keys": []})
        assert answer(self.workers[1]) == {"re": 7}

    def is_well(self) -> str:
        """Check that all observers go on; returns what the terminal shows."""
        self.workers[0].send({"op": "set", "id": 2, "key": "k"}, b"v")
        assert answer(self.workers[0]) == {"re": 2}
        assert self.observation.observer is self.dashboard
        page = self.dashboard.page
        news = snapshots(page)
        assert next(news)["everything"]["head"]["size"] == 2
        news.close()
        connection = http.client.HTTPConnection(page.url.split("/")[2], timeout=LIMIT_S)
        connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {page.token}"})
        assert connection.getresponse().status == 200
        console = Console(file=io.StringIO(), width=120)
        show(page, once=True, console=console)
        return console.file.getvalue()

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.rendezvous.close()
        self.dashboard.ended("done", "")


@pytest.fixture
def job(caplog: pytest.LogCaptureFixture) -> Iterator[Job]:
    one = Job()
    yield one
    one.close()
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []


def stack(*threads: Any) -> bytes:
    return json.dumps({"threads": threads}).encode()


def report(**more: Any) -> bytes:
    return Report(SAMPLE, **more).encode()


NONSENSE: dict[str, list[tuple[str, bytes]]] = {
    "a stack without threads": [("stall", b"[1]"), ("stack", b'{"threads":[[]]}')],
    "a stack that is a number": [("stall", b"[1]"), ("stack", b"5")],
    "frames of other lengths": [("stall", b"[1]"), ("stack", stack(["main", [["f.py"]]]))],
    "a line that is no number": [("stall", b"[1]"), ("stack", stack(["main", [["f.py", "x", "f", "c", "user"]]]))],
    "an origin that is a list": [("stack", stack(["main", [["f.py", 3, "f", "c", []]]]))],
    "escape sequences in a stack": [
        ("stall", b"[1]"), ("stack", stack([ESCAPES, [[ESCAPES, 3, ESCAPES, ESCAPES, "user"]]]))
    ],
    "deep JSON": [("stack", b"[" * 100_000), ("stall", b"[" * 100_000)],
    "a stall of text": [("stall", b'"x"'), ("stall", b'{"a": 1}'), ("stall", b'[null, "1", 1.5]')],
    "an empty stall": [("stall", b"")],
    "a profile without counts": [("profile", b'{"num_samples": 1, "seconds": 1, "stacks": [[]]}')],
    "a profile of infinite length": [("profile", b'{"num_samples": 1, "seconds": Infinity, "stacks": []}')],
    "a profile of many digits": [("profile", b'{"num_samples": ' + b"9" * 4000 + b', "seconds": 1, "stacks": []}')],
    "another kind": [(ESCAPES.encode("ascii", "replace").decode(), b""), ("", b"")],
    "a short report": [("report", b"\x02")],
    "a report of NaN": [("report", struct.pack("<BQI15f", 3, 1, 1, *[float("nan")] * 15))],
    "negative times": [("report", struct.pack("<BQI15f", 3, 1, 1, *[-1e30] * 15))],
    "a step beyond all numbers": [("report", struct.pack("<BQI15f", 3, 2**64 - 1, 2**32 - 1, *[3e38] * 15))],
    "facts that are text": [("report", report(host={"net_out": "x", "cpu": "y"}))],
    "facts that are NaN": [("report", report(host={"net_out": float("nan")}))],
    "facts that are infinite": [("report", report(host={"net_out": float("inf")}))],
    "facts of 400 digits": [("report", report(host={"net_out": 10**400}))],
    "half of the facts": [("report", report(host={"cpu": 0.5, "memory": 3, "gpus": [{}, {"name": 5}]}))],
    "markup as a number": [("report", report(host={"cpu": 0.5, "num_cpus": "[/x]"}))],
    "GPUs that are none": [("report", report(host={"gpus": {"a": 1}})), ("report", report(host={"gpus": [3]}))],
    "escape sequences in names": [
        ("report", report(waiting=(ESCAPES, 30.0, (0,)), events=((ESCAPES, ESCAPES),), metrics={ESCAPES: 1.0}))
    ],
    "ranks that do not exist": [("report", report(waiting=("x", 30.0, (10**30, -1))))],
    "a wait since for ever": [("report", report(waiting=("x", since, (0,)))) for since in (1e300, -1e300)],
    "metrics without end": [("report", report(metrics={f"m{n}": float("nan") for n in range(1000)})) for _ in range(3)],
    "a total of many digits": [("report", report(total_steps=10**300))],
}  # fmt: skip


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_of_a_member_harms_nobody(job: Job, what: str, capsys: pytest.CaptureFixture[str]):
    for kind, data in NONSENSE[what]:
        job.says(kind, data)
    shown = job.is_well()
    said = capsys.readouterr()
    for text in (shown, said.err.partition("#token=")[2], *map(str, job.dashboard._run.events)):
        assert not any(letter in text for letter in "\x1b\x07\x9b"), text


def test_invalid_telemetry_is_named_once(job: Job, caplog: pytest.LogCaptureFixture):
    for _ in range(3):
        job.says("stack", b"{}")
    told = [record.message for record in caplog.records if "invalid telemetry" in record.message]
    assert len(told) == 1
    assert "worker 1" in told[0]


def test_genuine_telemetry_is_shown(job: Job, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture):
    facts = {"num_cpus": 8, "cpu": 0.5, "memory": 2e9, "memory_total": 4e9, "gpus": [{"name": "g", "busy": 0.25}]}
    job.says("report", report(host=facts, events=(("note", "a note"),), metrics={"loss": float("nan")}))
    for kind in ("here", "committed"):
        job.says(kind, b"")
    job.says("stall", b"[1]")
    job.says("stack", stack(["MainThread", [FRAME]]))
    shown = job.is_well()
    assert "50 % of 8" in shown
    assert "2.0 of 4 GB" in shown
    assert "25 %" in shown
    assert 'File "f.py", line 3, in step\n    code' in capsys.readouterr().err
    (event,) = (one.text for one in job.dashboard._run.events if one.kind == "note")
    assert event == "a note"
    assert not [record for record in caplog.records if "invalid" in record.message]


def _value(rng: random.Random, depth: int = 0) -> Any:
    """Return any JSON value, most of them such as a rank could send."""
    if depth < 4 and rng.random() < 0.5:
        many = [_value(rng, depth + 1) for _ in range(rng.randrange(6))]
        return many if rng.random() < 0.7 else {f"k{number}": one for number, one in enumerate(many)}
    return rng.choice((None, True, -1, 0, 1, 2**70, 0.5, float("nan"), float("inf"), "user", ESCAPES, FRAME))


def _words(rng: random.Random) -> tuple[str, bytes]:
    kind = rng.choice(("report", "report", "stack", "profile", "stall", "committed", "line"))
    if kind == "report":
        rest = {name: _value(rng) for name in "wmeht" if rng.random() < 0.4}
        if rng.random() < 0.5:
            names = ("num_cpus", "cpu", "net_out", "memory", "memory_total", "gpus", "link")
            rest["h"] = {name: _value(rng, 3) for name in names}
        floats = [rng.choice((0.0, 1.0, -1.0, 1e-30, 3e38, float("nan"))) if rng.random() < 0.2 else 1.0] * 15
        return kind, struct.pack("<BQI15f", 3, rng.randrange(2**40), rng.randrange(3), *floats) + json.dumps(
            rest
        ).encode()
    frames = [FRAME, _value(rng)] if rng.random() < 0.5 else _value(rng)
    whole = {"threads": [["main", frames]], "num_samples": _value(rng, 3), "seconds": 1.0, "stacks": [[1, frames]]}
    return kind, json.dumps(whole if kind != "stall" else _value(rng)).encode()


def test_random_words_of_a_member_harm_nobody(job: Job, cases):
    for number, (_, rng) in enumerate(cases):
        job.says(*_words(rng))
        if number % 50 == 0:
            job.is_well()
    job.is_well()


def test_a_worker_has_a_quota_in_the_launchers_memory(job: Job):
    bad, good = job.workers[1], job.workers[0]

    def ask(worker: Connection, header: dict[str, Any], data: bytes = b"") -> dict[str, Any]:
        worker.send({"id": 5, **header}, data)
        return answer(worker)

    half = bytes(WORKERS_BYTES // 2)
    assert ask(bad, {"op": "set", "key": "a"}, half) == {"re": 5}
    for _ in range(3):  # replaced, not added
        assert ask(bad, {"op": "set", "key": "a"}, half) == {"re": 5}
    refusal = ask(bad, {"op": "set", "key": "b"}, half)
    assert refusal["error"] == "refused"
    assert "worker 1 would store" in refusal["message"]
    assert "at most 64 MiB" in refusal["message"]
    assert ask(good, {"op": "set", "key": "b"}, half) == {"re": 5}
    assert ask(good, {"op": "set", "key": "a"}, b"") == {"re": 5}  # it is no longer the other's
    assert ask(bad, {"op": "set", "key": "c"}, half) == {"re": 5}
    assert ask(bad, {"op": "delete", "key": "c"}) == {"re": 5}
    assert ask(bad, {"op": "set", "key": "d"}, half) == {"re": 5}
    assert ask(bad, {"op": "add", "key": "n", "amount": 3}) == {"re": 5}
    wait = {"op": "gather", "rank": 1, "size": 2, "timeout_s": LIMIT_S}
    for number in range(64):
        bad.send({**wait, "id": 100 + number, "key": f"g{number}"}, b"x")
    refusal = ask(bad, {**wait, "key": "one more"}, b"x")
    assert refusal["error"] == "refused"
    assert "65 gathers" in refusal["message"]
    meet = {"op": "gather", "rank": 0, "size": 2, "timeout_s": LIMIT_S, "key": "g3"}
    assert ask(good, meet, b"y")["values"] == 2
