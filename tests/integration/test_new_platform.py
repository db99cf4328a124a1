"""A platform that Hora does not know, written from ARCHITECTURE.md alone: containers made with `unshare`.

Each has host name, processes, mounts and memory of its own, but the machine's network.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading

import psutil
import pytest

from hora.errors import JobFailedError
from hora.launch.options import Options
from hora.launch.pickling import pickle_call
from hora.launch.providers.base import Commands, StartError
from hora.launch.slots import HostInfo
from hora.launch.start import start
from waiting import wait_until

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root and unshare (util-linux)"
)


class Containers:
    """Starts agents in new namespaces."""

    def __init__(self, names, slots):
        self._names, self._slots, self._commands = names, slots, Commands()
        self.started, self.ended_on = [], []

    def hosts(self):
        return [HostInfo(name, self._slots) for name in self._names]

    def start(self, host, order):
        self.started.append(host)
        enter = f'hostname {host} && exec "$@"'
        box = ["unshare", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", enter, "sh"]
        status, said = self._commands.run(host, [*box, *order.command], order)
        raise StartError(said or f"unshare ended with status {status}")

    def ended(self, host, why):
        self.ended_on.append(host)
        self._commands.end(host)

    def close(self):
        self._commands.close()


def run_on(provider, function=None, **options):
    wanted = Options(**options)
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    return start(wanted, environ, provider=provider, function=None if function is None else pickle_call(function))


def average_and_place():
    import socket

    import torch

    import horovod.torch as hvd

    hvd.init()
    mean = hvd.allreduce(torch.tensor([float(hvd.rank())])).item()
    return hvd.rank(), hvd.local_rank(), hvd.cross_rank(), socket.gethostname(), os.getpid() < 1000, mean


def left_over():
    found = []
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended, reaped or not
            if "hora.launch" in " ".join(one.cmdline()):
                found.append(one.pid)
    return found


def test_ranks_in_containers_train_together():
    provider = Containers(["one", "two"], 2)
    values = run_on(provider, average_and_place, num_proc=3).values()
    assert values == [(0, 0, 0, "one", True, 1.0), (1, 1, 0, "one", True, 1.0), (2, 0, 1, "two", True, 1.0)]
    assert sorted(provider.started) == ["one", "two"]
    assert provider.ended_on == []
    wait_until("no process is left", lambda: not left_over())


def test_a_failed_rank_is_named_with_its_container():
    with pytest.raises(JobFailedError, match=r"(?s)Process name: 1\nExit code: 3"):
        run_on(Containers(["one", "two"], 1), num_proc=2, command=("sh", "-c", "exit $((HOROVOD_RANK * 3))"))
    wait_until("no process is left", lambda: not left_over())


def test_a_container_that_cannot_be_started_is_named():
    class Broken(Containers):
        def start(self, host, order):
            if host == "two":
                raise StartError("the image is not there")
            super().start(host, order)

    provider = Broken(["one", "two"], 1)
    with pytest.raises(RuntimeError, match=r"cannot be started on some hosts:\n  two: the image is not there"):
        run_on(provider, num_proc=2, command=("sleep", "600"))
    wait_until("no process is left", lambda: not left_over())


def test_a_container_that_never_answers_is_ended():
    class Silent(Containers):
        def start(self, host, order):
            self._commands.run(host, ["sleep", "600"], order)
            raise StartError("it was killed")

    provider = Silent(["one"], 1)
    with pytest.raises(RuntimeError, match=r"one: no answer within 1 s \(--start-timeout\)"):
        run_on(provider, num_proc=1, command=("true",), start_timeout=1)
    assert provider.ended_on == ["one"]


TRAINING = """
import os, sys, time
import torch
import horovod.torch as hvd

hvd.init()
state = hvd.elastic.TorchState(steps=0)

@hvd.elastic.run
def train(state):
    while state.steps < 20:
        hvd.allreduce(torch.ones(1))
        if state.steps == 5 and not os.path.exists(sys.argv[1]) and os.uname().nodename == "two":
            open(sys.argv[1], "w").close()
            time.sleep(600)
        state.steps += 1
        state.commit()

train(state)
print("steps", state.steps, flush=True)
"""


def test_a_lost_container_is_started_again(tmp_path, capfd):
    (tmp_path / "train.py").write_text(TRAINING)
    reached = tmp_path / "reached"
    provider = Containers(["one", "two"], 1)

    def kill_the_second() -> None:
        wait_until("the fifth step", reached.exists, 120)
        provider._commands.end("two")

    killer = threading.Thread(target=kill_the_second)
    killer.start()
    command = (sys.executable, str(tmp_path / "train.py"), str(reached))
    run_on(provider, command=command, num_proc=2, min_num_proc=2, cooldown_range=(1, 2), elastic_timeout=120)
    killer.join(120)
    shown = capfd.readouterr()
    assert shown.out.count("steps 20") == 2, shown
    assert sorted(provider.started) == ["one", "two", "two"]
    assert provider.ended_on == ["two"]
    wait_until("no process is left", lambda: not left_over())
