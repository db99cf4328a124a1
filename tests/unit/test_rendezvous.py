"""The rendezvous of a foreign launcher's ranks: at one address, with the user's secret or with a warning."""

from __future__ import annotations

import contextlib
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from torch.distributed import TCPStore

from hora.engine import rendezvous
from hora.errors import HorovodInternalError
from hora.net.keys import RankKeys
from hora.world import RendezvousEndpoint, World
from waiting import wait_until

LIMIT_S = 60.0


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def a_file(folder: Path, name: str) -> str:
    path = folder / name
    path.write_text(name * 32)
    path.chmod(0o600)
    return str(path)


@pytest.fixture
def world(port: int, tmp_path: Path) -> World:
    point = RendezvousEndpoint(kind="tcp", address="localhost", port=port, job="job", host_store=True)
    return World(
        size=2, local_size=2, launcher="openmpi", rendezvous=replace(point, secret_file=a_file(tmp_path, "mine"))
    )


def meet(first: World, second: World, *, limit_s: float = LIMIT_S) -> list[rendezvous.RendezvousClient]:
    """Connect both ranks, the second one first."""
    with ThreadPoolExecutor(2) as pool:
        ranks = [replace(second, rank=1, local_rank=1), first]
        waiting = [pool.submit(rendezvous.meet_at_rank_0, rank, limit_s) for rank in ranks]
        return [found.result() for found in reversed(waiting)]


def keys_of(meetings: list[rendezvous.RendezvousClient], epoch: str) -> list[RankKeys]:
    found = [one.keys(World(rank=rank, size=9), epoch, limit_s=LIMIT_S) for rank, one in enumerate(meetings)]
    return [keys for keys in found if keys is not None]


@pytest.fixture(autouse=True)
def _no_table_is_left():
    yield
    for point in list(rendezvous.stores):
        rendezvous.close_store(point)


def listening(port: int) -> set[str]:
    return {
        c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN" and c.laddr.port == port
    }


def test_ranks_with_the_same_file_meet_and_derive_the_same_secrets(world: World, port: int):
    both = meet(world, world)
    assert listening(port) == {"127.0.0.1"}
    with ThreadPoolExecutor(2) as pool:
        said = [
            pool.submit(one.gather, "key", "", b"%d" % rank, rank=rank, size=2, limit_s=LIMIT_S)
            for rank, one in enumerate(both)
        ]
        assert [found.result().members for found in said] == [{0: b"0", 1: b"1"}] * 2
    first, second = keys_of(both, "0.0")
    assert first.shared == second.shared != keys_of(both, "0.1")[0].shared
    assert second.towards(0) == first.of(1)
    rendezvous.close_store(world.rendezvous)
    again = meet(world, world)
    assert keys_of(again, "0.0")[0].shared != first.shared, "one file, another job"


@pytest.mark.parametrize("secret", [True, False])
def test_the_loss_of_rank_0_is_an_error_on_the_others(world: World, secret: bool):
    if not secret:
        world = replace(world, rendezvous=replace(world.rendezvous, secret_file=""))
    _, second = meet(world, world)
    rendezvous.close_store(world.rendezvous)
    with pytest.raises(HorovodInternalError, match="rank 0, which hosts the rendezvous, is gone"):
        second.gather("key", "", b"1", rank=1, size=2, limit_s=LIMIT_S)


def test_a_rank_with_another_secret_gets_an_error(world: World, tmp_path: Path):
    other = replace(world, rendezvous=replace(world.rendezvous, secret_file=a_file(tmp_path, "other")))
    with pytest.raises(HorovodInternalError, match="same HORA_SECRET_FILE"):
        meet(world, other)


def test_a_missing_rank_0_is_named_with_the_variables(world: World):
    with pytest.raises(HorovodInternalError, match=r"cannot reach rank 0 at localhost:\d+ \(MASTER_ADDR, MASTER_PORT"):
        rendezvous.meet_at_rank_0(replace(world, rank=1, local_rank=1), 0.3)


