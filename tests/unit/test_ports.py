"""HORA_PORTS: the ports at which a job may listen, and how many it needs."""

from __future__ import annotations

import contextlib
import errno
import socket

import pytest

from hora.config import allowed_ports
from hora.launch.options import Options
from hora.launch.ports import check_ports
from hora.launch.providers.join import find_place
from hora.net import sockets
from hora.platforms.detect import detect_world

ALLOWED = range(20720, 20726)
TEXT = f"{ALLOWED[0]}-{ALLOWED[-1]}"


@pytest.fixture(autouse=True)
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HORA_PORTS", TEXT)


@pytest.mark.parametrize(("text", "ports"), [("", range(0)), ("7", range(7, 8)), ("20000-20100", range(20000, 20101))])
def test_a_range_and_one_port(text: str, ports: range):
    assert allowed_ports({"HORA_PORTS": text}) == ports


@pytest.mark.parametrize("text", ["0-5", "1-65536", "9-8", "a-b", "20000-", "-5", "20000:20100", "1-2-3"])
def test_text_that_is_no_range_is_named(text: str):
    with pytest.raises(ValueError, match=f"HORA_PORTS must be ports from 1 to 65535, .* but it is '{text}'"):
        allowed_ports({"HORA_PORTS": text})
    with pytest.raises(ValueError, match=f"--ports must be ports from 1 to 65535, .* but it is '{text}'"):
        Options(command=("true",), ports=text)


def test_servers_take_the_first_free_ports_and_libraries_the_last():
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(sockets.listen(("127.0.0.1", 0))).getsockname()[1] for _ in ALLOWED[1:]]
        assert taken == list(ALLOWED[:-1])
        assert sockets.free_port("127.0.0.1") == ALLOWED[-1]


def test_taken_ports_are_named_with_the_host():
    with contextlib.ExitStack() as stack:
        for _ in ALLOWED:
            stack.enter_context(sockets.listen(("127.0.0.1", 0)))
        for listen in (lambda: sockets.listen(("127.0.0.1", 0)), lambda: sockets.free_port("127.0.0.1")):
            with pytest.raises(OSError, match=f"HORA_PORTS={TEXT} are taken on {socket.gethostname()}") as caught:
                listen()
            assert caught.value.errno == errno.EADDRINUSE


def test_a_port_that_the_caller_names_may_be_any():
    with sockets.listen(("127.0.0.1", 0)) as first:
        assert first.getsockname()[1] in ALLOWED
    with socket.create_server(("127.0.0.1", 0)) as free:
        other = free.getsockname()[1]
    with sockets.listen(("127.0.0.1", other)) as named:
        assert named.getsockname()[1] == other


def check(ranks: dict[str, int], *, agents: bool = False, page: bool = False, **env: str):
    check_ports(ranks, {"HORA_PORTS": TEXT, **env}, has_agents=agents, has_page=page)


def test_ranks_of_one_host_share_memory_and_need_no_ports():
    check({"a": 100}, page=True)
    check({}, agents=True)  # a discovery script that knows no host yet


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        ({"a": 4, "b": 2}, {"agents": True}),
        ({"a": 5}, {"HORA_TRANSPORT": "tcp"}),
        ({"a": 4}, {"HORA_NATIVE": "0", "page": True}),
    ],
)
def test_a_range_that_is_too_small_says_how_many_are_needed_for_what(ranks, options):
    with pytest.raises(
        ValueError, match=rf"needs 7 ports on a host \(1 .* {ranks['a']} for the ranks on a\), .* only 6"
    ):
        check(ranks, **options)


def test_nodes_meet_at_an_allowed_port_unless_the_user_names_one():
    def port(environ: dict[str, str], **options: object) -> int:
        return find_place(Options(command=("true",), **options), environ, "a").port

    nodes = {"num_nodes": 2, "node_rank": 0}
    step = {"SLURM_JOB_ID": "7", "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "a,b"}
    assert port({}, **nodes, meet="a") == 29500
    assert port({}, **nodes, meet="a", ports=TEXT) == ALLOWED[0]
    assert port({"MASTER_ADDR": "a", "MASTER_PORT": "5"}, **nodes, ports=TEXT) == 5
    assert port({}, **nodes, meet="a:29", ports=TEXT) == 29
    assert port(step, join=True) == 20007
    assert port(step, join=True, ports=TEXT) == ALLOWED[7 % 5]


def test_ranks_of_another_launcher_meet_at_an_allowed_port():
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}
    one_node = {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "a", "SLURM_STEP_NUM_NODES": "1"}
    found = detect_world({**step, **one_node, "HORA_PORTS": TEXT})
    assert sorted(found.rendezvous.ports) == list(ALLOWED)
