"""Faults of a local job: the reported rank, the exception, and no leftovers."""

from __future__ import annotations

import array
import fcntl
import os
import select
import signal
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from job_process import HOROVODRUN, LIMIT_S, CommandProcess, JobProcess

import horovod
from hora.errors import JobFailedError
from hora.launch.controller.launcher import HostLauncher
from hora.launch.controller.loop import run_job
from hora.launch.job import Job, OutputOptions
from hora.launch.slots import place_ranks
from waiting import wait_until

pytestmark = pytest.mark.usefixtures("by_value")

BEGINNING = "Horovod detected that one or more processes exited with non-zero status"


class UnpicklableError(Exception):
    """Holds an object that cannot be pickled."""

    def __init__(self, message: str) -> None:
        import threading

        super().__init__(message)
        self.lock = threading.Lock()


class AwkwardError(Exception):
    """Has an `__init__` that rejects its own `args`, and a `__str__` that raises."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code

    def __str__(self) -> str:
        raise RuntimeError("no words")


class HomesickError(Exception):
    """Can be rebuilt only on a worker."""

    def __reduce__(self) -> tuple[object, tuple[()]]:
        return rank, ()


def rank() -> int:
    return int(os.environ["HOROVOD_RANK"])


def wait_for_the_end() -> None:
    """Keep a surviving rank busy for minutes."""
    time.sleep(120)


def fail_with(action: Callable[[], object], *, failing: int = 1, num_proc: int = 3) -> JobFailedError:
    """Run a job in which one rank runs `action` while the other ranks sleep for minutes; return the error."""

    def work() -> object:
        return action() if rank() == failing else wait_for_the_end()

    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(RuntimeError, match=BEGINNING) as caught:
        horovod.run(work, num_proc=num_proc)
    assert set(psutil.Process().children(recursive=True)) <= before
    error = caught.value
    assert isinstance(error, JobFailedError)
    assert error.rank == failing
    assert f"\nProcess name: {failing}\nExit code: {error.exit_code}\n" in str(error)
    return error


def test_a_rank_raises():
    def work() -> None:
        raise KeyError("the missing thing")

    error = fail_with(work)
    assert error.exit_code == 1
    assert isinstance(error.__cause__, KeyError)
    assert error.__cause__.args == ("the missing thing",)
    assert "in work\n    raise KeyError" in error.remote_traceback
    assert error.remote_traceback.strip() in str(error)
    assert "KeyError: 'the missing thing'" in error.log_tail


def test_rank_0_raises():
    error = fail_with(lambda: 1 / 0, failing=0, num_proc=2)
    assert isinstance(error.__cause__, ZeroDivisionError)


def test_a_rank_exits():
    def work() -> None:
        print("going down", file=sys.stderr)
        sys.exit(3)

    error = fail_with(work)
    assert error.exit_code == 3
    assert "going down" in str(error)


def test_a_rank_exits_with_status_0_but_without_a_result():
    error = fail_with(lambda: os._exit(0))
    assert error.exit_code == 1
    assert "did not return" in str(error)


def test_a_rank_is_killed():
    error = fail_with(lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert error.exit_code == 128 + signal.SIGKILL
    assert "Reason: killed by SIGKILL" in str(error)


def test_a_rank_segfaults():
    import ctypes

    assert fail_with(lambda: ctypes.string_at(0)).exit_code == 128 + signal.SIGSEGV


def test_an_unpicklable_result_is_reported():
    def work() -> object:
        import threading

        return threading.Lock()

    error = fail_with(work)
    assert "the value that the function returned on rank 1, a _thread.lock, cannot be pickled" in str(error)
    assert isinstance(error.__cause__, TypeError)


def test_an_unpicklable_exception_is_reported():
    def work() -> None:
        raise UnpicklableError("with a lock inside")

    error = fail_with(work)
    assert "UnpicklableError: with a lock inside" in str(error)
    assert "the UnpicklableError itself could not be pickled" in str(error)


def test_an_exception_with_a_broken_init_and_str_is_reraised():
    def work() -> None:
        raise AwkwardError(code=7)

    error = fail_with(work, num_proc=2)
    assert "AwkwardError: " in str(error)
    assert isinstance(error.__cause__, AwkwardError)
    assert (error.__cause__.code, error.__cause__.args) == (7, ("code 7",))


def test_an_exception_that_cannot_be_rebuilt_is_reported():
    def work() -> None:
        raise HomesickError("x" * 300_000)

    error = fail_with(work, num_proc=2)
    assert "in work\n" in str(error)
    assert "HomesickError: x" in str(error)
    assert len(str(error)) < 70_000
    assert "HomesickError: x" in str(error.__cause__)
    assert "it cannot be rebuilt here" in str(error.__cause__)


def test_a_function_that_cannot_be_rebuilt_is_a_clear_error():
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return __import__, ("there_is_no_such_module",)

    trap = Trap()
    with pytest.raises(JobFailedError, match="No module named 'there_is_no_such_module'"):
        horovod.run(lambda: trap)


@pytest.mark.parametrize("failing", [0, 2])
def test_the_first_failing_rank_is_reported_not_its_peers(failing: int):
    def work() -> None:
        from hora.net.client import ControlClient
        from hora.platforms.detect import detect_world

        world = detect_world()
        client = ControlClient.connect(world.rendezvous, name=f"rank {world.rank}", timeout_s=30)
        for step in range(3):
            if world.rank == failing and step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            client.gather("step", b"", rank=world.rank, size=world.size, timeout_s=60)

    with pytest.raises(JobFailedError) as caught:
        horovod.run(work, num_proc=3)
    assert (caught.value.rank, caught.value.exit_code) == (failing, 137)


def test_a_command_that_complains_about_a_lost_peer_is_not_the_root_cause(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, psutil, time\n"
        "from hora.errors import HorovodInternalError\n"
        "note, ready = (pathlib.Path(__file__).with_name(name) for name in ('complained', 'ready'))\n"
        "if os.environ['HOROVOD_RANK'] == '0':\n"
        "    while not ready.exists():\n"
        "        time.sleep(0.01)\n"
        "    note.write_text(f'{os.getpid()}.')\n"
        "    raise HorovodInternalError('a peer is lost')\n"
        "ready.touch()\n"
        "while not note.exists() or not note.read_text().endswith('.'):\n"
        "    time.sleep(0.01)\n"
        "pid = int(note.read_text()[:-1])\n"
        "while psutil.pid_exists(pid) and psutil.Process(pid).status() != 'zombie':\n"
        "    time.sleep(0.01)\n"
        "raise SystemExit(9)\n"  # this failure is later than the complaint
    )
    job = JobProcess([*HOROVODRUN, "-np", "2", sys.executable, str(script)], tmp_path)
    assert job.wait() == 1
    assert "Process name: 1\nExit code: 9\n" in job.text()
    job.assert_nothing_left()


@pytest.mark.parametrize("leave", ["os._exit(0)", pytest.param("sys.exit(0)", marks=pytest.mark.slow)])
def test_a_rank_that_exits_with_status_0_is_reported_not_its_peers(tmp_path: Path, leave: str):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, torch\n"
        "import horovod.torch as hvd\n"
        "hvd.init()\n"
        "for step in range(200):\n"
        "    if hvd.rank() == 1 and step == 5:\n"
        f"        {leave}\n"
        "    hvd.allreduce(torch.ones(1000), name='a')\n"
    )
    job = JobProcess([*HOROVODRUN, "-np", "3", sys.executable, str(script)], tmp_path)
    assert job.wait() == 1
    text = job.text()
    assert "Process name: 1\nExit code: 1\nReason: it was done, with status 0, while rank" in text, text
    assert "process 1 on host" in text
    job.assert_nothing_left()


def test_a_rank_whose_function_returns_early_is_reported_not_its_peers():
    def work() -> None:
        import torch

        import horovod.torch as hvd

        hvd.init()
        for _ in range(5 if hvd.rank() == 2 else 200):
            hvd.allreduce(torch.ones(10), name="a")
        hvd.shutdown()

    with pytest.raises(JobFailedError, match="status 0, while rank") as caught:
        horovod.run(work, num_proc=3)
    assert caught.value.rank == 2


def test_a_command_that_does_not_exist(tmp_path: Path):
    job = JobProcess([*HOROVODRUN, "-np", "2", "no-such-command"], tmp_path)
    assert job.wait() == 1
    assert "cannot run 'no-such-command': No such file or directory" in job.text()
    job.assert_nothing_left()


# A worker that is hard to end: rank 0 ignores SIGTERM, a shell wraps it, and it has a grandchild that left its session
# and its parent.
STUBBORN = """
import os, signal, subprocess, sys, time
if os.environ["HOROVOD_RANK"] == "0":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(300)
    os._exit(0)
