"""The worker functions over real processes: contract, limits, deaths and leftovers."""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
import warnings
from pathlib import Path

import psutil
import pytest
from job_process import wait_until_gone

from hora import workers
from hora.workers import api
from waiting import wait_until


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    workers.stop_workers()
    api._close(os.getpid())


def launch(n=1, code="print('hello')", cpu=0.5, memory=1, **more):
    # A previous test may have left a Spark session active, so request local workers.
    return workers.launch_workers(n, cpu=cpu, memory=memory, code=code, backend="local", **more)


def ids(launched):
    return [worker["id"] for worker in launched]


def test_workers_run_and_report_their_exit(capfd):
    launched = launch(
        2, code="import os\nprint('I am', os.environ['CDSW_ENGINE_ID'])\n!echo from the shell $CDSW_MASTER_ID"
    )
    assert [worker["index"] for worker in launched] == [0, 1]
    assert all(re.fullmatch("[a-z0-9]{16}", worker["id"]) for worker in launched)
    result = workers.await_workers(ids(launched))
    assert set(result) == {"workers", "failures"}
    assert result["failures"] == []
    assert [worker["id"] for worker in result["workers"]] == ids(launched)
    for worker in result["workers"]:
        assert (worker["status"], worker["exit_code"]) == ("succeeded", 0)
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", worker["finished_at"])
        assert worker["duration"] > 0
        assert f"I am {worker['id']}" in worker["log_tail"]
    printed = capfd.readouterr().out
    for worker in ids(launched):
        assert f"[{worker}]<stdout>:I am {worker}" in printed
    assert "from the shell" in printed


def test_failures_are_returned_as_data():
    good, bad = launch(1)[0], launch(1, code="raise SystemExit(7)")[0]
    result = workers.await_workers([good, bad["id"], "0123456789abcdef"], timeout_seconds=60)
    assert [worker["id"] for worker in result["workers"]] == [good["id"]]
    failed, unknown = result["failures"]
    assert (failed["id"], failed["status"], failed["exit_code"]) == (bad["id"], "failed", 7)
    assert unknown["status"] == "unknown"


def test_await_running_then_stop():
    launched = launch(2, code="import time\nprint('up')\ntime.sleep(600)")
    result = workers.await_workers(launched, wait_for_completion=False, timeout_seconds=120)
    addresses = [worker["ip_address"] for worker in result["workers"]]
    assert len(set(addresses)) == 2
    assert all(address.startswith("127.0.") for address in addresses)
    late = workers.await_workers(launched[0], timeout_seconds=0.3)
    assert [worker["status"] for worker in late["failures"]] == ["running"]
    (first,) = workers.stop_workers(launched[0])
    assert first.status_code == 204
    (second,) = workers.stop_workers()
    assert second.id == launched[1]["id"]
    assert [worker["status"] for worker in workers.list_workers()] == ["stopped", "stopped"]
    assert workers.stop_workers() is None


def test_waiting_for_running_fails_for_a_worker_that_has_succeeded():
    launched = launch()
    workers.await_workers(launched)
    (found,) = workers.await_workers(launched, wait_for_completion=False)["failures"]
    assert (found["status"], found["exit_code"]) == ("succeeded", 0)


def test_excessive_requests_are_rejected_in_the_original_format():
    with pytest.warns(UserWarning, match="1 of 1 workers were not launched: 1000 CPU cores"):
        (refused,) = launch(1, cpu=1000, strict=True)
    assert "id" not in refused
    assert "1000 CPU cores" in refused["message"]
    assert workers.stop_workers(refused)[0].status_code == 404
    with pytest.raises(RuntimeError, match="not launched"):
        launch(1, memory=10**6, raise_on_error=True)
    with pytest.raises(RuntimeError, match="GPUs"):
        launch(1, nvidia_gpu=64, raise_on_error=True)


