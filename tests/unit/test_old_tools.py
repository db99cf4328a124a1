"""The small tools behind `horovod.runner` and `horovod.data` that other programs import."""

from __future__ import annotations

import argparse
import pickle
import socket
import threading

import pytest

from horovod.data import AsyncDataLoaderMixin, BaseDataLoader
from horovod.runner import gloo_run
from horovod.runner.common.util import codec, config_parser, env, host_hash, secret, settings, timeout
from horovod.runner.common.util.hosts import INVALID_SLOT_INFO, SlotInfo
from horovod.runner.elastic.constants import RESET_LIMIT_EXCEEDED_MESSAGE
from horovod.runner.elastic.discovery import FixedHosts
from horovod.runner.elastic.settings import ElasticSettings
from horovod.runner.util import network, streams, threads
from horovod.runner.util.lsf import LSFUtils
from waiting import wait_until


def test_secrets_are_random_and_digests_are_checked():
    key = secret.make_secret_key()
    assert len(key) == secret.SECRET_LENGTH == 32
    assert key != secret.make_secret_key()
    digest = secret.compute_digest(key, b"hello")
    assert len(digest) == secret.DIGEST_LENGTH
    assert secret.check_digest(key, b"hello", digest)
    assert not secret.check_digest(key, b"hullo", digest)
    assert secret.HOROVOD_SECRET_KEY == "_HOROVOD_SECRET_KEY"


def test_a_timeout_names_what_was_waited_for_and_survives_pickling():
    limit = timeout.Timeout(600, "Timed out waiting for {activity}.")
    limit.check_time_out_for("hosts")
    assert 0 < pickle.loads(pickle.dumps(limit)).remaining() <= 600
    over = timeout.Timeout(0, "Timed out waiting for {activity}.")
    assert (over.timed_out(), over.remaining()) == (True, 0)
    with pytest.raises(timeout.TimeoutException) as error:
        over.check_time_out_for("hosts to register")
    assert error.value.message == "Timed out waiting for hosts to register. Timeout after 0 seconds."


def test_settings_hold_values_and_hide_the_key():
    held = settings.Settings(hosts="a:1", num_proc=2, key=b"very secret", verbose=2)
    assert (held.hosts, held.num_proc, held.verbose, held.elastic, held.nics) == ("a:1", 2, 2, False, None)
    assert "very secret" not in repr(held)
    elastic = ElasticSettings(FixedHosts({"a": 1}), 1, 2, 600, None, num_proc=2)
    travelled = pickle.loads(pickle.dumps(elastic))
    assert (travelled.discovery, travelled.min_num_proc, travelled.elastic) == (None, 1, True)
    assert elastic.discovery.find_available_hosts_and_slots() == {"a": 1}
    elastic.discovery.set({"b": 3})
    assert elastic.discovery.find_available_hosts_and_slots() == {"b": 3}


def test_objects_as_text():
    text = codec.dumps_base64(lambda: 42)
    assert isinstance(text, str)
    assert codec.loads_base64(text)() == 42
    assert codec.loads_base64(codec.dumps_base64([1], to_ascii=False)) == [1]


def test_flags_become_variables():
    args = argparse.Namespace(fusion_threshold_mb=10, timeline_filename="/t.json", nics={"eth0"})
    found = config_parser.set_env_from_args({"PATH": "/bin"}, args)
    assert found == {
        "PATH": "/bin",
        config_parser.HOROVOD_FUSION_THRESHOLD: str(10 * 2**20),
        config_parser.HOROVOD_TIMELINE: "/t.json",
        "HOROVOD_GLOO_IFACE": "eth0",
        "NCCL_SOCKET_IFNAME": "eth0",
    }
    with pytest.raises(ValueError, match="--fusion-threshold-mb"):
        config_parser.validate_config_args(argparse.Namespace(fusion_threshold_mb=-1))
    with pytest.raises(AttributeError, match="HOROVOD_NOTHING"):
        _ = config_parser.HOROVOD_NOTHING