os.wait()
subprocess.Popen(["sleep", "300"])
print("ready", os.environ["HOROVOD_RANK"], flush=True)
time.sleep(300)
"""


def stubborn_job(work: Path) -> JobProcess:
    (work / "stubborn.py").write_text(STUBBORN)
    wrapped = ["sh", "-c", f"{sys.executable} stubborn.py; true"]
    job = JobProcess([*HOROVODRUN, "-np", "2", *wrapped], work)
    job.wait_for_text("ready 0")
    job.wait_for_text("ready 1")
    # launcher, guardian, agent; per rank a shell, Python, sleep and the daemonized grandchild
    wait_until("all processes run", lambda: len(job.processes()) == 3 + 2 * 4)
    return job


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGHUP])
def test_the_launcher_gets_a_signal(tmp_path: Path, number: signal.Signals):
    job = stubborn_job(tmp_path)
    job.process.send_signal(number)
    status = job.wait()
    if number != signal.SIGKILL:
        assert status == 128 + number
        # The launcher waits for its workers: none is left once it has exited.
        assert job.processes() == []
    job.assert_nothing_left()


@pytest.mark.parametrize("which", ["guardian", "agent"])
def test_the_guardian_or_the_agent_is_killed(tmp_path: Path, which: str):
    job = stubborn_job(tmp_path)
    guardian, agent = job.agents()
    (guardian if which == "guardian" else agent).kill()
    assert job.wait() == 1
    assert BEGINNING in job.text()
    job.assert_nothing_left()


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_a_stopped_agent_is_ended_with_its_ranks(tmp_path: Path, number: signal.Signals):
    """A debugger or a cgroup's freezer has stopped it, so it obeys nobody: its guardian watches the launcher, too."""
    job = stubborn_job(tmp_path)
    job.agents()[1].suspend()
    job.process.send_signal(number)
    assert job.wait() == (128 + number if number != signal.SIGKILL else -number)
    job.assert_nothing_left()