def test_all_or_nothing():
    cores = len(os.sched_getaffinity(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        launched = launch(cores + 1, code="import time; time.sleep(600)", cpu=1, all_or_nothing=True)
    assert all("id" not in worker for worker in launched)
    assert workers.list_workers() == []
    assert all("id" in worker for worker in launch(cores, cpu=1))


def test_all_or_nothing_waits_for_room():
    cores = len(os.sched_getaffinity(0))
    first = launch(1, code="import time; time.sleep(1)", cpu=1)
    launched = launch(cores, cpu=1, all_or_nothing=True, wait_seconds=60)
    assert all("id" in worker for worker in launched)
    assert workers.list_workers()[0]["status"] == "succeeded"
    assert len(workers.await_workers(launched)["workers"]) == cores
    assert workers.await_workers(first)["workers"]
    with pytest.raises(RuntimeError, match="not launched"):
        launch(cores + 1, cpu=1, all_or_nothing=True, wait_seconds=0.2, raise_on_error=True)
    with pytest.raises(ValueError, match="wait_seconds=5 is for all_or_nothing"):
        launch(1, wait_seconds=5)


def test_limits_are_applied_to_the_worker():
    code = (
        "import os, json\n"
        "names = ('OMP_NUM_THREADS', 'CUDA_VISIBLE_DEVICES', 'MINE')\n"
        "print(json.dumps([sorted(os.sched_getaffinity(0)), *(os.environ[name] for name in names)]))"
    )
    (worker,) = workers.await_workers(launch(1, code=code, cpu=1, env={"MINE": "yes"}))["workers"]
    cores, threads, gpus, mine = json.loads(worker["log_tail"][-1])
    assert (len(cores), threads, gpus, mine) == (1, "1", "", "yes")


def test_a_worker_that_exceeds_its_memory_is_ended_with_an_explanation():
    code = "import time\nkept = bytearray(600 * 2**20)\nkept[::4096] = b'x' * len(kept[::4096])\ntime.sleep(60)"
    (worker,) = workers.await_workers(launch(1, code=code, memory=0.3))["failures"]
    assert worker["status"] == "failed"
    assert any("GiB of memory but was given 0.3" in line for line in worker["log_tail"])


def test_script_wins_over_code_and_output_goes_to_a_file(tmp_path):
    Path("job.py").write_text("import sys\nprint('script', sys.argv[0].endswith('job.py'), __name__)\n")
    (worker,) = workers.await_workers(launch(1, code="print('code')", script="job.py", log_dir="logs"))["workers"]
    assert worker["log_tail"] == ["script True __main__"]
    assert Path("logs", f"{worker['id']}.log").read_text() == "script True __main__\n"


def test_a_worker_launches_workers_for_the_same_master():
    code = (
        "from hora.workers import launch_workers, await_workers\n"
        "show = 'import os; print(os.environ[\"CDSW_MASTER_ID\"])'\n"
        "made = launch_workers(1, cpu=0.5, memory=0.5, code=show, backend='local')\n"
        "print(await_workers(made)['workers'][0]['log_tail'][0])\n"
        "import os; print(os.environ['CDSW_MASTER_ID'])\n"
    )
    (worker,) = workers.await_workers(launch(1, code=code))["workers"]
    assert len(workers.list_workers()) == 2
    assert worker["log_tail"][-1] == worker["log_tail"][-2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"n": 0}, "at least 1"),
        ({"n": 1.5}, "whole number"),
        ({"code": ""}, "code= or script="),
        ({"script": "missing.py"}, "no script 'missing.py'"),
        ({"kernel": "scala"}, "only the python3 kernel"),
        ({"kernel": "cobol"}, "must be python3"),
        ({"cpu": "one"}, "cpu must be a number, but it is 'one'"),
        ({"code": print}, "code must be Python text"),
    ],
)
def test_bad_input(arguments, words):
    given = {"n": 1, "cpu": 1, "memory": 1, "code": "pass"} | arguments
    with pytest.raises(ValueError, match=words):
        workers.launch_workers(**given)


def test_a_web_application_on_127_0_0_1_is_reachable_at_its_url():
    code = (
        "import http.server, os\n"
        "address = ('127.0.0.1', int(os.environ['CDSW_APP_PORT']))\n"
        "server = http.server.HTTPServer(address, http.server.SimpleHTTPRequestHandler)\n"
        "print('up', flush=True)\n"
        "server.serve_forever()\n"
    )
    (worker,) = launch(code=code)
    wait_until("the server is up", lambda: "up" in workers.worker_output(worker))
    with urllib.request.urlopen(worker["app_url"], timeout=20) as answer:
        assert answer.status == 200


def test_the_log_of_a_failed_worker_shows_its_own_lines_only():
    (worker,) = workers.await_workers(launch(code="def f():\n    return 1 / 0\nf()"))["failures"]
    assert worker["log_tail"][:2] == [
        "Traceback (most recent call last):",
        '  File "<worker code>", line 3, in <module>',
    ]
    assert worker["log_tail"][-1] == "ZeroDivisionError: division by zero"


def test_bad_ids():
    with pytest.raises(ValueError, match="neither id nor engineId"):
        workers.await_workers([{"name": "x"}])
    with pytest.raises(ValueError, match="worker ids must be"):
        workers.stop_workers(1.5)


def test_signature_probe():
    parameters = inspect.signature(workers.launch_workers).parameters
    assert list(parameters)[:7] == ["n", "cpu", "memory", "nvidia_gpu", "kernel", "script", "code"]
    assert "name" in parameters


