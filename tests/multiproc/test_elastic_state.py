"""Elastic states and the sampler in a world that does not change: commit, restore, sync, host updates."""

from __future__ import annotations

import copy

import pytest
import torch
from hvd_session import raises, session

import horovod.torch as hvd
from horovod.common.elastic import ObjectState, State
from horovod.torch.elastic.state import StateHandler, get_handler_registry, set_handler_registry

pytestmark = pytest.mark.ranks(1, 2, 3)

REMOVED, ADDED = 1, 2


def network(fill: float) -> torch.nn.Module:
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(fill)
    return net


def train(net, optimizer, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.arange(6.0).reshape(2, 3)).sum().backward()
        optimizer.step()


def weights(net):
    return torch.cat([tensor.double().flatten() for tensor in net.state_dict().values()])


@session
def test_sync_takes_rank_0s_values():
    net = network(hvd.rank() + 1)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1 * (hvd.rank() + 1))
    train(net, optimizer, steps=hvd.rank() + 1)
    sampler = hvd.elastic.ElasticSampler(list(range(20)))
    sampler.record_batch(0, hvd.rank() + 1)
    recorded = hvd.broadcast_object(sampler.processed_num)
    state = hvd.elastic.TorchState(model=net, optimizer=optimizer, sampler=sampler, epoch=10 * hvd.rank(), name="n")
    state.sync()
    assert torch.equal(weights(net), hvd.broadcast(weights(net), 0, name="w"))
    assert (state.epoch, state.name) == (0, "n")
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert sampler.processed_num == recorded
    steps = {float(item["step"]) for item in optimizer.state.values()}
    assert steps == {1.0}


@session
def test_restore_returns_to_the_last_commit():
    net = network(1.0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    state = hvd.elastic.TorchState(model=net, optimizer=optimizer, batch=0, seen=[])
    train(net, optimizer)
    state.batch = 1
    state.seen.append(1)
    state.commit()
    committed, momentum = weights(net), copy.deepcopy(optimizer.state_dict()["state"])
    train(net, optimizer, steps=2)
    state.batch = 3
    state.seen.append(3)
    assert not torch.equal(weights(net), committed)
    state.restore()
    assert torch.equal(weights(net), committed)
    assert (state.batch, state.seen) == (1, [1])
    for key, item in optimizer.state_dict()["state"].items():
        assert torch.equal(item["momentum_buffer"], momentum[key]["momentum_buffer"])
    train(net, optimizer)  # must not change the snapshot
    state.restore()
    assert torch.equal(weights(net), committed)


@session
def test_sync_discards_uncommitted_plain_values_and_none_is_a_value():
    state = hvd.elastic.TorchState(epoch=0)
    assert state.model is None
    assert state.optimizer is None
    state.epoch = 5
    state.sync()
    assert state.epoch == 0
    state.epoch = 5
    state.save()
    state.sync()
    assert state.epoch == 5


@session
def test_assigning_a_handled_attribute_replaces_its_target():
    first, second = network(1.0), network(2.0)
    state = hvd.elastic.TorchState(model=first, other=network(7.0))
    state.model = second
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.fill_(9.0)
    state.restore()
    assert second[0].weight[0, 0] == 2.0
    assert first[0].weight[0, 0] == 1.0
    assert state.other[0].weight[0, 0] == 7.0


@session
def test_host_updates_reach_all_ranks_together():
    state = hvd.elastic.TorchState(batch=0)
    state.check_host_updates()
    if hvd.rank() == 0:
        state.on_hosts_updated(1, REMOVED)
    with pytest.raises(hvd.elastic.run.__globals__["HostsUpdatedInterrupt"]) as caught:
        state.commit()
    assert caught.value.skip_sync is True
    state.check_host_updates()  # the old update is not repeated
    state.on_hosts_updated(1, ADDED)
    state.check_host_updates()
    state.on_hosts_updated(2, ADDED)
    state.on_hosts_updated(3, REMOVED)
    with pytest.raises(RuntimeError) as caught:
        state.check_host_updates()
    assert caught.value.skip_sync is False
    assert state._last_updated_timestamp == 3
    assert state._host_messages.empty()


@session
def test_host_updates_count_only_on_rank_0():
    state = hvd.elastic.TorchState(batch=0)
    if hvd.rank() == 1:
        state.on_hosts_updated(1, ADDED)
    state.check_host_updates()
    assert state.batch == 0


@session
def test_object_state():
    calls = []
    state = ObjectState(hvd.broadcast_object, hvd.rank, epoch=hvd.rank(), log=[hvd.rank()])
    state.register_reset_callbacks([lambda: calls.append(1), lambda: calls.append(2)])
    state.sync()
    assert (state.epoch, state.log) == (0, [0])
    state.log.append("changed")
    state.restore()
    assert state.log == [0]
    state.on_reset()
    assert calls == [1, 2]


@session
def test_custom_handlers():
    class Box:
        def __init__(self, content):
            self.content = content

    class BoxHandler(StateHandler):
        def __init__(self, value):
            super().__init__(value)
            self.save()

        def save(self):
            self.saved = self.value.content

        def restore(self):
            self.value.content = self.saved

        def sync(self):
            self.value.content = hvd.broadcast_object(self.value.content)
            self.save()

    before = get_handler_registry()
    set_handler_registry([(Box, BoxHandler), *before])
    try:
        state = hvd.elastic.TorchState(box=Box(hvd.rank()))
        state.sync()
        assert state.box.content == 0
        state.box.content = 4
        state.restore()
        assert state.box.content == 0
    finally:
        set_handler_registry(before)


@session
def test_the_loop_restores_after_a_failure_and_returns_the_value():
    state = hvd.elastic.TorchState(epoch=0, attempts=0)
    resets = []
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])
    failures = iter([hvd.HorovodInternalError("injected"), None])

    @hvd.elastic.run
    def training(state, extra, *, more):
        state.epoch += 1
        failure = next(failures)
        if failure is not None:
            raise failure
        return state.epoch, extra, more

    assert training(state, 1, more=2) == (1, 1, 2)  # the first attempt's epoch was never committed
    assert resets == [hvd.size()]