def test_a_stopped_guardian_and_its_stopped_agent_are_ended(tmp_path: Path):
    job = stubborn_job(tmp_path)
    for process in job.agents():
        process.suspend()
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 128 + signal.SIGTERM
    job.wait_for_the_last(60)


@pytest.mark.parametrize(
    ("number", "elastic", "merged"),
    [
        (signal.SIGINT, False, True),
        (signal.SIGTERM, True, True),
        pytest.param(signal.SIGTERM, False, False, marks=pytest.mark.slow),
    ],
)
def test_a_launcher_whose_output_nobody_reads_obeys_signals(number: signal.Signals, elastic: bool, merged: bool):
    """A pager, Ctrl-S, a log collector that stands still."""
    options = ["--min-np", "2"] if elastic else []
    line = ["horovodrun", "-np", "2", *options, "sh", "-c", "yes something long"]
    prefix = ("sh", "-c", 'exec "$0" "$@"' + " 2>&1" * merged)
    with CommandProcess(*line, prefix=prefix) as job:
        assert job.process.stdout is not None
        waiting = array.array("i", [0])

        def is_full() -> bool:
            fcntl.ioctl(job.process.stdout, termios.FIONREAD, waiting)
            return waiting[0] >= 15 * select.PIPE_BUF

        wait_until("the pipe is full", is_full)
        job.process.send_signal(number)
        assert job.process.wait(LIMIT_S) == 128 + number
        job.wait_for_the_last(60)


