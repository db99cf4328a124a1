"""The commands' texts and the steps from options to a job; nothing is started."""

import shlex
import sys

import pytest

import horovod
from hora.cli import dispatch, doctor, run
from hora.launch import start
from hora.launch.options import Options, all_options
from hora.launch.processes import module_command
from hora.launch.providers.ssh import Ssh
from hora.legacy import check_build
from hora.legacy.env import get_env_rank_and_size
from hora.net import sockets
from hora.version import horovod_version
from horovod.runner import _HorovodArgs
from horovod.runner import launch as old_launch
from horovod.runner.common.util import env as old_env
from horovod.runner.common.util import hosts as old_hosts


def test_help_names_every_command(capsys):
    assert dispatch.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert dispatch.main(["--help-all"]) == 0
    assert capsys.readouterr().out == text  # --help-all shows more only for a single command
    assert all(f"\n  {name} " in text for name in dispatch.COMMANDS)


def test_every_command_can_be_imported():
    for command in dispatch.COMMANDS.values():
        module, _, function = command.target.partition(":")
        assert callable(getattr(__import__(module, fromlist=[function]), function))


def test_every_command_has_its_own_help(capsys):
    for name, command in dispatch.COMMANDS.items():
        if command.parser:
            parser = command.make_parser()
            assert parser is not None
            assert parser.prog == f"hora {name}"
            assert parser.description
    descriptions = {command.make_parser().description for command in dispatch.COMMANDS.values() if command.parser}
    assert len(descriptions) == sum(bool(command.parser) for command in dispatch.COMMANDS.values())
    assert dispatch.main(["--help"]) == 0
    assert capsys.readouterr().out.count("\n  hora ") == 3  # examples


def test_completion_covers_every_command_lab_and_visible_flag(capsys):
    for shell in ("bash", "zsh", "fish"):
        assert dispatch.main(["completion", shell]) == 0
        text = capsys.readouterr().out
        for word in (*dispatch.COMMANDS, *dispatch.LABS, "manifest"):
            assert word in text, (shell, word)
        for flag in ("min-np", "fusion-threshold-mb", "any-leader", "help-all"):
            assert flag in text, (shell, flag)
        assert "log-hide-timestamp" not in text


def test_an_unknown_command_suggests_the_nearest(capsys):
    assert dispatch.main(["docter"]) == 2
    assert "did you mean doctor?" in capsys.readouterr().err
    assert dispatch.main(["xyzzy"]) == 2
    assert "the commands are run, " in capsys.readouterr().err


def test_version_of_both_names(capsys):
    assert dispatch.main(["--version"]) == 0
    own = capsys.readouterr().out.split()[1]
    assert horovod.__version__ == "0.28.1"  # exactly, because packages compare it
    assert horovod_version() == f"0.28.1 (Hora {own})"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = horovod.nothing


def test_old_import_paths_lead_to_our_code():
    assert old_launch.run_commandline is run.horovodrun
    assert old_launch._run is run.run
    assert old_env.get_env_rank_and_size is get_env_rank_and_size
    assert [host.hostname for host in old_hosts.parse_hosts("a:1,b:2")] == ["a", "b"]


def test_horovod_args_has_every_dest():
    args = _HorovodArgs()
    assert {name for name in all_options() if getattr(args, name) is not None} == {"num_proc"}
    assert (args.num_proc, args.run_func, args.executable, args.nic, args.check_build) == (1, None, None, None, None)
    args.num_proc, args.command = 3, ["true"]
    assert Options.from_args(args, {}).num_proc == 3


def test_parse_args_reads_the_process_own_command_line(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["horovodrun", "-np", "2", "--fusion-threshold-mb", "10"])
    args = old_launch.parse_args()
    assert (args.num_proc, args.fusion_threshold_mb, args.command) == (2, 10, [])


def test_rank_and_size_from_three_launchers():
    assert get_env_rank_and_size({}) == (0, 1)
    assert get_env_rank_and_size({"PMI_RANK": "1", "PMI_SIZE": "2"}) == (1, 2)
    both = {
        "HOROVOD_RANK": "3",
        "HOROVOD_SIZE": "4",
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
    }
    assert get_env_rank_and_size(both) == (3, 4)
    with pytest.raises(RuntimeError, match="OMPI_COMM_WORLD_SIZE is set but OMPI_COMM_WORLD_RANK is not"):
        get_env_rank_and_size({"OMPI_COMM_WORLD_SIZE": "2"})


def test_check_build_ticks_available_parts():
    text = check_build.format_build("9.9", {"TensorFlow": "no", "MXNet": "no", "MPI": "no", "DDL": "no", "CCL": "no"})
    assert text == (
        "Horovod v9.9:\n\nAvailable Frameworks:\n    [ ] TensorFlow\n    [X] PyTorch\n    [ ] MXNet\n\n"
        "Available Controllers:\n    [ ] MPI\n    [X] Gloo\n\n"
        "Available Tensor Operations:\n    [X] NCCL\n    [ ] DDL\n    [ ] CCL\n    [ ] MPI\n    [X] Gloo"
    )


