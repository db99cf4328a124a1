"""The output of `hora top` and `hora view` for a simulated job."""

from __future__ import annotations

import io
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from hora.cli.dispatch import main
from hora.watch import address
from hora.watch.address import Page
from hora.watch.model import Entry
from hora.watch.recording import Recorder
from hora.watch.replay import open_recording
from hora.watch.server import PageServer
from hora.watch.terminal import show
from simulated_run import Simulation, Slowness
from waiting import wait_until


def record(path: Path, simulation: Simulation, *more: Entry) -> None:
    recorder = Recorder(path, simulation.facts)
    for entry in (*simulation.entries(40.0), *more):
        recorder.record(entry)
    recorder.close()


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[tuple[PageServer, Page]]:
    """Rank 1 of 4 is 50 % slower and prints terminal escape sequences."""
    simulation = Simulation(num_ranks=4, slow=[Slowness(1, 1.5)], total_steps=5000)
    line = Entry(simulation.began + 40.0, "line", 1, b"o\x1b]0;renamed\x07\x1b[2Jplain words")
    record(tmp_path / "run.hora", simulation, line)
    server, page = open_recording(tmp_path / "run.hora")
    yield server, page
    server.close()


def picture(page: Page) -> str:
    console = Console(file=io.StringIO(), width=160)
    show(page, once=True, console=console)
    return console.file.getvalue()


def test_a_job_in_a_terminal(slow):
    text = picture(slow[1])
    assert "● training   train.py" in text
    assert "of 5,000" in text
    assert " min left" in text
    assert "samples/s   " in text
    assert re.search(r"rank 1 on alpha is 1\.[45]\d× slower than the median since \d\d:\d\d", text)
    assert "100 % of it waiting for data" in text
    ranks = [line.split()[:3] for line in text.splitlines() if " here " in line]
    assert ranks == [["0", "alpha", "here"], ["1", "alpha", "here"], ["2", "beta", "here"], ["3", "beta", "here"]]
    machine = next(line for line in text.splitlines() if line.startswith("alpha"))
    assert "of 32" in machine
    assert "34.1 of 128 GB" in machine
    assert machine.count("%") == 3  # the processors and two GPUs


def test_escape_sequences_of_ranks_are_removed(slow):
    text = picture(slow[1])
    assert "plain words" in text
    assert "\x1b" not in text
    assert "\x07" not in text


def test_a_hanging_rank_is_named_in_the_terminal(tmp_path):
    record(tmp_path / "run.hora", Simulation(num_ranks=3, hangs_at=(20.0, 2)))
    server, page = open_recording(tmp_path / "run.hora")
    try:
        text = picture(page)
    finally:
        server.close()
    assert "● waiting for rank 2" in text
    assert "allreduce.optimizer.0.bucket.3: 2 ranks have waited 2" in text
    assert "for rank 2" in text


def test_the_terminal_view_ends_with_the_job(slow):
    server, page = slow
    console = Console(file=io.StringIO(), width=160)
    looking = threading.Thread(target=show, args=(page,), kwargs={"console": console})
    looking.start()
    wait_until("the terminal looks", lambda: server._viewers)
    server.feed(Entry(server.run.now, "end", -1, json.dumps({"outcome": "done", "text": ""}).encode()))
    server.close()
    looking.join(60)
    assert not looking.is_alive()
    assert console.file.getvalue().rstrip().count("● done") == 1


def test_the_commands(slow, tmp_path, monkeypatch, capsys):
    _, page = slow
    assert main(["top", page.full_url, "--once"]) == 0
    assert "rank 1 on alpha" in capsys.readouterr().out.replace("\n", " ")
    assert main(["top", page.full_url, "--url"]) == 0
    assert capsys.readouterr().out.strip() == page.full_url
    assert main(["top", page.full_url[:-4] + "AAAA", "--once"]) == 2
    assert "the token is missing or wrong" in capsys.readouterr().err
    monkeypatch.setattr(address, "find_pages", list)
    assert main(["top"]) == 2
    assert "no job of yours with a dashboard runs on this machine" in capsys.readouterr().err

    def interrupted(server):
        raise KeyboardInterrupt

    monkeypatch.setattr(PageServer, "join", interrupted)
    assert main(["view", str(tmp_path / "run.hora")]) == 0
    assert capsys.readouterr().out.startswith("train.py: http://127.0.0.1:")
    (tmp_path / "other").write_text("no run")
    assert main(["view", str(tmp_path / "other")]) == 2
    assert "is not a recorded run" in capsys.readouterr().err