def test_a_rank_that_is_stopped_after_the_others_have_ended_is_named(tmp_path: Path):
    program = (
        "import os, signal, horovod.torch as hvd; hvd.init(); hvd.barrier();"
        "hvd.rank() == 1 and (print('stops', os.getpid(), flush=True), os.kill(os.getpid(), signal.SIGSTOP))"
    )
    rank = [sys.executable, "-c", program]
    job = JobProcess([*HOROVODRUN, "-np", "2", *rank], tmp_path, HOROVOD_STALL_CHECK_TIME_SECONDS="1")
    job.wait_for_text("rank 1 has not answered for 1 s")
    pid = int(next(line for line in job.text().splitlines() if ":stops" in line).split()[-1])
    os.kill(pid, signal.SIGCONT)
    assert job.wait() == 0, job.text()
    assert job.text().count("has not answered") == 1
    job.assert_nothing_left()


def test_a_worker_that_ignores_sigterm_does_not_delay_a_failed_job(tmp_path: Path):
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    command = f'[ $HOROVOD_RANK = 1 ] && sleep 1 && exit 4; exec "{sys.executable}" stubborn.py'
    job = JobProcess([*HOROVODRUN, "-np", "2", "sh", "-c", command], tmp_path)
    assert job.wait() == 1
    assert "Process name: 1\nExit code: 4\n" in job.text()
    job.assert_nothing_left()


def test_daemons_of_a_finished_job_are_ended(tmp_path: Path):
    daemon = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(300)\n"
    job = JobProcess([*HOROVODRUN, "-np", "2", sys.executable, "-c", daemon], tmp_path)
    assert job.wait() == 0, job.text()
    job.assert_nothing_left()


def test_an_error_of_the_callers_stream_ends_the_job():
    class Broken:
        def write(self, text: str) -> None:
            raise LookupError("a bug in the caller's stream")

        def flush(self) -> None:
            """Never reached."""

    before = set(psutil.Process().children(recursive=True))
    output = OutputOptions(stdout=Broken())
    job = Job(
        slots=tuple(place_ranks(["localhost"])),
        command=("sh", "-c", "echo x; sleep 100"),
        env=os.environ,
        output=output,
    )
    with pytest.raises(LookupError, match="a bug in the caller's stream"):
        run_job(job, HostLauncher())
    assert set(psutil.Process().children(recursive=True)) <= before


def test_a_stopped_worker_is_ended_with_its_job(tmp_path: Path):
    command = "[ $HOROVOD_RANK = 1 ] && sleep 1 && exit 4; kill -STOP $$"
    job = JobProcess([*HOROVODRUN, "-np", "2", "sh", "-c", command], tmp_path)
    assert job.wait() == 1
    assert "Process name: 1\nExit code: 4\n" in job.text()
    job.assert_nothing_left()


def test_an_interrupted_run_leaves_the_callers_process_clean():
    import threading

    before = set(psutil.Process().children(recursive=True))
    threads = set(threading.enumerate())

    def interrupt() -> None:
        wait_until("the workers run", lambda: len(psutil.Process().children(recursive=True)) >= len(before) + 4)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        horovod.run(wait_for_the_end, num_proc=2)
    thread.join()
    assert set(psutil.Process().children(recursive=True)) <= before
    assert not [t for t in set(threading.enumerate()) - threads if t.name.startswith("hora-")]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