def test_places_and_names(monkeypatch):
    slot = SlotInfo(hostname="a", rank=1, local_rank=0, cross_rank=1, size=2, local_size=1, cross_size=2)
    assert slot.to_response_string() == "1,2,0,1,1,2"
    assert INVALID_SLOT_INFO.rank == INVALID_SLOT_INFO.size == -1
    assert host_hash.host_hash() == host_hash.host_hash() != host_hash.host_hash("salt")
    assert host_hash.host_hash().startswith(f"{socket.gethostname().split('.')[0]}-")
    assert env.is_exportable("PATH")
    assert not env.is_exportable("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("OMPI_MCA_plm_rsh_agent", "/etc/mpi/kubexec.sh")
    monkeypatch.setenv("LSB_JOBID", "1")
    assert env.is_kubeflow_mpi()
    assert LSFUtils.using_lsf()
    assert RESET_LIMIT_EXCEEDED_MESSAGE.format(3).endswith("exceeded limit: 3")


def test_a_place_and_a_meeting_place_as_variables():
    slot = gloo_run.get_host_assignments(gloo_run.parse_hosts("a:1,b:1"), 2)[1]
    found = gloo_run.create_slot_env_vars(slot)
    assert found["HOROVOD_HOSTNAME"] == "b"
    assert (found["HOROVOD_RANK"], found["HOROVOD_SIZE"], found["HOROVOD_CROSS_RANK"]) == ("1", "2", "1")
    assert len(found) == 7
    run = gloo_run.create_run_env_vars("10.0.0.1", {"eth1", "eth0"}, 1234, elastic=True)
    assert (run["HOROVOD_GLOO_RENDEZVOUS_ADDR"], run["HOROVOD_GLOO_RENDEZVOUS_PORT"]) == ("10.0.0.1", "1234")
    assert (run["HOROVOD_GLOO_IFACE"], run["NCCL_SOCKET_IFNAME"]) == ("eth0", "eth0,eth1")
    assert run["HOROVOD_ELASTIC"] == "1"
    with pytest.raises(ValueError, match=r"use horovod\.run"):
        gloo_run.gloo_run()


def test_addresses_of_this_machine():
    assert "lo" in network.get_local_intfs()
    assert network.get_local_intfs("lo") == {"lo"}
    assert "127.0.0.1" in network.get_local_host_addresses()
    assert network.resolve_host_address("127.0.0.1") == "127.0.0.1"
    assert network.resolve_host_address("no-such-host.invalid") is None
    assert network.filter_local_addresses(["127.0.0.1", "no-such-host.invalid"]) == ["no-such-host.invalid"]
    assert network.get_driver_ip(["lo"]) == "127.0.0.1"
    server, port = network.find_port(socket.create_server)
    with server:
        assert server.getsockname()[1] == port > 0


def test_threads():
    found = []
    threads.in_thread(found.append, (1,)).join(60)
    assert found == [1]
    event, stop = threading.Event(), threading.Event()
    waiting = threads.on_event(event, found.append, (2,), stop=stop, check_stop_interval_s=0.01)
    stop.set()
    waiting.join(60)
    assert found == [1]
    event.set()
    threads.on_event(event, found.append, (3,)).join(60)
    assert found == [1, 3]
    args = [[1, 2], [3, 4]]
    assert threads.execute_function_multithreaded(lambda a, b: a * b, args) == {0: 2, 1: 12}
    assert args == [[1, 2], [3, 4]]
    with pytest.raises(RuntimeError, match="call 1 of 2 failed: ZeroDivisionError"):
        threads.execute_function_multithreaded(lambda a: 1 / a, [[1], [0]])


def test_a_pipe_between_threads():
    pipe = streams.Pipe()
    pipe.write("hello")
    assert (pipe.read(2), pipe.read(-1)) == ("he", "llo")
    with pytest.raises(TimeoutError):
        pipe.read(timeout=0.01)
    pipe.close()
    assert pipe.read() is None
    assert pipe.read() is None


class Numbers(BaseDataLoader):
    def __init__(self, count, fail_at=None):
        self.count, self.fail_at = count, fail_at

    def __len__(self):
        return self.count

    def _iterate(self):
        for number in range(self.count):
            if number == self.fail_at:
                raise ValueError("a bad row")
            yield number

    def _process_batch(self, batch):
        return batch * 10


class AsyncNumbers(AsyncDataLoaderMixin, Numbers):
    pass


@pytest.mark.parametrize("size", [0, 1, 64])
def test_a_loader_gives_epoch_after_epoch(size):
    loader = AsyncNumbers(size, False, 3)
    try:
        assert [list(loader) for _ in range(3)] == [[0, 10, 20]] * 3
    finally:
        loader.close_async_loader()
    assert list(Numbers(2)) == [0, 10]


def test_an_epoch_that_was_left_early_leaves_nothing_to_the_next():
    loader = AsyncNumbers(2, False, 100)
    assert next(iter(loader)) == 0
    assert list(loader) == [number * 10 for number in range(100)]
    loader.close_async_loader()
    assert not loader.thread.is_alive()


def test_closing_ends_a_thread_that_has_no_room_for_its_batch():
    loader = AsyncNumbers(1, False, 10**9)
    assert next(iter(loader)) == 0
    wait_until("the queue is full", loader.queue.full)
    loader.close_async_loader()
    assert not loader.thread.is_alive()


def test_an_error_while_reading_reaches_who_takes_the_batches():
    loader = AsyncNumbers(4, False, 3, 1)
    batches = iter(loader)
    assert next(batches) == 0
    with pytest.raises(ValueError, match="a bad row"):
        next(batches)
    loader.close_async_loader()
