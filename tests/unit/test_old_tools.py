"""The small tools of `horovod.runner` and `horovod.data` that other programs import."""

from __future__ import annotations

import argparse
import collections
import pickle
import socket
import threading

import numpy as np
import pytest
import torch

from hora.spark.estimator.metadata import dense_rows_fn
from horovod.data import AsyncDataLoaderMixin, BaseDataLoader
from horovod.runner import gloo_run
from horovod.runner.common.util import codec, config_parser, env, host_hash, secret, settings, timeout
from horovod.runner.common.util.hosts import INVALID_SLOT_INFO, SlotInfo
from horovod.runner.elastic.constants import RESET_LIMIT_EXCEEDED_MESSAGE
from horovod.runner.elastic.discovery import FixedHosts
from horovod.runner.elastic.settings import ElasticSettings
from horovod.runner.util import network, streams, threads
from horovod.runner.util.lsf import LSFUtils
from horovod.spark.data_loaders import pytorch_data_loaders as data_loaders
from horovod.spark.torch import util as torch_util
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


def test_a_timeout_names_its_activity_and_survives_pickling():
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


def test_objects_are_encoded_as_text():
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


def test_slots_and_names(monkeypatch):
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


def test_a_slot_and_a_rendezvous_are_described_by_variables():
    slot = gloo_run.get_host_assignments(gloo_run.parse_hosts("a:1,b:1"), 2)[1]
    found = gloo_run.create_slot_env_vars(slot)
    assert found["HOROVOD_HOSTNAME"] == "b"
    assert (found["HOROVOD_RANK"], found["HOROVOD_SIZE"], found["HOROVOD_CROSS_RANK"]) == ("1", "2", "1")
    assert len(found) == 7
    run = gloo_run.create_run_env_vars("10.0.0.1", {"eth1", "eth0"}, 1234, elastic=True)
    assert (run["HOROVOD_GLOO_RENDEZVOUS_ADDR"], run["HOROVOD_GLOO_RENDEZVOUS_PORT"]) == ("10.0.0.1", "1234")
    assert (run["HOROVOD_GLOO_IFACE"], run["NCCL_SOCKET_IFNAME"]) == ("eth0", "eth0,eth1")
    assert run["HOROVOD_ELASTIC"] == "1"
    with pytest.raises(NotImplementedError, match=r"use horovod\.run"):
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
def test_a_loader_yields_epoch_after_epoch(size):
    loader = AsyncNumbers(size, False, 3)
    try:
        assert [list(loader) for _ in range(3)] == [[0, 10, 20]] * 3
    finally:
        loader.close_async_loader()
    assert list(Numbers(2)) == [0, 10]


def test_an_interrupted_epoch_does_not_affect_the_next():
    loader = AsyncNumbers(2, False, 100)
    assert next(iter(loader)) == 0
    assert list(loader) == [number * 10 for number in range(100)]
    loader.close_async_loader()
    assert not loader.thread.is_alive()


def test_closing_stops_a_thread_that_is_blocked_on_a_full_queue():
    loader = AsyncNumbers(1, False, 10**9)
    assert next(iter(loader)) == 0
    wait_until("the queue is full", loader.queue.full)
    loader.close_async_loader()
    assert not loader.thread.is_alive()


def test_a_read_error_reaches_the_consumer_of_the_batches():
    loader = AsyncNumbers(4, False, 3, 1)
    batches = iter(loader)
    assert next(batches) == 0
    with pytest.raises(ValueError, match="a bad row"):
        next(batches)
    loader.close_async_loader()


class Reader:
    """Yields ten rows as Petastorm's readers do, one by one or four at a time; `reset` starts again."""

    Row = collections.namedtuple("Row", "x label")

    def __init__(self, *, batched: bool) -> None:
        self.is_batched_reader = batched
        self.last_row_consumed = False
        self.resets = 0

    def reset(self) -> None:
        self.resets += 1
        self.last_row_consumed = False

    def __iter__(self):
        step = 4 if self.is_batched_reader else 1
        for begin in range(0, 10, step):
            numbers = np.arange(begin, min(begin + step, 10))
            x = np.stack([numbers, -numbers], axis=1).astype("float32")
            yield self.Row(x, numbers) if self.is_batched_reader else self.Row(x[0], numbers[0])
        self.last_row_consumed = True


def labels(batches):
    return [batch["label"].tolist() for batch in batches]


@pytest.mark.parametrize("batched", [False, True])
def test_loaders_over_a_reader_yield_batches_epoch_by_epoch(batched):
    reader = Reader(batched=batched)
    loader = data_loaders.PytorchDataLoader(reader, 4, 0)
    assert len(loader) == 0
    for _ in range(2):
        batches = list(loader)
        assert labels(batches) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        assert batches[0]["x"][1].tolist() == [1.0, -1.0]
    assert reader.resets == 1
    short = data_loaders.PytorchDataLoader(Reader(batched=batched), 4, 100, limit_step_per_epoch=2)
    assert len(short) == 2
    assert len(list(short)) == 2
    shuffled = labels(data_loaders.PytorchDataLoader(Reader(batched=batched), 10, 3))
    assert sorted(shuffled[0]) == list(range(10))


def test_async_infinite_and_in_memory_loaders():
    ahead = data_loaders.PytorchAsyncDataLoader(2, False, Reader(batched=True), 4, 0)
    assert labels(ahead) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    ahead.close_async_loader()
    endless = data_loaders.PytorchInfiniteDataLoader(Reader(batched=False), 2, 0, limit_step_per_epoch=2)
    assert labels(endless) + labels(endless) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    kept = data_loaders.PytorchInmemDataLoader(Reader(batched=True), 4, 2, limit_step_per_epoch=3)
    assert labels(kept) == labels(kept) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]
    assert labels(kept) == []
    with pytest.raises(ValueError, match="limit_step_per_epoch"):
        data_loaders.PytorchInmemDataLoader(Reader(batched=True), 4, 2)
    with pytest.raises(ValueError, match=r"Petastorm reader.*got a list"):
        data_loaders.PytorchDataLoader([1, 2], 4, 0)


def test_models_and_other_objects_are_serialized_as_text_and_files():
    model = torch.nn.Linear(2, 1)
    again = torch_util.deserialize_fn()(torch_util.serialize_fn()(model))
    assert torch.equal(again.weight, model.weight)
    assert torch_util.deserialize_fn()(torch_util.serialize_fn()({"a": 1})) == {"a": 1}
    file = torch_util.save_into_bio_fn()(model.state_dict(), torch.save)
    assert torch.equal(torch.load(file)["weight"], model.weight)
    assert torch_util.is_module_available_fn()("torch")
    assert not torch_util.is_module_available("no_such_package.module")


def test_sparse_rows_become_dense_ones():
    metadata = {
        "v": {"intermediate_format": "custom_sparse_format", "shape": 4},
        "y": {"intermediate_format": "nochange"},
    }
    dense = dense_rows_fn(metadata)
    rows = torch.tensor([[2.0, 0, 3, 5, 7], [1.0, 2, 9, 0, 0]])
    assert dense("v", rows).tolist() == [[5, 0, 0, 7], [0, 0, 9, 0]]
    assert dense("y", rows) is rows
    assert dense("unknown", rows) is rows
