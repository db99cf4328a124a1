"""Parsing of mpirun command lines, taken word for word from real programs."""

from __future__ import annotations

import shlex

import pytest

from hora.cli.mpirun import parse

CLOUDERA = (
    "-np 2 -H 100.66.0.1:1,100.66.0.2:1 -bind-to none -map-by slot -mca pml ob1 -mca btl ^openib -mca plm_rsh_args "
    "'-p 2222 -o StrictHostKeyChecking=no' -mca btl_tcp_if_include eth0 python3 train.py"
)
FLYTE = (
    "--allow-run-as-root -bind-to none -map-by slot -x LD_LIBRARY_PATH -x PATH -x NCCL_DEBUG=INFO -mca pml ob1 -mca "
    "btl ^openib -np 4 python entrypoint.py --epochs 3"
)
SAGEMAKER = (
    "--host algo-1:8,algo-2:8 -np 16 --allow-run-as-root --display-map --tag-output -mca btl_tcp_if_include eth0 "
    "-mca oob_tcp_if_include eth0 -mca plm_rsh_no_tree_spawn 1 -bind-to none -map-by slot -mca pml ob1 -mca btl "
    "^openib -mca orte_abort_on_non_zero_status 1 -mca btl_vader_single_copy_mechanism none -x NCCL_MIN_NRINGS=4 "
    "python -m mpi4py s.py"
)


def test_clouderas_line():
    asked = parse(shlex.split(CLOUDERA), {})
    assert asked.placed(2) == ["100.66.0.1", "100.66.0.2"]
    assert (asked.command, asked.interface) == (("python3", "train.py"), "eth0")
    assert asked.ssh_options == "-p 2222 -o StrictHostKeyChecking=no"
    assert asked.left_out == []


def test_flytes_line_finds_its_hosts_in_the_operators_file(tmp_path):
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("job-worker-0.job.ns.svc slots=2\njob-worker-1.job.ns.svc slots=2\n")
    asked = parse(FLYTE.split(), {"OMPI_MCA_orte_default_hostfile": str(hostfile)})
    assert asked.placed(2) == ["job-worker-0.job.ns.svc"] * 2 + ["job-worker-1.job.ns.svc"] * 2
    assert asked.passed_variables == ["LD_LIBRARY_PATH", "PATH"]
    assert asked.set_variables == {"NCCL_DEBUG": "INFO"}
    assert asked.command == ("python", "entrypoint.py", "--epochs", "3")
    assert asked.left_out == []


def test_sagemakers_line():
    asked = parse(SAGEMAKER.split(), {})
    assert asked.placed(1) == ["algo-1"] * 8 + ["algo-2"] * 8
    assert (asked.tagged, asked.verbose, asked.left_out) == (True, True, [])
    assert asked.command == ("python", "-m", "mpi4py", "s.py")


def test_a_hostfile_variable_with_a_wrong_path_is_an_error():
    with pytest.raises(ValueError, match="cannot read the hostfile '/nowhere'"):
        parse(["-np", "2", "true"], {"PRTE_MCA_prte_default_hostfile": "/nowhere"})


@pytest.mark.parametrize(
    ("line", "hosts"),
    [
        ("-n 3 -hosts a,b,c x", "abc"),
        ("-np 4 --host a:2,b:2 --map-by node x", "abab"),
        ("-np 4 -H a:2,b:2 x", "aabb"),
        ("-np 3 -H a:2,b:2 x", "aab"),
        ("-H a:1,b,b x", "abb"),
        ("-np 4 -ppn 2 -H a,b,c x", "aabb"),
        ("-np 4 --map-by ppr:2:node -H a:9,b:9 x", "aabb"),
        ("-np 5 --oversubscribe -H a,b x", "aaabb"),
        ("-npernode 1 -H a:4,b:4 x", "ab"),
        ("--rank-by node -np 3 -H a:4,b:4 x", "aba"),
    ],
)
def test_placement_of_ranks(line, hosts):
    assert parse(line.split(), {}).placed(2) == list(hosts)


def test_without_hosts_the_machine_has_one_slot_per_core_or_more_on_request():
    assert parse(["x"], {}).placed(2) == ["localhost"] * 2
    assert parse(["-np", "5", "x"], {}).placed(2) == ["localhost"] * 5


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("-np 2 --gdb x", "--gdb is no option of mpirun that is known here"),
        ("-np two x", "-np must be a whole number"),
        ("-np", "-np takes 1 value, but 0 follow"),
        ("-np 1 a : -np 1 b", "several programs in one line"),
        ("-H a:x b", "-H takes hosts as a:4,b:4, but 'a:x'"),
        ("-H --oProxyCommand=x b", "-H takes hosts"),
        ("--rank-by board x", "--rank-by takes slot"),
    ],
)
def test_invalid_lines_are_explained(line, words):
    with pytest.raises(ValueError, match=words):
        parse(line.split(), {})


def test_more_processes_than_slots_are_rejected():
    with pytest.raises(ValueError, match=r"-np 3, but the hosts have 2 slots \(a:1, b:1\)"):
        parse(["-np", "3", "-H", "a,b", "x"], {}).placed(2)


def test_ignored_options_are_named():
    line = "-bind-to core --map-by ppr:2:socket --cpu-bind depth -mca btl_tcp_if_exclude lo -mca pml ucx x"
    assert parse(shlex.split(line), {}).left_out == [
        "-bind-to core", "-map-by ppr:2:socket", "--cpu-bind depth", "-mca btl_tcp_if_exclude lo",
    ]  # fmt: skip


def test_variables_in_the_syntax_of_other_mpi_versions():
    line = ["-genv", "A", "1", "-env", "B", "2", "--env", "C=3", "-genvlist", "D,E", "--mca=pml", "ob1", "x"]
    asked = parse(line, {})
    assert asked.set_variables == {"A": "1", "B": "2", "C": "3"}
    assert asked.passed_variables == ["D", "E"]
