"""Elastic training with per-step rollback: a failed step is applied on no rank or on all, and leaves no trace.

Failures are injected into ranks that survive, at chosen moments; then the same training runs again with the
world changing between the same steps, without failures. All results must be bit-identical.
"""

from __future__ import annotations

import copy
import itertools
import math
import tempfile
from contextlib import contextmanager

import pytest
import torch
from hvd_session import raises, session

import horovod.torch as hvd
from hora import engine
from hora.errors import HostsUpdatedInterrupt
from hora.torch.elastic.loop import reset
from horovod.torch.elastic.state import StateHandler, get_handler_registry, set_handler_registry

pytestmark = pytest.mark.ranks(2, 3)

STEPS = 7


class Training:
    """A training whose complete state is in `report`. `faults`: step -> where it fails."""

    def __init__(self, faults, *, passes=1, make=torch.optim.Adam, state=None, **options):
        torch.manual_seed(10 + hvd.rank())
        self.faults = dict(faults)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(3, 300), hvd.SyncBatchNorm(300), torch.nn.Dropout(0.3), torch.nn.Linear(300, 2)
        )
        inner = make(self.net.parameters(), lr=0.05)
        self.optimizer = hvd.DistributedOptimizer(
            inner, self.net.named_parameters(), backward_passes_per_step=passes, **options
        )
        self.passes = passes
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.sampler = hvd.elastic.ElasticSampler(list(range(200)), seed=3)
        self.generator = torch.Generator().manual_seed(hvd.rank())
        self.state = hvd.elastic.TorchState(
            model=self.net,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            sampler=self.sampler,
            generator=self.generator,
            per_step=True,
            step=0,
            batch=0,
            losses=[],
            **(state or {}),
        )
        self.entries = 0

    def run(self):
        hvd.elastic.run(self.train)(self.state)
        return self.report()

    def train(self, state):
        self.entries += 1
        while state.step < STEPS:
            fault = self.faults.pop(state.step, None)  # each fault occurs once, whichever rank detects it first
            self.happen("between", fault)
            samples = iter(self.sampler)
            loss = 0.0
            for _ in range(self.passes):
                numbers = [(next(samples) + 7 * state.batch) % 200 for _ in range(4)]
                noise = torch.rand(1, generator=self.generator).item()
                inputs = torch.tensor(numbers, dtype=torch.float32).outer(torch.tensor([0.01, 0.003, noise]))
                part = self.net(inputs).square().mean()
                mean = hvd.allreduce(part.detach())
                self.happen("forward", fault)
                part.backward()
                loss += mean.item()
                state.batch += 1
                self.happen("backward", fault)
                self.happen("amid", fault)
            with self.failing_to_apply(fault):
                self.optimizer.step()
            self.optimizer.zero_grad()
            state.step += 1
            state.losses.append(loss)
            self.scheduler.step()
            self.sampler.record_batch(0, 4 * self.passes)
            self.happen("commit", fault)
            state.commit()

    def happen(self, when, fault):
        if fault != when:
            return
        if when in ("between", "amid"):
            raise HostsUpdatedInterrupt(False)
        raise hvd.HorovodInternalError("injected")

    @contextmanager
    def failing_to_apply(self, where):
        """The reduction is complete, but the ranks `where` detect a failure before they apply it."""
        if not isinstance(where, list):
            yield
            return

        def fail(*_):
            raise hvd.HorovodInternalError("injected")

        # A rank with a sharded optimizer has already stepped its slice when it detects the failure.
        name = "_step_ended" if hasattr(self.optimizer, "is_sharded") else "_base_step"
        if hvd.rank() in where:
            setattr(self.optimizer, name, fail)
        try:
            yield
        finally:
            self.optimizer.__dict__.pop(name, None)

    def report(self):
        state = self.state
        return {
            "net": copy.deepcopy(self.net.state_dict()),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "scheduler": self.scheduler.state_dict(),
            "sampler": self.sampler.state_dict(),
            "values": (state.step, state.batch, state.losses),
            "next": (torch.rand(3).tolist(), torch.rand(2, generator=self.generator).tolist()),
        }