def test_without_a_secret_rank_0_warns_once_and_listens_only_at_the_rendezvous_address(
    world: World, port: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(rendezvous, "_open", {})
    open_one = replace(world, rendezvous=replace(world.rendezvous, secret_file=""))
    place = rendezvous.open_rendezvous(open_one, limit_s=LIMIT_S)
    assert listening(port) == {"127.0.0.1"}
    assert rendezvous.open_rendezvous(open_one, limit_s=LIMIT_S) is place
    assert place.keys(open_one, "0.0", limit_s=LIMIT_S).shared
    assert caplog.text.count("Set HORA_SECRET_FILE") == 1
    monkeypatch.setattr(rendezvous, "_open", {})
    rendezvous.open_rendezvous(replace(open_one, rank=1, local_rank=1), limit_s=LIMIT_S)
    assert caplog.text.count("Set HORA_SECRET_FILE") == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_strict_mode_rejects_a_rendezvous_without_a_secret(world: World, rank: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HORA_STRICT", "1")
    open_one = replace(world, rank=rank, local_rank=rank, rendezvous=replace(world.rendezvous, secret_file=""))
    with pytest.raises(ValueError, match=r"HORA_STRICT=1.*HORA_SECRET_FILE"):
        rendezvous.open_rendezvous(open_one, limit_s=LIMIT_S)


@pytest.mark.parametrize("occupant", ["a mute stranger", "another world"])
def test_a_port_that_nobody_chose_may_be_taken(world: World, occupant: str):
    """Both ranks go on to the next one; the second comes first and finds only the occupant."""
    with contextlib.ExitStack() as stack:
        if occupant == "another world":
            meet(world, world)
            taken = world.rendezvous.port
        else:
            taken = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
        with socket.create_server(("127.0.0.1", 0)) as free:
            more = (int(free.getsockname()[1]),)
        point = replace(world.rendezvous, port=taken, more_ports=more, job="ours")
        met = meet(replace(world, rendezvous=point), replace(world, rendezvous=point))
        met[0].client.set("key", b"ours")
        assert met[1].client.get("key", timeout_s=LIMIT_S) == b"ours"


def meets_as_another_process(monkeypatch: pytest.MonkeyPatch, rank: World, limit_s: float):
    monkeypatch.setattr(rendezvous, "_OURS", rendezvous._OURS + 1)
    return rendezvous.meet_at_rank_0(rank, limit_s)


def test_a_rank_without_its_own_rank_0_joins_nobody(world: World, port: int, monkeypatch: pytest.MonkeyPatch):
    meet(world, world)
    late = replace(world, rank=1, local_rank=1)
    with pytest.raises(HorovodInternalError, match=f"{port}.*has its rank 1 already"):
        meets_as_another_process(monkeypatch, late, 1.0)  # of the next program of the same step
    step = replace(world.rendezvous, job="another step")
    with pytest.raises(HorovodInternalError, match=f"{port}.*is the port no other job's"):
        rendezvous.meet_at_rank_0(replace(late, rendezvous=step), 1.0)
    with pytest.raises(HorovodInternalError, match=f"{port}.*another step: the server does not hold"):
        rendezvous.meet_at_rank_0(replace(late, rendezvous=replace(step, more_ports=(1,))), 1.0)


def test_the_next_program_of_a_step_meets_once_the_first_has_ended(world: World, monkeypatch: pytest.MonkeyPatch):
    client = meet(world, world)[0].client
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(meets_as_another_process, monkeypatch, replace(world, rank=1, local_rank=1), LIMIT_S)
        arrivals = partial(client.get, "arrivals of rank 1", timeout_s=LIMIT_S)
        before = arrivals()
        wait_until("the early rank has been there", lambda: arrivals() != before, LIMIT_S)
        rendezvous.close_store(world.rendezvous)
        ours = rendezvous.meet_at_rank_0(world, LIMIT_S)
        ours.client.set("key", b"second")
        assert early.result().client.get("key", timeout_s=LIMIT_S) == b"second"


def test_an_occupied_port_is_named(world: World, port: int):
    open_one = replace(world, rendezvous=replace(world.rendezvous, secret_file=""))
    with socket.create_server(("127.0.0.1", port)):
        for one in (open_one, world):
            with pytest.raises(HorovodInternalError, match=f"rank 0 cannot listen at 127.0.0.1:{port}.*MASTER_PORT"):
                rendezvous.meet_at_rank_0(one, 1.0)


def test_beside_the_store_of_torchs_own_process_group(world: World, port: int, monkeypatch: pytest.MonkeyPatch):
    """Ray Train creates one before it calls the user's function, and its store occupies the port."""
    monkeypatch.setattr(rendezvous, "_open", {})
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        with ThreadPoolExecutor(2) as pool:
            open_one = rendezvous.beside_torch(
                replace(world, rendezvous=replace(world.rendezvous, secret_file="", job="open"))
            )
            ranks = meet(open_one, open_one)
            told = [
                pool.submit(one.gather, "key", "", b"%d" % rank, rank=rank, size=2, limit_s=LIMIT_S)
                for rank, one in enumerate(ranks)
            ]
            assert [one.result().members for one in told] == [{0: b"0", 1: b"1"}] * 2
            with_secret = rendezvous.beside_torch(world)
            first, second = keys_of(meet(with_secret, with_secret), "0.0")
            assert first.shared == second.shared
        elsewhere = replace(world, rendezvous=replace(world.rendezvous, port=port + 1))
        assert rendezvous.beside_torch(elsewhere) is elsewhere
    finally:
        dist.destroy_process_group()
    assert rendezvous.beside_torch(world) is world


def test_beside_torchruns_store(world: World, port: int):
    """Rank 0 publishes its port there; a rank that finds none in time gets an error that names rank 0."""
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    inside = replace(world, rendezvous=replace(world.rendezvous, host_store=False))
    with pytest.raises(HorovodInternalError, match=r"waited 1 s for rank 0 to call hvd.init"):
        rendezvous.meet_at_rank_0(replace(inside, rank=1, local_rank=1), 1.0)  # torch 2.3 rounds 0.3 s to 0 s
    first, second = meet(inside, inside)
    again = rendezvous.meet_at_rank_0(inside, LIMIT_S)  # after a start that failed halfway
    assert len({keys.shared for keys in keys_of([first, second, again], "0.0")}) == 1
    store.set("hora/job/table", "nonsense")
    with pytest.raises(HorovodInternalError, match="not a number, but b'nonsense'"):
        rendezvous.meet_at_rank_0(replace(inside, rank=1, local_rank=1), LIMIT_S)
