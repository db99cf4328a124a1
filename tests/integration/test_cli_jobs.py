"""`horovodrun` and `hora` from the command line: flags passed to the workers, exit statuses, and bad input."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading

import pytest
from job_process import BIN, lines_of, run_command, running

import horovod
from hora.engine.shm.native import library
from horovod.runner import _HorovodArgs
from horovod.runner.common.util import safe_shell_exec, tiny_shell_exec
from horovod.runner.launch import _run

SHOW = "import json, os, sys; print(json.dumps({n: os.environ.get(n) for n in sys.argv[1:]}))"


def test_flags_a_config_file_and_inherited_variables_reach_the_workers(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("params: {cycle_time_ms: 10, cache_capacity: 7}\ntimeline: {filename: t.json}\n")
    names = [
        "HOROVOD_CYCLE_TIME",
        "HOROVOD_CACHE_CAPACITY",
        "HOROVOD_TIMELINE",
        "HOROVOD_LOG_LEVEL",
        "HOROVOD_AUTOTUNE",
    ]
    code, out, err = run_command(
        "horovodrun", "-np", "1", "--config-file", str(config), "--cycle-time-ms", "3",
        "python", "-c", SHOW, *names,
        env={"HOROVOD_LOG_LEVEL": "debug", "HOROVOD_CACHE_CAPACITY": "1", "HOROVOD_AUTOTUNE": None},
    )  # fmt: skip
    assert code == 0, err
    assert list(json.loads(lines_of(out, 0)[0]).values()) == ["3.0", "7", "t.json", "debug", None]


def test_np_processes_are_placed_on_several_names_of_this_machine(tmp_path):
    """Names of this machine count as separate hosts but need no ssh."""
    hostfile = tmp_path / "hosts"
    hostfile.write_text("# two names\nlocalhost slots=2\n\n127.0.0.2 slots=4\n")
    names = [
        "HOROVOD_SIZE",
        "HOROVOD_LOCAL_RANK",
        "HOROVOD_LOCAL_SIZE",
        "HOROVOD_CROSS_RANK",
        "HOROVOD_HOSTNAME",
    ]
    code, out, err = run_command(
        "hora", "run", "-np", "3", "--hostfile", str(hostfile), "python", "-c", SHOW, *names,
        env={"HORA_SSH": "false"},
    )  # fmt: skip
    assert code == 0, err
    assert [list(json.loads(lines_of(out, rank)[0]).values()) for rank in range(3)] == [
        ["3", "0", "2", "0", "localhost"],
        ["3", "1", "2", "0", "localhost"],
        ["3", "0", "1", "1", "127.0.0.2"],
    ]
    assert len(out.splitlines()) == 3


def test_output_has_prefixes_times_and_files(tmp_path):
    code, out, err = run_command(
        "horovodrun", "-np", "2", "-prefix-timestamp", "--output-filename", str(tmp_path / "logs"),
        "sh", "-c", "echo to out; echo to err >&2; printf end",
    )  # fmt: skip
    assert code == 0
    day = r"[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4}"
    assert len(re.findall(rf"^{day}\[[01]\]<stdout>:(?:to out|end)$", out, re.MULTILINE)) == 4
    assert len(re.findall(rf"^{day}\[[01]\]<stderr>:to err$", err, re.MULTILINE)) == 2
    for rank in (0, 1):
        assert "to out" in (tmp_path / "logs" / f"rank.{rank}" / "stdout").read_text()
        assert "to err" in (tmp_path / "logs" / f"rank.{rank}" / "stderr").read_text()


def test_each_command_reports_a_failure_in_its_own_format():
    """Rank 1 fails at once, although rank 0 would sleep longer than the test's limit."""
    job = ["-np", "2", "sh", "-c", "if [ $HOROVOD_RANK = 1 ]; then echo oh no >&2; exit 7; fi; sleep 600"]
    for command, status in ((["horovodrun"], 1), (["hora", "run"], 7)):
        code, _, err = run_command(*command, *job)
        assert code == status
        assert "Traceback" not in err
        if command == ["horovodrun"]:
            assert "Process name: 1\nExit code: 7\n" in err
            assert "oh no" in err.partition("Exit code: 7")[2]
        else:
            assert err.endswith("hora run: process 1 on host localhost failed with exit code 7. Its last line: oh no\n")