@session
def test_repeated_failures_of_the_same_world_are_raised():
    """Without an elastic launcher the world never changes, so the loop would otherwise retry for ever."""
    attempts = []

    @hvd.elastic.run
    def training(state):
        attempts.append(state.epoch)
        if state.epoch < 4:  # a failure after each commit does not count as a repetition
            state.epoch += 1
            state.commit()
        raise hvd.HorovodInternalError("it cannot work here")

    with pytest.raises(hvd.HorovodInternalError, match="it cannot work here; the world broke 3 times in a row"):
        training(hvd.elastic.TorchState(epoch=0))
    assert attempts == [0, 1, 2, 3, 4, 4]


@session
def test_other_exceptions_pass_through():
    @hvd.elastic.run
    def training(state):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        training(hvd.elastic.TorchState(epoch=0))


@session
def test_sampler_divides_the_remaining_samples():
    data = list(range(23))
    sampler = hvd.elastic.ElasticSampler(data, shuffle=False)
    seen = [i for part in hvd.allgather_object(list(sampler)) for i in part]
    assert set(seen) == set(data)
    assert len(sampler) == -(-23 // hvd.size()) == len(list(sampler))
    sampler.record_batch(0, 5)
    assert set(seen) == {i for part in hvd.allgather_object(list(sampler)) for i in part}  # unchanged until a reset
    state = sampler.state_dict()
    assert state == {"epoch": 0, "processed_num": 5 * hvd.size()}
    sampler.load_state_dict(state)
    left = {i for part in hvd.allgather_object(list(sampler)) for i in part}
    assert left == set(range(5 * hvd.size(), 23))
    sampler.set_epoch(1)
    assert sampler.processed_num == 0


@session
def test_sampler_with_fewer_samples_than_ranks():
    sampler = hvd.elastic.ElasticSampler([0], shuffle=True)
    assert list(sampler) == [0]
    sampler.load_state_dict({"epoch": 0, "processed_num": 1})
    assert list(sampler) == []
    assert len(sampler) == 0


@session
def test_sampler_shuffles_identically_on_all_ranks_and_differently_in_each_epoch():
    sampler = hvd.elastic.ElasticSampler(list(range(50)), seed=3)
    first = list(sampler.remaining_indices)
    assert all(other == first for other in hvd.allgather_object(first))
    sampler.set_epoch(1)
    assert sampler.remaining_indices != first
    assert sorted(sampler.remaining_indices) == sorted(first)


@pytest.mark.ranks(1)
def test_custom_states_and_handlers_must_define_save_restore_and_sync():
    for unfinished in (State(bcast_object=lambda value: value, get_rank=lambda: 0), StateHandler(None)):
        for method in ("save", "restore", "sync"):
            with raises(NotImplementedError, f"must define {method}()"):
                getattr(unfinished, method)()