def job(environ=None, **values):
    options = Options(command=("python",), **values)
    return start.make_job(options, environ or {}, None, start.find_hosts(options, environ or {}))


def test_a_job_has_exactly_np_ranks_on_the_hosts_in_order():
    slots = job(num_proc=3, hosts="localhost:2,127.0.0.1:2").slots
    assert [(slot.hostname, slot.local_rank, slot.local_size) for slot in slots] == [
        ("localhost", 0, 2),
        ("localhost", 1, 2),
        ("127.0.0.1", 0, 1),
    ]
    assert [slot.hostname for slot in job(num_proc=2).slots] == ["localhost"] * 2


def test_hosts_from_a_file_and_from_an_lsf_job(tmp_path):
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    assert len(job(num_proc=2, hostfile=str(tmp_path / "hosts")).slots) == 2
    lsf = {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "hostA 2 hostB 1"}
    assert [slot.hostname for slot in job(lsf).slots] == ["hostA", "hostA", "hostB"]
    jsrun = {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "login 1 hostA 1 hostB 1", "CSM_ALLOCATION_ID": "3"}
    for environ in (jsrun, {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "login 1 hostA 2"}):
        assert job(environ).slots[0].hostname == "hostA"  # the first host only launches
    with pytest.raises(ValueError, match="more processes"):
        job(num_proc=3, hosts="localhost:2")


def test_a_jobs_environment_is_the_callers_plus_the_options():
    env = job({"HOROVOD_CYCLE_TIME": "5", "HOROVOD_CACHE_CAPACITY": "5", "X": "y"}, num_proc=1, cycle_time_ms=2.0).env
    assert env["HOROVOD_CYCLE_TIME"] == "2.0"
    assert (env["HOROVOD_CACHE_CAPACITY"], env["X"], env["PYTHONUNBUFFERED"]) == ("5", "y", "1")
    assert (env["HOROVOD_GLOO_IFACE"], env["NCCL_SOCKET_IFNAME"]) == ("lo", "lo")
    elsewhere = job(num_proc=2, hosts="localhost:1,192.0.2.1:1").env
    assert "HOROVOD_GLOO_IFACE" not in elsewhere


def test_invalid_requests_raise_value_errors(tmp_path):
    with pytest.raises(ValueError, match="there is no command to run"):
        start.start(Options(num_proc=2), {})
    with pytest.raises(ValueError, match=r"fewer than 2 hosts.*localhost:2"):
        start.start(Options(command=("true",), num_proc=2, min_num_proc=1, hosts="localhost:2"), {})
    with pytest.raises(ValueError, match="--ssh-identity-file: there is no file"):
        Ssh.from_environ({}, identity_file=str(tmp_path / "key"))


def test_a_broken_pipe_is_not_reported_as_a_missing_program(capsys, monkeypatch):
    """`hora doctor | head` must not ask the user to install something."""

    def nobody_reads(names, ssh):
        raise BrokenPipeError

    monkeypatch.setattr(doctor, "_examine", nobody_reads)
    with pytest.raises(BrokenPipeError):  # `hora` itself exits quietly then
        doctor.main([])
    assert capsys.readouterr().err == ""


def test_the_doctor_explains_invalid_input(capsys, monkeypatch):
    monkeypatch.setenv("HORA_SSH", "ssh '-J gate")
    assert dispatch.main(["doctor", "-H", "192.0.2.1"]) == 2
    assert "HORA_SSH is not a command line: No closing quotation, in ssh '-J gate" in capsys.readouterr().err
    monkeypatch.delenv("HORA_SSH")
    for argv, words in (
        (["-H", "a b"], "Invalid host input: 'a b:1'"),
        (["-hostfile", "/nowhere"], "cannot read the hostfile"),
        (["-H", "192.0.2.1", "-p", "0"], "--ssh-port must lie in 1..65535, but it is 0"),
        (["-H", "192.0.2.1", "-i", "/nokey"], "there is no file '/nokey'"),
    ):
        assert dispatch.main(["doctor", *argv]) == 2
        assert words in capsys.readouterr().err


def test_own_addresses_are_local_and_others_are_not():
    assert sockets.is_local("localhost")
    assert sockets.is_local("127.0.0.2")
    assert not sockets.is_local("192.0.2.1")  # reserved for documentation
    assert sockets.source_address("127.0.0.9").startswith("127.")
    assert sockets.interface_address({"lo"}) == "127.0.0.1"
    with pytest.raises(ValueError, match=r"none of the network interfaces nic7, nic8 .* it has .*lo"):
        sockets.interface_address({"nic8", "nic7"})


def test_ssh_receives_options_host_port_key_and_one_quoted_command():
    argv = Ssh(port=2222, identity_file="/k", executable="/my env/python", python_path="/a b").python("h", "m", "x;y")
    assert argv[0] == "ssh"
    assert argv[1:5] == ["-o", "PasswordAuthentication=no", "-o", "StrictHostKeyChecking=accept-new"]
    assert argv[argv.index("h") :] == [
        *("h", "-p", "2222", "-i", "/k"),
        shlex.join(["exec", "env", "PYTHONPATH=/a b", *module_command("/my env/python", "m", "x;y")]),
    ]


