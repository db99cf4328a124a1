"""HorovodRunner in a real notebook kernel, from cells whose functions live in `__main__`."""

from __future__ import annotations

import asyncio
import textwrap

import nbformat
import pytest
from nbclient import NotebookClient

from hora.watch.address import find_pages
from hora.watch.terminal import snapshots

pytestmark = pytest.mark.spark

MODEL = """
import torch

class Net(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))

    def forward(self, x):
        return self.body(x)
"""

TRAIN = """
import os
from sparkdl import HorovodRunner

def train_hvd(width, go=None):
    import time
    import horovod.torch as hvd
    from sparkdl.horovod import log_to_driver

    hvd.init()
    torch.manual_seed(1)
    net = Net(width)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    generator = torch.Generator().manual_seed(hvd.rank())
    for epoch in range(3):
        x = torch.randn(16, 4, generator=generator)
        optimizer.zero_grad()
        loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        if hvd.rank() == 0:
            log_to_driver(f"epoch {epoch} loss {loss.item():.4f}")
        if go and epoch == 1:
            log_to_driver("waiting for the reader")
            # The test makes this file when the line above has appeared in the cell.
            limit = time.time() + 60
            while not os.path.exists(go):
                assert time.time() < limit, "the log line never reached the notebook"
    return hvd.size(), net.state_dict()
"""

SPARK = """
import sys
os.environ["PYSPARK_PYTHON"] = sys.executable
from pyspark.sql import SparkSession
spark = (SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
         .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
         .config("spark.driver.host", "127.0.0.1").getOrCreate())
"""

SLEEP = """
def sleepy():
    import time
    from sparkdl.horovod import log_to_driver
    log_to_driver("sleeping now")
    time.sleep(100)

HorovodRunner(np={np}).run(sleepy)
"""

AFTER = """
import psutil
def command(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has just ended, or Spark has not reaped it yet
        return ""
def ends_with_its_spark_worker(process):
    return process.name() == "hora-warm" and "pyspark.daemon" in command(process.parent())
children = psutil.Process().children(recursive=True)
left = [p for p in children if "hora.launch" in command(p) and not ends_with_its_spark_worker(p)]
assert left == [], left
print("size after the interrupt:", HorovodRunner(np=2).run(train_hvd, width=2)[0])
"""


BROKEN = """
def broken():
    import horovod.torch as hvd
    hvd.init()
    if hvd.rank() == 1:
        raise KeyError("island")  # the penguin's
    hvd.barrier()

HorovodRunner(np={np}).run(broken)
"""


class LiveClient(NotebookClient):
    """Runs a notebook and reacts to the output of its cells as soon as it appears."""

    reactions: dict
    displayed: list  # every state of every display

    def process_message(self, msg, cell, cell_index):
        text = msg["content"].get("text", "") if msg["msg_type"] == "stream" else ""
        if msg["msg_type"] in ("display_data", "update_display_data"):
            self.displayed.append(msg["content"]["data"].get("text/html", ""))
        for wanted in [wanted for wanted in self.reactions if wanted in text]:
            self.reactions.pop(wanted)(self)
        return super().process_message(msg, cell, cell_index)


def interrupt(client):
    client.interrupted = asyncio.ensure_future(client.km.interrupt_kernel())


def run(tmp_path, *cells, reactions):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(textwrap.dedent(cell)) for cell in cells])
    client = LiveClient(notebook, timeout=280, allow_errors=True, resources={"metadata": {"path": str(tmp_path)}})
    client.reactions, client.displayed = reactions, []
    client.execute()
    return notebook.cells, client.displayed


def look_at_the_page(seen, go):
    """Record what the live page shows while the job on Spark waits, and its address; then let the job continue."""
    try:
        page = next(page for page in find_pages() if page.title == "HorovodRunner")
        first = next(snapshots(page))["everything"]
        seen.update(url=page.full_url, size=first["head"]["size"], elastic=first["facts"]["elastic"])
    except (OSError, ValueError, StopIteration) as error:  # an exception would stop nbclient
        seen["error"] = repr(error)
    finally:
        go.touch()


def shown(cell):
    assert all(output.output_type != "error" for output in cell.outputs), cell.outputs
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def test_a_notebook_trains_locally_and_on_spark_with_logs_and_interrupts(tmp_path):
    go = tmp_path / "go"
    seen = {}
    cells, displayed = run(
        tmp_path,
        MODEL,
        TRAIN,
        "size, local = HorovodRunner(np=-2).run(train_hvd, width=8); print('local size', size)",
        SPARK,
        f"size, remote = HorovodRunner(np=2, dashboard=True).run(train_hvd, width=8, go={str(go)!r}); print('spark', "
        "size)",
        "print('equal', all(torch.equal(local[k], remote[k]) for k in local), len(local))",
        SLEEP.format(np=2),
        AFTER,
        SLEEP.replace("now", "locally").format(np=-2),
        AFTER,
        BROKEN.format(np=-2),
        BROKEN.format(np=2),
        reactions={
            "waiting for the reader": lambda client: look_at_the_page(seen, go),
            "sleeping now": interrupt,
            "sleeping locally": interrupt,
        },
    )
    assert "local size 2" in shown(cells[2])
    assert "epoch 2 loss" in shown(cells[2])
    assert "spark 2" in shown(cells[4])
    assert "equal True 4" in shown(cells[5])
    assert "error" not in seen, seen
    assert (seen["size"], seen["elastic"]) == (2, False)
    below_the_cell = str([output.data for output in cells[4].outputs if output.output_type == "display_data"])
    assert f'<a href="{seen["url"]}"' in below_the_cell
    assert "<iframe" in below_the_cell
    for index in (6, 8):
        errors = [output.ename for output in cells[index].outputs if output.output_type == "error"]
        assert errors == ["KeyboardInterrupt"], cells[index].outputs
        (line,) = next(output.traceback for output in cells[index].outputs if output.output_type == "error")
        assert line == "KeyboardInterrupt: the job was stopped, and its 2 ranks have ended"
        assert "size after the interrupt: 2" in shown(cells[index + 1])
    for index in (10, 11):
        (error,) = [output for output in cells[index].outputs if output.output_type == "error"]
        assert error.ename == "JobFailedError"
        assert [line for line in error.traceback if set(line) - {" ", "^"} or not line] == [
            "JobFailedError: rank 1 of the job has failed:",
            "",
            "Traceback (most recent call last):",
            f"  Cell In[{index + 1}], line 5, in broken",
            '    raise KeyError("island")  # the penguin\'s',
            "KeyError: 'island'",
        ]
    # One line of progress below each cell, which ends with the outcome.
    below = {
        index: [o.data["text/html"] for o in cells[index].outputs if o.output_type == "display_data"]
        for index in (2, 10)
    }
    assert len(below[2]) == len(below[10]) == 1, below
    assert below[2][0].startswith("<div><b>train_hvd</b>: done after ")
    assert "2 ranks, step 3" in below[2][0]
    assert below[10][0].startswith("<div><b>broken</b>: failed after ")
    assert any(": starting: " in state or "2 ranks, step" in state for state in displayed), displayed
    assert any(f'<a href="{seen["url"]}"' in state and "2 ranks" in state for state in displayed), displayed