def assert_same(found, expected, where=""):
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), where
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_same(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for index, item in enumerate(expected):
            assert_same(found[index], item, f"{where}.{index}")
    else:
        assert found == expected, (where, found, expected)


def assert_as_without_failures(faults, common=("net", "optimizer", "scheduler", "sampler"), **options):
    """Failures have the effect of a change of the world: before the step, or after it if a rank has applied it."""
    disturbed = Training(faults, **options)
    found = disturbed.run()
    everybody = list(range(hvd.size()))
    applied = {step: what == "commit" or (type(what) is list and what != everybody) for step, what in faults.items()}
    expected = Training({step + applied[step]: "between" for step in faults}, **options).run()
    assert disturbed.entries == len(faults) + 1
    assert found["values"][0] == STEPS
    assert all(map(math.isfinite, found["values"][2]))
    assert_same(found, expected)
    whole = hvd.allgather_object({name: found[name] for name in common})
    for other in whole:
        assert_same(other, whole[0])


@session
def test_a_step_that_fails_on_all_ranks_leaves_no_trace():
    assert_as_without_failures({1: "forward", 3: "backward", 5: "commit"})


@session
def test_a_step_applied_by_one_rank_is_applied_by_all():
    everybody = list(range(hvd.size()))
    assert_as_without_failures({2: [0], 5: everybody[1:]})


@session
def test_a_reduced_step_that_no_rank_has_applied_is_repeated():
    assert_as_without_failures({3: list(range(hvd.size()))})


@session
def test_gradient_accumulation_is_repeated_from_its_beginning():
    assert_as_without_failures({2: "backward", 4: [hvd.size() - 1], 6: "amid"}, passes=2)


@session
def test_compression_with_error_feedback():
    from hora.torch.compression import ErrorFeedback

    options = {"compression": ErrorFeedback(hvd.Compression.fp16)}
    assert_as_without_failures({3: "backward", 5: [0]}, **options)


@session
def test_the_slices_of_a_sharded_optimizer_all_belong_to_one_step():
    everybody = list(range(hvd.size()))
    for faults in (
        {1: "forward", 3: "backward", 5: "commit"},
        {0: [0], 2: [0], 5: everybody[1:]},
        {0: everybody, 3: everybody},
    ):
        assert_as_without_failures(faults, sharded=True)


@pytest.mark.ranks(3, env={"HORA_TRANSPORT": "tcp"})
@session
def test_the_slices_of_a_sharded_optimizer_without_shared_memory():
    everybody = list(range(hvd.size()))
    for faults in ({1: "forward", 3: "backward"}, {0: [0], 2: [0, 1], 5: everybody}):
        assert_as_without_failures(faults, sharded=True)


@pytest.mark.ranks(3, env={"HORA_TRANSPORT": "tcp"})
@session
def test_a_slice_survives_its_rank_unless_the_rank_with_its_copy_is_lost_too():
    training = Training({}, sharded=True)
    training.run()
    expected = training.report()
    with tempfile.TemporaryDirectory() as folder:
        training.state.persist(folder)
        with raises(
            ValueError, "durable commits with per_step=True need the state of a sharded optimizer in the memory of"
        ):
            training.state.commit()
    of_all = hvd.allgather_object(training.optimizer.slices())
    left = {which: its for found in of_all[:2] for which, its in found.items()}  # rank 2 is lost
    training.optimizer.unite(left)
    assert not training.optimizer.is_sharded
    found = {"net": dict(training.net.state_dict()), "optimizer": training.optimizer.state_dict()}
    assert_same(found, {"net": dict(expected["net"]), "optimizer": expected["optimizer"]})
    again = Training({}, sharded=True)
    again.run()
    (first,) = [found for rank, found in enumerate(hvd.allgather_object(again.optimizer.slices())) if rank == 0]
    with raises(RuntimeError, "the slices of ranks"):
        again.optimizer.unite(first)


@session
def test_a_rank_that_dies_while_stepping_its_slice_leaves_no_trace():
    training = Training({}, sharded=True)
    training.run()
    expected = training.report()
    optimizer = training.optimizer
    assert not optimizer.has_slices_apart
    hvd.barrier()
    if hvd.rank() == hvd.size() - 1:  # it dies after half of its slice
        optimizer._copies.before_step()
        for shard in optimizer._shards.owned:
            shard.parameter.data[::2] += 1.0
            optimizer._inner.state[shard.parameter]["exp_avg"][::3] -= 1.0
    hvd.barrier()
    optimizer.unite({})
    found = {"net": dict(training.net.state_dict()), "optimizer": optimizer.state_dict()}
    assert_same(found, {"net": dict(expected["net"]), "optimizer": expected["optimizer"]})
    training.state.step = 0
    training.run()
    assert optimizer.is_sharded, "and goes on"


@session
def test_an_optimizer_sharded_before_it_belongs_to_a_state():
    net = torch.nn.Linear(3, 70)
    inner = torch.optim.Adam(net.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(inner, net.named_parameters(), sharded=True)
    for watched in (False, True):
        if watched:
            state = hvd.elastic.TorchState(model=net, optimizer=optimizer, per_step=True)
            state.sync()
        for _ in range(2):
            optimizer.zero_grad()
            net(torch.full((2, 3), 1.0 + hvd.rank())).square().mean().backward()
            optimizer.step()
        assert optimizer.is_sharded
        assert (optimizer._copies is not None) == watched
    assert state._last.number == 2


@pytest.mark.ranks(2)
@session
def test_adasum_rolls_back_its_changes_to_the_optimizers_state_during_backward():
    def momentum(parameters, lr):
        return torch.optim.SGD(parameters, lr=lr / 100, momentum=0.9)

    assert_as_without_failures({2: "backward", 5: "forward"}, common=("net",), op=hvd.Adasum, make=momentum)


@session
def test_powersgd_factors_are_drawn_again_after_a_failure():
    training = Training({2: "backward", 4: [0]}, compression=hvd.Compression.powersgd(rank=2, start_step=1))
    found = training.run()
    assert (found["values"][0], training.entries) == (STEPS, 3)
    assert all(map(math.isfinite, found["values"][2]))
    for other in hvd.allgather_object((found["net"], found["optimizer"]["state"])):
        assert_same(other, (found["net"], found["optimizer"]["state"]))


@pytest.mark.ranks(3, env={"HORA_TRANSPORT": "tcp", "HOROVOD_FUSION_THRESHOLD": "0"})  # no fusion of int8 blocks
@session
def test_between_hosts():
    assert_as_without_failures({2: "backward", 4: [0, 2]}, compression=hvd.Compression.int8)


@session
def test_a_rank_that_dies_while_sending_its_step_leaves_the_others_a_complete_state():
    training = Training({})
    state = training.state
    training.run()
    before = training.report()
    if hvd.rank() == 0:  # all others miss this step
        with torch.no_grad():
            training.net[0].weight.add_(1.0)
            training.optimizer.state[training.net[0].weight]["exp_avg"].add_(1.0)
    else:
        state._last.number -= 1
    model, optimizer = state._in_place
    for owner, method in ((model, "broadcast"), (optimizer, "broadcast"), (state, "_broadcast_values")):
        real = getattr(owner, method)

        def breaking(root, real=real):
            real(root)
            raise hvd.HorovodInternalError("injected")

        object.__setattr__(owner, method, breaking)
        with raises(hvd.HorovodInternalError, "injected"):
            state.sync()
        object.__delattr__(owner, method)
        if hvd.rank() != 0:
            after = training.report()
            assert_same(
                {name: after[name] for name in ("net", "optimizer")},
                {name: before[name] for name in ("net", "optimizer")},
            )
    state.sync()
    whole = hvd.allgather_object({name: training.report()[name] for name in ("net", "optimizer")})
    for other in whole:
        assert_same(other, whole[0])
    assert not torch.equal(whole[0]["net"]["0.weight"], before["net"]["0.weight"])


@pytest.mark.ranks(3)
@session
def test_a_rank_fails_at_each_message_of_the_roll_forward():
    """Rank 0 has a step that the others miss; it, or another rank, fails before one of the messages that send it.
    Rank 0 then still has the step, or is replaced by a newcomer. All ranks must reach the same state, with that step
    or without it, and agree on which.
    """
    faults = [(rank, message, replaced) for rank in (0, 1) for message in range(40) for replaced in (False, True)]
    reached = set()
    for rank, message, replaced in faults:
        if (rank, message - 1) not in reached and message:
            continue  # the previous message was the last one
        net, state = _one_step_apart()
        failed = _sync_with_a_failure(net, state, message if hvd.rank() == rank else None, replaced)
        if any(hvd.allgather_object(failed)):
            reached.add((rank, message))
        found = hvd.allgather_object((net.weight.tolist(), state._last.number, state.count))
        assert found == [found[0]] * hvd.size(), (rank, message, replaced)
        weight, number, count = found[0]
        assert count == number, (rank, message, replaced)
        assert weight == [[float(number)] * 2], (rank, message, replaced)
        assert number == 5 or replaced, "the step was lost, though rank 0 was there"
    assert len(reached) > 12


def _one_step_apart():
    """Return a training after four steps, with a fifth that only rank 0 has applied; weights and values count steps."""
    number = 5 if hvd.rank() == 0 else 4
    net = torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(inner, net.named_parameters())
    state = hvd.elastic.TorchState(model=net, optimizer=optimizer, per_step=True, count=0)
    state.sync()
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        net.weight.fill_(number)
    state.count = state._last.number = number
    return net, state


def _sync_with_a_failure(net, state, message, replaced):
    """Synchronise as the elastic loop does; this rank fails before that message. Return whether it did."""
    count, failed = itertools.count(), False
    runtime = engine.current_runtime()
    real = runtime.submit

    def submit(*arguments, **options):
        if next(count) == message:
            raise hvd.HorovodInternalError("injected")
        return real(*arguments, **options)

    runtime.submit = submit
    while True:
        try:
            state.sync()
            hvd.barrier()
            runtime.submit = real
            return failed
        except hvd.HorovodInternalError as error:
            failed = failed or "injected" in str(error)
            state.restore()
            if replaced and hvd.rank() == 0 and state._synced:  # a newcomer replaces it
                state._synced, state._origin, state._last.number, state.count = False, -2, -1, -1
                net.weight.data.fill_(-1.0)
            reset()
            state.on_reset()


@session
def test_newcomers_copy_the_state_from_the_lowest_rank_that_has_it():
    training = Training({})
    if hvd.rank() == hvd.size() - 1:  # the only rank that has trained
        training.state._last.number, training.state._synced = 4, True
        training.state.step, training.state.losses = 4, [0.5]
    training.state.sync()
    assert (training.state.step, training.state.losses, training.state._last.number) == (4, [0.5], 4)
    (first, *others) = hvd.allgather_object(training.net[0].weight.detach())
    assert all(torch.equal(other, first) for other in others)


@session
def test_newcomers_alone_do_not_start_from_scratch():
    training = Training({})
    assert training.state._origin == -1
    training.state._origin = -2  # as for a rank that joined in a later generation
    with raises(RuntimeError, "the state of the training is lost"):
        training.state.sync()


@session
def test_a_step_skipped_by_a_scaler_is_counted():
    net = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    state = hvd.elastic.TorchState(model=net, optimizer=optimizer, scaler=scaler, per_step=True)
    state.sync()
    for number in (1, 2, 3):
        scaler.scale(net(torch.full((1, 2), float("inf") if number == 2 else 1.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert state._last.number == number
    assert scaler.get_scale() == 2.0


@session
def test_a_commit_copies_nothing_and_a_durable_one_is_complete():
    with tempfile.TemporaryDirectory() as folder:
        training = Training({})
        state = training.state
        assert state.per_step
        assert not state.persist(f"{folder}/{hvd.rank()}")
        training.run()
        kept = [handler.committed for handler in state._in_place]
        assert (kept == [None, None]) == (hvd.rank() != 0)
        if hvd.rank() == 0:
            again = Training({})
            assert again.state.persist(f"{folder}/0")
            assert_same(dict(again.net.state_dict()), dict(training.net.state_dict()))
            assert (again.state.step, again.state.losses) == (state.step, state.losses)


@pytest.mark.ranks(3, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
@session
def test_an_optimizer_of_a_process_set_is_created_again_in_every_world():
    """The remedy named by the error tested below: commits, with the plain optimizer in the state."""

    def trained(*faults):
        torch.manual_seed(hvd.rank())
        net, left = torch.nn.Linear(3, 2), list(faults)
        plain = torch.optim.Adam(net.parameters(), lr=0.1)

        @hvd.elastic.run
        def train(state):
            part = hvd.add_process_set([0, 1])
            optimizer = hvd.DistributedOptimizer(plain, net.named_parameters(), process_set=part)
            while state.step < 4:
                if part.included():
                    optimizer.zero_grad()
                    net(torch.full((2, 3), 1.0 + hvd.rank())).square().mean().backward()
                    optimizer.step()
                state.step += 1
                if state.step in left:
                    left.remove(state.step)
                    raise hvd.HorovodInternalError("injected")
                state.commit()
            hvd.remove_process_set(part)

        train(hvd.elastic.TorchState(model=net, optimizer=plain, step=0))
        assert not left
        return hvd.broadcast_object((net.state_dict(), plain.state_dict()["state"]), root_rank=1)

    assert_same(trained(1, 3), trained())


@pytest.mark.ranks(2, 3, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
@session
def test_per_step_without_a_suitable_distributed_optimizer_is_rejected():
    net = torch.nn.Linear(2, 1)
    with raises(ValueError, "per_step=True needs a hvd.DistributedOptimizer in the state"):
        hvd.elastic.TorchState(model=net, per_step=True)
    plain = torch.optim.SGD(net.parameters(), lr=0.1)
    with raises(ValueError, "per_step=True needs a hvd.DistributedOptimizer in the state"):
        hvd.elastic.TorchState(model=net, optimizer=plain, per_step=True)
    part = hvd.add_process_set(range(hvd.size() - 1))
    of_set = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(), process_set=part
    )
    with raises(ValueError, "one belongs to a process set", "make the set and hvd.DistributedOptimizer in the train"):
        hvd.elastic.TorchState(model=net, optimizer=of_set, per_step=True)
    newton = hvd.DistributedOptimizer(torch.optim.LBFGS(net.parameters()), net.named_parameters())
    with raises(ValueError, "does not work with LBFGS"):
        hvd.elastic.TorchState(model=net, optimizer=newton, per_step=True)


@pytest.mark.ranks(2, env={"HORA_ELASTIC_PER_STEP": "1"})
@session
def test_the_environment_enables_it_and_commits_are_used_where_it_is_impossible():
    net = torch.nn.Linear(2, 1)
    assert not hvd.elastic.TorchState(model=net).per_step
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
    assert hvd.elastic.TorchState(model=net, optimizer=optimizer).per_step
    assert not hvd.elastic.TorchState(model=net, optimizer=optimizer, per_step=False).per_step


@session
def test_a_custom_kind_of_value_is_copied_when_a_step_begins():
    class Box:
        content = 0

    class BoxHandler(StateHandler):
        def save(self):
            self.saved = self.value.content

        def restore(self):
            self.value.content = self.saved

        def sync(self):
            self.value.content = hvd.broadcast_object(self.value.content)

    before = get_handler_registry()
    set_handler_registry([(Box, BoxHandler), *before])
    try:
        box = Box()
        training = Training({2: "backward"}, state={"box": box})
        happen = training.happen

        def counting(when, fault):
            if when == "backward":
                box.content += 1
            happen(when, fault)

        training.happen = counting
        training.run()
        assert box.content == STEPS
    finally:
        set_handler_registry(before)


@session
def test_a_module_whose_buffer_is_replaced_in_forward():
    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))
            self.register_buffer("table", torch.arange(4.0))
            self.layer = torch.nn.Linear(2, 1)

        def forward(self, inputs):
            self.seen = self.seen + 1
            return self.layer(inputs)

    net = Counting()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
    state = hvd.elastic.TorchState(model=net, optimizer=optimizer, per_step=True)
    state.sync()
    for _ in range(2):
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    net(torch.ones(1, 2))
    assert net.seen.item() == 3
    state.restore()
    assert net.seen.item() == 2


class Adversaries:
    """Two optimizers that form one iteration, the second every other time, with an EMA and a scheduler each."""

    def __init__(self, fails_at=(), **options):
        torch.manual_seed(4)
        self.critic, self.generator = torch.nn.Linear(3, 1).double(), torch.nn.Linear(2, 3).double()
        self.average = torch.optim.swa_utils.AveragedModel(self.generator)
        self.optimizers = [
            hvd.DistributedOptimizer(torch.optim.Adam(net.parameters(), lr=0.05), net.named_parameters(prefix=name))
            for name, net in (("critic", self.critic), ("generator", self.generator))
        ]
        self.schedulers = [torch.optim.lr_scheduler.StepLR(one, 2, gamma=0.7) for one in self.optimizers]
        self.state = hvd.elastic.TorchState(
            critic=self.critic,
            generator=self.generator,
            average=self.average,
            critic_optimizer=self.optimizers[0],
            generator_optimizer=self.optimizers[1],
            critic_scheduler=self.schedulers[0],
            generator_scheduler=self.schedulers[1],
            batch=0,
            **options,
        )
        self.fails_at = set(fails_at)

    def happen(self, point):
        if (self.state.batch, point) in self.fails_at:
            self.fails_at.remove((self.state.batch, point))
            hvd.barrier()  # otherwise a failure elsewhere may come first, and this one counts as another
            raise hvd.HorovodInternalError("injected")

    def train(self, state):
        while state.batch < 6:
            noise = torch.full((4, 2), (state.batch + 1) / 6 + hvd.rank(), dtype=torch.float64)
            real = torch.full((4, 3), (state.batch + 2) / 6, dtype=torch.float64)
            self.optimizers[0].zero_grad()
            (self.critic(self.generator(noise).detach()).square() + (self.critic(real) - 1).square()).mean().backward()
            self.happen("critic's backward")
            self.optimizers[0].step()
            self.schedulers[0].step()
            self.happen("between")
            if state.batch % 2:
                self.critic.requires_grad_(False)
                self.optimizers[1].zero_grad()
                (self.critic(self.generator(noise)) - 1).square().mean().backward()
                self.critic.requires_grad_(True)
                self.happen("generator's backward")
                self.optimizers[1].step()
                self.schedulers[1].step()
                self.average.update_parameters(self.generator)
            state.batch += 1
            state.commit()

    def run(self):
        hvd.elastic.run(self.train)(self.state)
        nets = (self.critic, self.generator, self.average)
        return [copy.deepcopy(one.state_dict()) for one in (*nets, *self.optimizers, *self.schedulers)]


@session
def test_an_iteration_of_two_optimizers_is_rolled_back_completely_or_rejected():
    with raises(ValueError, "per_step=True", "critic_optimizer, generator_optimizer", "state.commit()"):
        Adversaries(per_step=True)
    expected = Adversaries().run()
    for points in (["critic's backward"], ["between"], ["generator's backward"], ["between", "generator's backward"]):
        assert_same(Adversaries([(3, point) for point in points]).run(), expected, str(points))


@session
def test_a_weight_average_belongs_to_the_previous_step():
    """It is updated after a step and before any commit; a later failed step does not change it."""
    results = []
    for fails_at in ((), (2, 4)):
        torch.manual_seed(4)
        net = torch.nn.Sequential(torch.nn.Linear(3, 4), hvd.SyncBatchNorm(4), torch.nn.Linear(4, 1))
        average = torch.optim.swa_utils.AveragedModel(net, use_buffers=True)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
        state = hvd.elastic.TorchState(model=net, optimizer=optimizer, average=average, step=0, per_step=True)
        left = set(fails_at)

        def train(state, net=net, average=average, optimizer=optimizer, left=left):
            while state.step < 6:
                optimizer.zero_grad()
                net(torch.arange(12.0).view(4, 3) / (state.step + 1) + hvd.rank()).square().mean().backward()
                if state.step in left:
                    left.remove(state.step)
                    raise hvd.HorovodInternalError("injected")
                optimizer.step()
                state.step += 1
                average.update_parameters(net)

        hvd.elastic.run(train)(state)
        results.append([copy.deepcopy(one.state_dict()) for one in (net, average, optimizer)])
    assert_same(results[1], results[0])