TRAIN = """
import torch
import horovod.torch as hvd
hvd.init()
model = torch.nn.Linear(64, 128)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
while True:
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
"""


FAILS = """
import torch
import horovod.torch as hvd
hvd.init()
hvd.allreduce(torch.ones(4), name="together")
if hvd.rank() == 1:
    raise FileNotFoundError("part-1.bin is missing")
hvd.allreduce(torch.ones(4), name="alone")
"""


def test_the_root_cause_is_shown_once_in_full_and_other_ranks_show_only_their_own_lines(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(FAILS)
    code, _, err = run_command("hora", "run", "-np", "2", "python", str(script))
    assert code == 1
    assert err.count("Traceback") == 2  # one per rank
    assert err.count('raise FileNotFoundError("part-1.bin is missing")') == 1
    assert err.index("[1]<stderr>:Traceback") < err.index("hora run: process 1 on host localhost failed")
    assert err.rstrip().endswith("failed with exit code 1. Its last line: FileNotFoundError: part-1.bin is missing")
    assert '[0]<stderr>:    hvd.allreduce(torch.ones(4), name="alone")' in err
    assert "hora/engine" not in err


SAME = """
import torch
import horovod.torch as hvd
hvd.init()
hvd.barrier()
hvd.allreduce(torch.ones(4), op="sum")
"""


def test_equal_tracebacks_of_all_ranks_are_shown_once_without_frames_of_hora(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SAME)
    code, _, err = run_command("hora", "run", "-np", "3", "python", str(script))
    assert code == 1
    assert err.count("Traceback") == 1
    assert err.count('hvd.allreduce(torch.ones(4), op="sum")') == 1
    assert "torch/ops.py" not in err
    whole = run_command("hora", "run", "-np", "3", "--full-traceback", "python", str(script))[2]
    assert "torch/ops.py" in whole
    assert "as on another rank" not in whole


def test_a_plan_of_one_host_is_rejected_before_it_starts():
    code, out, err = run_command("hora", "plan", "-np", "2", "false")
    assert (code, out) == (2, "")
    assert err.startswith("hora plan: error: there is nothing to plan: all ranks are on one host (localhost)")
    assert err.count("\n") == 1


def test_a_plan_ends_with_its_table(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    code, out, err = run_command("hora", "plan", "-np", "2", "python", str(script), env={"HORA_TRANSPORT": "tcp"})
    assert code == 0, err
    for name in ("plain", "int8", "PowerSGD 4", "DiLoCo 200"):
        assert re.search(rf"{name} +[0-9]+ ms +[0-9]+ % .*hvd\.", out), out


def test_death_by_signal_is_128_plus_its_number():
    code, _, err = run_command("hora", "run", "-np", "1", "sh", "-c", "kill -9 $$")
    assert code == 128 + signal.SIGKILL
    assert "failed with exit code 137 (killed by SIGKILL" in err


def test_old_entry_point_runs_a_filled_object_and_raises_runtime_error(tmp_path):
    args = _HorovodArgs()
    args.num_proc, args.hosts, args.use_gloo = 2, "localhost:2", True
    args.command = ["sh", "-c", f"touch {tmp_path}/$HOROVOD_RANK"]
    _run(args)
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]
    args.command = ["sh", "-c", "exit 3"]
    with pytest.raises(
        RuntimeError, match=r"^Horovod detected that one or more processes exited with non-zero"
    ) as caught:
        _run(args)
    assert "Exit code: 3" in str(caught.value)


def test_old_entry_point_calls_a_function_on_every_rank():
    args = _HorovodArgs()
    args.num_proc, args.run_func = 2, lambda: int(os.environ["HOROVOD_RANK"])
    assert _run(args) == [0, 1]


def test_a_shell_command_under_its_old_names(tmp_path):
    out, stop = io.StringIO(), threading.Event()
    assert safe_shell_exec.execute("echo a; echo b; exit 3", stdout=out, index=7) == 3
    assert out.getvalue() == "[7]<stdout>:a\n[7]<stdout>:b\n"
    threading.Timer(0.1, stop.set).start()
    assert safe_shell_exec.execute("sleep 600", events=[stop]) == 128 + signal.SIGTERM
    assert tiny_shell_exec.execute("echo $A; echo err >&2; exit 2", env={"A": "1"}) == ("1\nerr\n", 2)


def test_a_function_on_hosts_given_to_run(monkeypatch):
    monkeypatch.setenv("HORA_SSH", "false")
    hosts = horovod.run(lambda: os.environ["HOROVOD_HOSTNAME"], num_proc=2, hosts="localhost:1,127.0.0.1:1")
    assert hosts == ["localhost", "127.0.0.1"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_the_job_with_their_status_and_without_a_traceback(tmp_path, number):
    ready = tmp_path / "ready"
    ready.mkdir()
    with running(
        "horovodrun", "-np", "2", "sh", "-c", f"touch {ready}/$HOROVOD_RANK; sleep 300; true",
        ready=ready, count=2,
    ) as job:  # fmt: skip
        job.process.send_signal(number)
        code, _, err = job.finish()
    assert code == 128 + number
    assert "Traceback" not in err


def test_check_build_prints_the_available_features():
    code, out, err = run_command("horovodrun", "--check-build", env={"HOROVOD_RANK": "5", "HOROVOD_SIZE": "9"})
    assert (code, err) == (0, "")
    first, *sections = out.rstrip("\n").split("\n\n")
    assert first.startswith(f"Horovod v{horovod.__version__} (Hora ")
    assert [section.splitlines()[0] for section in sections] == [
        "Available Frameworks:", "Available Controllers:", "Available Tensor Operations:"
    ]  # fmt: skip
    assert all(re.fullmatch(r" +\[[ X]\] \w+", line) for section in sections for line in section.splitlines()[1:])
    assert "[X] PyTorch" in sections[0]
    assert "[X] Gloo" in sections[1]
    assert "[ ] MPI" in sections[1]


def test_check_build_does_not_tick_a_broken_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('broken on purpose')")
    code, out, _ = run_command("horovodrun", "-cb", env={"PYTHONPATH": str(tmp_path)})
    assert code == 0
    assert "[ ] PyTorch" in out
    assert "[ ] Gloo" in out


@pytest.mark.parametrize(("native", "words"), [("0", "sockets instead of shared memory"), ("1", "share memory")])
def test_the_doctor_says_what_the_native_part_is_used_for(native, words):
    if native == "1" and library() is None:
        pytest.skip("no native part")
    code, out, _ = run_command("hora", "doctor", env={"HORA_NATIVE": native})
    assert code == 0
    assert any(words in line for line in out.splitlines()), out


def test_light_commands_import_neither_torch_nor_pyspark():
    script = (
        "import sys, hora.cli\nhora.cli.main(['--help'])\n"
        "try: hora.cli.main(['run', '--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'pyspark', 'numpy', 'cloudpickle', 'yaml'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["-np", "2"], "there is no command to run"),
        (["python", "x.py"], "-np is missing"),
        (["-np", "two", "python"], "invalid int value: 'two'"),
        (["-np", "-1", "true"], "-np must be at least 1, but it is -1"),
        (["-np", "2", "--fusion-threshold-mb", "-5", "true"], "--fusion-threshold-mb must be at least 0"),
        (["-np", "2", "--frobnicate", "true"], "unrecognized arguments: --frobnicate"),
        (["-np", "2", "-H", "nohost", "true"], "Invalid host input: 'nohost'"),
        (["-np", "3", "-H", "localhost:2", "true"], "Requested more processes (3)"),
        (["-np", "2", "-hostfile", "/nowhere", "true"], "cannot read the hostfile '/nowhere'"),
        (["-np", "2", "--config-file", "/nowhere", "true"], "cannot read the config file '/nowhere'"),
        (["-np", "2", "--mpi", "true"], "MPI support has not been built"),
        (["-np", "1", "-H", "192.0.2.1:1", "-i", "/nokey", "true"], "there is no file '/nokey'"),
        (["-np", "1", "--network-interface", "nic9", "true"], "none of the network interfaces nic9"),
        (["-np", "2", "--min-np", "1", "-H", "localhost:2", "true"], "fewer than 2 hosts"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_prints_one_or_two_lines_and_exits_with_2(argv, words):
    done = subprocess.run(
        [BIN / "horovodrun", *argv], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) <= 2
    assert done.stdout == ""


def test_an_unresolvable_host_is_reported_with_the_message_of_ssh():
    """Covers run and doctor. The name is too long for any name server."""
    nowhere = "x" * 70
    for command in (["horovodrun", "-np", "1"], ["hora", "doctor"]):
        argv = [*command, "-H", f"{nowhere}:1", *(["true"] if "-np" in command else [])]
        code, out, err = run_command(*argv, env={"HORA_SSH": "sh -c 'echo never heard of it >&2; exit 255'"})
        assert code == 1
        assert nowhere in out + err
        assert "never heard of it" in out + err
        assert "Traceback" not in err


def test_a_deleted_working_directory_is_reported(tmp_path):
    leave = ("sh", "-c", 'mkdir gone; cd gone; rmdir ../gone; exec "$0" "$@"')
    code, _, err = run_command("horovodrun", "-np", "1", "true", prefix=leave, cwd=tmp_path)
    assert (code, err.startswith("horovodrun: error: the directory you are in does not exist any more")) == (2, True)


def test_output_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = run_command("horovodrun", "-np", "1", "--output-filename", str(tmp_path / "file"), "true")
    assert code == 1
    assert re.fullmatch(rf"horovodrun: cannot write {tmp_path}/file/.* \(--output-filename\): .*\n", err)


def test_a_program_that_cannot_be_executed_is_explained(tmp_path):
    (tmp_path / "train.py").write_text("")
    (tmp_path / "job.sh").write_text("")
    runnable = tmp_path / "odd.sh"
    runnable.write_text("#!/no/such/shell\n")
    runnable.chmod(0o755)
    for program, advice in {
        "train.py": "put its interpreter in front: python train.py",
        "job.sh": "the file in this directory is called ./job.sh",
        "./job.sh": "make it executable (chmod +x ./job.sh)",
        "./odd.sh": "does its first line name an interpreter that is there",
        "missing.py": "No such file or directory)\n",
    }.items():
        code, _, err = run_command("hora", "run", "-np", "1", program, cwd=tmp_path)
        assert code == 127
        assert f"cannot run {program!r}: " in err
        assert advice in err


OTHER_KINDS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("sharded", "elastic")]


@pytest.mark.parametrize("kind", ["plain", "elastic sharded", *OTHER_KINDS])
def test_the_script_of_hora_init_trains_unmodified(kind, tmp_path):
    script = tmp_path / "train.py"
    flags = [] if kind == "plain" else [f"--{word}" for word in kind.split()]
    code, out, err = run_command("hora", "init", str(script), *flags)
    assert code == 0, err
    command = re.search(r"run it: (.*)", out)[1].split()
    if "elastic" in kind:  # an elastic script must survive this
        death = "    if state.epoch == 1 and hvd.rank() == 1:\n                    __import__('os')._exit(1)\n"
        script.write_text(
            script.read_text().replace("optimizer.zero_grad()\n", f"optimizer.zero_grad()\n            {death}")
        )
    code, out, err = run_command(*command, cwd=tmp_path)
    assert code == 0, err
    epochs = re.findall(r"epoch (\d): loss ([\d.]+) on (\d) ranks", out)
    assert [epoch for epoch, _, _ in epochs] == list("01234")
    assert float(epochs[-1][1]) < float(epochs[0][1])
    assert epochs[-1][2] == ("1" if "elastic" in kind else "2")
    assert (tmp_path / "model.pt").exists()


OWN = """
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs = torch.randn(256, 8)
dataset = TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())
loader = DataLoader(dataset, batch_size=16, shuffle=True)
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
num_steps = 0
for epoch in range(3):
    for rows, labels in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(rows), labels)
        num_steps += 1
        loss.backward()
        optimizer.step()
    scheduler.step()
torch.save(model.state_dict(), "model.pt")
print("steps", num_steps, "of", model.weight.shape)
"""


def test_ones_own_script_made_elastic_loses_no_step_to_a_death(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    script = tmp_path / "elastic.py"
    code, _, err = run_command("hora", "init", "--from", str(tmp_path / "mine.py"), "--elastic", str(script))
    assert code == 0, err
    death = "num_steps += 1\n        __import__('os')._exit(9) if num_steps == 5 and dist.get_rank() == 1 else None\n"
    script.write_text(script.read_text().replace("num_steps += 1\n", death))
    code, out, err = run_command("hora", "run", "-np", "2", "--min-np", "1", "python", str(script), cwd=tmp_path)
    assert code == 0, err
    # Of the first epoch the rank has its half, then all rows.
    assert re.findall(r"steps (\d+) of torch.Size\(\[2, 8\]\)", out) == ["40"]
    assert (tmp_path / "model.pt").exists()


def test_hora_init_overwrites_nothing(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("mine")
    code, _, err = run_command("hora", "init", str(script))
    assert (code, script.read_text()) == (2, "mine")
    assert "is not overwritten" in err


BASH = """
eval "$(hora completion bash)"
COMP_WORDS=(hora ru); COMP_CWORD=1; _hora; echo "command: ${COMPREPLY[*]}"
COMP_WORDS=(hora run --dash); COMP_CWORD=2; _hora; echo "option: ${COMPREPLY[*]}"
COMP_WORDS=(horovodrun --min); COMP_CWORD=1; _hora; echo "horovodrun: ${COMPREPLY[*]}"
COMP_WORDS=(hora run -np 2 tr); COMP_CWORD=4; _hora; echo "a program: ${COMPREPLY[*]}"
COMP_WORDS=(hora demo pen); COMP_CWORD=2; _hora; echo "lab: ${COMPREPLY[*]}"
"""


def _in_shell(*argv: str) -> str:
    env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_program_that_cannot_go_on_in_an_elastic_job_says_what_to_change(tmp_path):
    program = tmp_path / "plain.py"
    program.write_text(
        "import os, signal, torch, horovod.torch as hvd\n"
        "hvd.init()\n"
        "hvd.allreduce(torch.ones(1))\n"
        "if hvd.rank() == 1:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "while True:\n"
        "    hvd.allreduce(torch.ones(1))\n"
    )
    done = subprocess.run(
        [BIN / "hora", "run", "-np", "2", "--min-np", "1", sys.executable, str(program)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "the program does not: call its training function through @hvd.elastic.run" in done.stderr


def test_completion_in_bash():
    out = _in_shell("bash", "-c", BASH)
    assert out.splitlines() == [
        "command: run",
        "option: --dashboard --dashboard-address",
        "horovodrun: --min-np --min-num-proc",
        "a program: ",
        "lab: penguins",
    ]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh: apt-get install zsh")
def test_completion_in_zsh():
    _in_shell("zsh", "-fc", 'autoload -Uz compinit && compinit -D && eval "$(hora completion zsh)"')


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish: apt-get install fish")
def test_completion_in_fish():
    job = 'hora completion fish | source; complete -C "hora run --dash"'
    out = _in_shell("fish", "--no-config", "-c", job)
    assert [line.split("\t")[0] for line in out.splitlines()] == ["--dashboard", "--dashboard-address"]