FACTS = {
    "python": "3.11.7", "free_threaded": False, "executable": "/p",
    "hora": "0.1", "torch": "2.13.0+cpu",
    "pyspark": "4.0", "mpi4py": None, "foreign_horovod": None, "other_hora": None, "cores": 2, "memfd": None,
    "memory_bytes": 8 << 30, "shm_bytes": 8 << 30, "tmp_bytes": 8 << 30, "open_files": 65536, "gpus": [],
    "java": "openjdk 17", "build": {}, "clock_ahead_s": 0.2,
}  # fmt: skip


def problems(**changes):
    return [f for f in doctor.host_findings(FACTS | changes) if f.level == "problem"]


def test_a_healthy_host_has_no_problem():
    assert problems() == []


@pytest.mark.parametrize(
    ("changes", "text", "advice"),
    [
        ({"free_threaded": True}, "without its global interpreter lock", "PYTHON_GIL=1"),
        ({"torch": None}, "PyTorch is not installed", "pip install torch"),
        ({"torch": "1.13.1"}, "1.13.1 is older than 2.3", "pip install"),
        ({"build": {"PyTorch": "ImportError: x"}}, "an allreduce failed: ImportError: x", "hora.legacy.check_build"),
        (
            {"foreign_horovod": ["horovod 0.28.1 is installed beside Hora", "run `pip uninstall -y horovod`"]},
            "horovod 0.28.1 is installed beside",
            "pip uninstall -y horovod",
        ),
        (
            {"other_hora": "0.1.0"},
            "the distribution hora 0.1.0 is installed beside hora-train",
            "pip uninstall -y hora,",
        ),
        ({"memfd": "No space left"}, "does not work: No space left", "memory limit"),
        ({"memory_bytes": 1 << 20}, "shared memory works", "less than 1 GiB"),
        ({"open_files": 64}, "only 64 files", "ulimit -n"),
        ({"gpus": ["H200"], "build": {"NCCL": "no kernel"}}, "NCCL does not work: no kernel", "CUDA version"),
        ({"tmp_bytes": 1 << 20}, "/tmp has only 1 MiB left", "TMPDIR"),
        ({"pyspark": "3.3.2"}, "3.3.2 is older than 3.4", "pip install 'pyspark>=3.4'"),
        ({"java": None}, "Java was not found", "JAVA_HOME"),
    ],
)
def test_each_problem_has_an_explanation_and_advice(changes, text, advice):
    [found] = problems(**changes)
    assert text in found.text
    assert advice in found.advice


def test_a_small_dev_shm_is_only_a_note():
    assert problems(shm_bytes=64 << 20) == problems(shm_bytes=None) == []
    texts = [f.text for f in doctor.host_findings(FACTS | {"shm_bytes": 64 << 20}) if f.level == "note"]
    assert texts[0].startswith("/dev/shm has only 64 MiB left: Hora does not use it")


def test_mpi4py_is_noted_with_the_launcher_it_needs():
    [note] = [f.text for f in doctor.host_findings(FACTS | {"mpi4py": "4.1.2"}) if "mpi4py" in f.text]
    assert "one host" in note
    assert "mpirun -np N" in note
    assert problems(mpi4py="4.1.2") == []


def test_versions_must_agree_between_hosts():
    assert [f.level for f in doctor.agreement({"a": FACTS, "b": FACTS})] == ["ok"]
    other = FACTS | {"python": "3.12.1", "torch": "2.9.0+cu128"}
    python, torch = doctor.agreement({"a": FACTS, "b": other})
    assert "3.11.7 on a, 3.12.1 on b" in python.text
    assert "2.13.0+cpu on a, 2.9.0+cu128 on b" in torch.text
    assert torch.advice.endswith("pip install torch==2.13.0+cpu")
    assert [f.level for f in doctor.agreement({"a": FACTS, "b": FACTS | {"python": "3.11.9"}})] == ["ok"]


def test_a_clock_that_is_far_off_is_a_note():
    ok, note = doctor.agreement({"a": FACTS, "b": FACTS | {"clock_ahead_s": -95.3}})
    assert (ok.level, note.level) == ("ok", "note")
    assert "the clock of b differs from ours by -95 s" in note.text


def test_unreachable_ports_are_named_with_both_ends():
    assert doctor.reach_findings({"a": {"b": None}, "b": {"a": None}})[0].level == "ok"
    [found] = doctor.reach_findings({"a": {"b": "No route to host"}, "b": {"a": None}})
    assert isinstance(found, doctor.Finding)
    assert "a cannot connect to a port of b: No route to host" in found.text
    assert "firewall of b" in found.advice


def test_top_without_rich_asks_for_it(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.delitem(sys.modules, "hora.watch.terminal", raising=False)
    assert dispatch.main(["top", "--url", "http://127.0.0.1:1/#token=x"]) == 0
    assert dispatch.main(["top", "http://127.0.0.1:1/#token=x"]) == 1
    assert "hora top: it draws with rich: pip install rich" in capsys.readouterr().err
