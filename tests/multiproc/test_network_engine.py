"""The engine without shared memory, as if each rank were on its own host: process sets, encryption."""

from __future__ import annotations

import os
import threading

import pytest
import torch
import torch.distributed as dist

import horovod.torch as hvd
from hora import engine

tcp = {"HORA_TRANSPORT": "tcp"}
encrypted = tcp | {"HORA_ENCRYPT": "always"}


@pytest.mark.ranks(3)
@pytest.mark.over_network
def test_a_new_set_reuses_a_number():
    """Set 1 is first ranks 0 and 1, then 1 and 2, so members of the second set have different histories."""
    hvd.init(process_sets="dynamic")
    for ranks in ([0, 1], [1, 2], [0, 1], [0, 2]):
        some = hvd.add_process_set(ranks)
        assert some.process_set_id == 1
        if some.included():
            got = hvd.allgather(torch.full((100_000,), hvd.rank()), process_set=some)
            assert got.tolist() == [ranks[0]] * 100_000 + [ranks[1]] * 100_000
        assert hvd.remove_process_set(some)
    hvd.shutdown()


@pytest.mark.ranks(4, env=encrypted)
def test_sets_connect_at_the_same_time():
    """Each rank is in several sets with different partners, and the ranks begin with different sets."""
    sets = [hvd.ProcessSet(ranks) for ranks in ([0, 1], [2, 3], [1, 2], [0, 3], [0, 2], [1, 3])]
    hvd.init(process_sets=sets)
    mine = [some for some in sets if some.included()]
    results = {}

    def work(some):
        results[some.process_set_id] = hvd.allreduce(torch.tensor([hvd.rank()]), op=hvd.Sum, process_set=some).item()

    threads = [threading.Thread(target=work, args=(some,)) for some in (mine[::-1] if hvd.rank() % 2 else mine)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {some.process_set_id: sum(some.ranks) for some in mine}
    hvd.shutdown()


@pytest.mark.ranks(2, env=tcp)
def test_the_users_own_default_group_is_unaffected():
    hvd.init()
    hvd.allreduce(torch.ones(3))
    assert engine.current_runtime().sets.queue(0).transport("cpu").name == "tcp"
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert hvd.allreduce(tensor, op=hvd.Sum).tolist() == [2.0, 2.0]
    finally:
        dist.destroy_process_group()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
    hvd.shutdown()


def loss_after(compression, num_steps=200):
    """Return the loss of a small network after training on random labels, different on each rank."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)
    generator = torch.Generator().manual_seed(hvd.rank())
    inputs = torch.randn(64, 20, generator=generator)
    labels = torch.randint(0, 5, (64,), generator=generator)
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return hvd.allreduce(torch.nn.functional.cross_entropy(model(inputs), labels)).item()


@pytest.mark.ranks(3, env=tcp)
def test_a_compressed_training_learns_equally_well():
    hvd.init()
    assert engine.current_runtime().spans_hosts(0)
    plain = loss_after(hvd.Compression.none)
    assert plain > 0.3  # the network has not memorised the labels, which would prove nothing
    for compression in (hvd.Compression.bf16, hvd.Compression.int8):
        assert loss_after(compression) == pytest.approx(plain, rel=0.01)
    hvd.shutdown()


@pytest.mark.ranks(2, env=tcp)
def test_ranks_that_disagree_on_compression_get_an_error():
    hvd.init()
    compression = hvd.Compression.int8 if hvd.rank() else hvd.Compression.bf16
    with pytest.raises(hvd.HorovodInternalError, match=r"Mismatched compression: rank 0 has bf16, rank 1 has int8"):
        hvd.allreduce(torch.ones(5), compression=compression, name="x")
    hvd.shutdown()


@pytest.mark.ranks(2, env=tcp)
def test_a_rank_that_requires_more_encryption_than_rank_0_is_an_error_on_all():
    """With rank 0's setting it would send data in the clear against its user's will."""
    with pytest.MonkeyPatch.context() as patch:  # a fixture would be undone in the parent process, not in this rank
        if os.environ["HOROVOD_RANK"] == "1":
            patch.setenv("HORA_ENCRYPT", "always")
        with pytest.raises(ValueError, match=r"HORA_ENCRYPT=always on rank\(s\) \[1\], but auto on rank 0"):
            hvd.init()
