"""Functions and commands on processes of this machine: results, output, environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from job_process import HOROVODRUN, JobProcess

import horovod
from hora.errors import StartTimeoutError
from hora.launch.controller.launcher import HostLauncher
from hora.launch.controller.loop import run_job
from hora.launch.job import Job
from hora.launch.slots import Slot, place_ranks

pytestmark = pytest.mark.usefixtures("by_value")


def meet(tag: str) -> tuple[int, list[bytes]]:
    """Meet the other ranks through the rendezvous, without the engine."""
    from hora.net.client import ControlClient
    from hora.platforms.detect import detect_world

    world = detect_world()
    client = ControlClient.connect(world.rendezvous, name=f"rank {world.rank}", timeout_s=30)
    said = f"{tag}{world.rank}".encode()
    values = list(client.gather("test", said, rank=world.rank, size=world.size, timeout_s=30).members.values())
    client.close()
    return world.rank, values


def local_slots(num_proc: int) -> tuple[Slot, ...]:
    return tuple(place_ranks(["localhost"] * num_proc))


def test_ranks_meet_and_results_are_in_rank_order():
    everybody = [b"r0", b"r1", b"r2", b"r3"]
    assert horovod.run(meet, args=("r",), num_proc=4) == [(rank, everybody) for rank in range(4)]


def test_closures_lambdas_and_keywords():
    factor = 3
    assert horovod.run(lambda x, *, y: factor * x + y, (2,), {"y": 1}, num_proc=2) == [7, 7]


def test_torch_is_not_imported_for_a_function_that_does_not_need_it():
    assert horovod.run(lambda: "torch" in sys.modules) == [False]


def test_a_result_of_200_mb():
    [value] = horovod.run(lambda: os.urandom(8) * 25_000_000)
    assert len(value) == 200_000_000
    assert value == value[:8] * 25_000_000


def test_a_large_function_reaches_every_rank():
    ballast = os.urandom(20_000_000)
    assert horovod.run(lambda: hash(ballast[-100:]) is not None and len(ballast), num_proc=2) == [20_000_000] * 2


def test_the_environment_of_a_worker():
    def look() -> dict[str, str]:
        return dict(os.environ)

    first, second = horovod.run(look, num_proc=2)
    assert first["HOROVOD_RANK"] == "0"
    assert second["HOROVOD_RANK"] == second["HOROVOD_LOCAL_RANK"] == "1"
    assert second["HOROVOD_SIZE"] == second["HOROVOD_LOCAL_SIZE"] == "2"
    assert (second["HOROVOD_CROSS_RANK"], second["HOROVOD_CROSS_SIZE"]) == ("0", "1")
    assert first["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "127.0.0.1"
    assert int(first["HOROVOD_GLOO_RENDEZVOUS_PORT"]) > 0
    assert first["HOROVOD_CONTROLLER"] == first["HOROVOD_CPU_OPERATIONS"] == "gloo"
    assert first["PYTHONUNBUFFERED"] == "1"


def test_the_secret_is_neither_in_environments_nor_in_command_lines():
    def look() -> tuple[bytes, bytes]:
        from pathlib import Path

        secret = Path(os.environ["HORA_SECRET_FILE"]).read_bytes()
        seen = b""
        for process in Path("/proc").iterdir():
            if process.name.isdigit():
                for part in ("environ", "cmdline"):
                    try:
                        seen += (process / part).read_bytes()
                    except OSError:
                        continue
        return secret, seen

    [(secret, seen)] = horovod.run(look)
    assert len(secret) == 32
    assert len(seen) > 1000
    assert secret not in seen
    assert secret.hex().encode() not in seen


def test_output_is_prefixed_and_kept_in_files(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]):
    def speak() -> None:
        os.write(1, b"no utf-8: \xff\n" + b"x" * 4000 + b"\n")
        os.write(2, "grüße".encode())

    horovod.run(speak, num_proc=2, output_filename=str(tmp_path / "logs"))
    shown = capfdbinary.readouterr()
    for rank in (0, 1):
        out = b"[%d]<stdout>:no utf-8: \xff\n[%d]<stdout>:%s\n" % (rank, rank, b"x" * 4000)
        assert (tmp_path / f"logs/rank.{rank}/stdout").read_bytes() == out
        assert sorted(out.splitlines()) == sorted(
            line for line in shown.out.splitlines() if line.startswith(b"[%d]" % rank)
        )
        assert "[%d]<stderr>:grüße\n".encode() % rank in shown.err


def test_100_mb_of_output_are_forwarded_without_buffering(tmp_path: Path):
    script = "import sys\nfor _ in range(1000): sys.stdout.write(('y' * 99 + '\\n') * 1000)\nprint('done')"
    launch = (
        "import sys, pathlib\nfrom horovod.runner.launch import run_commandline\nstatus = run_commandline()\n"
        "print(pathlib.Path('/proc/self/status').read_text(), file=sys.stderr)\nsys.exit(status)"
    )
    sink = tmp_path / "out"
    argv = ["sh", "-c", 'exec "$0" "$@" > out', sys.executable, "-c", launch]
    job = JobProcess([*argv, "-np", "1", sys.executable, "-c", script], tmp_path)
    assert job.wait(120) == 0, job.text()
    assert sink.stat().st_size == 1_000_000 * (100 + len("[0]<stdout>:")) + len("[0]<stdout>:done\n")
    peak_kib = int(job.text().partition("VmHWM:")[2].split()[0])
    assert peak_kib < 150 * 1024
    job.assert_nothing_left()


def test_a_command_gets_its_rank_and_sets_the_exit_status(tmp_path: Path):
    job = JobProcess([*HOROVODRUN, "-np", "3", "sh", "-c", "echo rank $HOROVOD_RANK of $HOROVOD_SIZE"], tmp_path)
    assert job.wait() == 0
    expected = [f"[{rank}]<stdout>:rank {rank} of 3" for rank in range(3)]
    assert sorted(job.text().splitlines()) == expected
    job.assert_nothing_left()


def test_concurrent_jobs_are_separate(tmp_path: Path):
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(horovod.run, meet, (tag,), num_proc=2) for tag in "ab"]
    assert [job.result()[0][1] for job in jobs] == [[b"a0", b"a1"], [b"b0", b"b1"]]


def test_modules_beside_the_caller_are_importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "beside_me.py").write_text("def answer():\n    return 42\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import beside_me

    assert horovod.run(beside_me.answer) == [42]


def test_processes_that_never_connect_raise_start_timeout_error(tmp_path: Path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o755)
    job = Job(slots=local_slots(2), function=b"", env=os.environ, executable=str(python), start_timeout_s=1.0)
    with pytest.raises(StartTimeoutError, match=r"Timed out waiting for 2 of 2 .*\[0, 1\].* after 1 seconds"):
        run_job(job, HostLauncher())


def test_a_worker_shares_no_modules_with_its_caller():
    assert horovod.run(lambda: "pytest" in sys.modules) == [False]