PARENT = """
import os, sys, time
from hora.workers import launch_workers, await_workers
code = "import os, time, subprocess\\np = subprocess.Popen(['sleep', '600'])\\nprint('pids', os.getpid(), p.pid)\\n"
made = launch_workers(2, cpu=0.5, memory=1, code=code + "time.sleep(600)")
await_workers(made, wait_for_completion=False)
print("parent", os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_workers_and_their_children_die_with_the_parent(how):
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    pids = []
    while len(pids) < 5:
        line = parent.stdout.readline()
        assert line, "the parent ended early"
        pids += [int(word) for word in line.split() if word.isdigit()]
    family = psutil.Process(parent.pid).children(recursive=True)
    parent.send_signal(how)
    parent.wait(20)
    parent.stdout.close()
    wait_until_gone(*pids, *[process.pid for process in family])


COMPAT = """
import cdsw, inspect
import cml.workers_v1 as workers
from cml.workers_v1 import launch_workers, await_workers, list_workers, stop_workers
import cml.utils_v1 as u
assert u._emulate_cdsw() is cdsw
assert "name" in inspect.signature(cdsw.launch_workers).parameters
import os
assert os.environ["CDSW_MASTER_ID"] == "" and os.environ["CDSW_IP_ADDRESS"] == "127.0.0.1"
head = cdsw.launch_workers(1, cpu=0.5, memory=1, code="import os; print(os.environ['CDSW_MASTER_ID'])")
assert cdsw.await_workers(head)["workers"][0]["log_tail"] == [os.environ["CDSW_ENGINE_ID"]]
NUM_WORKERS = 2
made = cdsw.launch_workers(NUM_WORKERS, cpu=0.5, memory=1, code="import time; time.sleep(600)")
result = cdsw.await_workers([w["id"] for w in made], wait_for_completion=False, timeout_seconds=120)
assert len(result) == NUM_WORKERS
hosts = ",".join(w["ip_address"] + ":1" for w in result["workers"])
import subprocess, sys
out = subprocess.run(["horovodrun", "-np", "2", "-H", hosts, sys.executable, "-c",
    "import torch, horovod.torch as hvd; hvd.init(); "
    "print(hvd.allreduce(torch.ones(1), op=hvd.Sum).item(), hvd.cross_size())"],
    capture_output=True, text=True)
print(out.stdout, out.stderr)
print(cdsw.stop_workers())
print(sorted(w["status"] for w in list_workers()))
"""


OF_A_SESSION = """
import os, subprocess, sys
import cdsw
for name in ("API_KEY", "API_URL", "PROJECT_URL", "ENGINE_URL", "ENGINE_ID", "IP_ADDRESS"):
    assert os.environ["CDSW_" + name], name
if len(sys.argv) > 1:
    print([worker["id"] for worker in cdsw.list_workers()] == sys.argv[1:])
else:
    (worker,) = cdsw.launch_workers(1, cpu=0.5, memory=1, code="pass")
    subprocess.run([sys.executable, "-m", "hora.compat", __file__, worker["id"]], check=True)
"""


def test_subprocesses_of_a_session_see_its_workers():
    Path("session.py").write_text(OF_A_SESSION)
    done = subprocess.run(
        [sys.executable, "-m", "hora.compat", "session.py"], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "True\n", done.stderr


def test_an_old_script_runs_unchanged(tmp_path):
    Path("old.py").write_text(COMPAT)
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, "-m", "hora.compat", "old.py"], capture_output=True, text=True, timeout=280, env=env
    )
    assert done.returncode == 0, done.stderr
    assert "[0]<stdout>:2.0 2" in done.stdout, done.stdout
    assert "['stopped', 'stopped', 'succeeded']" in done.stdout


def hora(*arguments, check=True):
    done = subprocess.run(
        [sys.executable, "-m", "hora", "workers", *arguments], capture_output=True, text=True, timeout=60
    )
    assert not check or done.returncode == 0, done.stderr
    return done


def test_workers_on_the_command_line(tmp_path):
    assert hora("list").stdout == ""
    assert "it must be NAME=VALUE, but it is 'A'" in hora("launch", "--code", "pass", "--env", "A", check=False).stderr
    assert "hora workers launch" in hora("await", check=False).stderr
    for refused in (("-n", "0"), ("--strict", "--cpu", "1000")):
        assert hora("launch", *refused, "--code", "pass", check=False).returncode in (1, 2)
        assert hora("end").stdout == "there was no session\n"
    (worker,) = json.loads(
        hora("--json", "launch", "--code", "import time; print('up', flush=True); time.sleep(600)").stdout
    )
    try:
        assert "running" in hora("await", worker["id"], "--running").stdout
        assert worker["id"] in hora("list").stdout
        refused = hora("launch", "--strict", "--cpu", "1000", "--code", "pass", check=False)
        assert refused.returncode == 1
        assert "1000 CPU cores" in refused.stdout
        together = ("-n", "2", "--cpu", str(len(os.sched_getaffinity(0)) - 1), "--all-or-nothing", "--wait", "0.1")
        nothing = hora("launch", *together, "--code", "pass", check=False)
        assert nothing.stdout.count("CPU cores were requested") == 2
        assert nothing.stderr == ""
        settings = ("--env", "A=1", "--env", "B=x=y", "--cpu", "0.5")
        (other,) = json.loads(hora("--json", "launch", *settings, "--code", "!echo $A $B").stdout)
        hora("await", other["id"])
        assert hora("logs", other["id"]).stdout == "1 x=y\n"
        assert "no such workers: nonsense" in hora("stop", "nonsense", check=False).stderr
        assert hora("stop").stdout == "stopped 1\n"
        assert "stopped" in hora("list").stdout
    finally:
        assert hora("end").stdout == "ended\n"
    wait_until("the session has ended", lambda: hora("end").stdout == "there was no session\n")
