"""Everything that counts or remembers between two steps is part of an elastic state: a training that fails at some
moment after a commit, and starts from that commit again, ends as one that never failed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hvd_session import assert_same_everywhere, session

import horovod.torch as hvd
from horovod.common.exceptions import HostsUpdatedInterrupt

STEPS = 8
FRONTS: dict[str, Any] = {
    "plain": hvd.DistributedOptimizer,
    "sharded": partial(hvd.DistributedOptimizer, sharded=True),
    "sum": partial(hvd.DistributedOptimizer, op=hvd.Sum),
    "Adasum": partial(hvd.DistributedOptimizer, op=hvd.Adasum),
    "groups": partial(hvd.DistributedOptimizer, groups=2),
}
BETWEEN_HOSTS: dict[str, Any] = {
    "int8": partial(hvd.DistributedOptimizer, compression=hvd.Compression.int8),
    "error feedback": partial(hvd.DistributedOptimizer, compression=hvd.ErrorFeedback(hvd.Compression.bf16)),
    "PowerSGD": partial(
        hvd.DistributedOptimizer, compression=hvd.Compression.powersgd(rank=2, start_step=2, min_compression_rate=0.1)
    ),
    "sharded": partial(hvd.DistributedOptimizer, sharded=True),
}
# Hosts that train apart: commits follow an exchange, when they are alike.
APART: dict[str, Any] = {
    "LocalSGD": partial(hvd.LocalSGD, every=2),
    "DiLoCo": partial(hvd.DiLoCo, every=2, fragments=1, overlap=0, compression=hvd.Compression.none),
    "DES-LOC": partial(hvd.DESLOC, every=2, moments={"momentum_buffer": 2}),
}
# The error that is carried from step to step belongs to a world: one that breaks loses it.
TOLERANCES = {"int8": 2e-3, "error feedback": 2e-3}
# Moments of an iteration.
MOMENTS = ("pass", "backward", "unscaled", "stepped", "updated")


class Training:
    """`faults`: (iteration, moment) -> the error; `commits`: the iterations that end with one. Two passes a step.

    The ranks begin with different values everywhere: they start with rank 0's, which `sync` copies.
    """

    def __init__(self, make, faults, commits, *, per_step=False, kind=torch.optim.Adam):
        torch.manual_seed(hvd.rank())
        self.faults, self.commits = dict(faults), commits
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 300), torch.nn.Tanh(), torch.nn.Linear(300, 2))
        self.optimizer = make(
            kind(self.net.parameters(), lr=0.01 * (hvd.rank() + 1)),
            self.net.named_parameters(),
            backward_passes_per_step=2,
        )
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0 * (hvd.rank() + 1), growth_interval=3)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.7)
        self.average = torch.optim.swa_utils.AveragedModel(self.net)
        self.sampler = hvd.elastic.ElasticSampler(list(range(1000)), seed=3)
        self.scheduler.last_epoch = self.sampler.processed_num = hvd.rank()
        self.generator = torch.Generator().manual_seed(hvd.rank())
        self.state = hvd.elastic.TorchState(
            model=self.net,
            optimizer=self.optimizer,
            scaler=self.scaler,
            scheduler=self.scheduler,
            average=self.average,
            sampler=self.sampler,
            generator=self.generator,
            iteration=0,
            seen=[],
            note=hvd.rank(),
            per_step=per_step,
        )
        self.can_unscale = "Adasum" not in str(make) and make is not FRONTS["Adasum"]

    def run(self):
        hvd.elastic.run(self.train)(self.state)
        assert not self.faults
        return {
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict()["state"],
            "rate": [group["lr"] for group in self.optimizer.param_groups],
            "scaler": self.scaler.state_dict(),
            "scheduler": self.scheduler.last_epoch,
            "sampler": self.sampler.state_dict(),
            "note": self.state.note,
            # `sync` copies rank 0's.
            **({"seen": self.state.seen, "average": self.average.state_dict()} if hvd.rank() == 0 else {}),
        }

    def train(self, state):
        samples, begin = list(self.sampler), state.iteration
        while state.iteration < 2 * STEPS:
            mine = samples[4 * (state.iteration - begin) :][:4]
            noise = torch.rand(4, 1, generator=self.generator)
            inputs = torch.tensor(mine, dtype=torch.float32)[:, None] / 500 * torch.tensor([1.0, 0.3, 0.1]) + noise
            loss = self.net(inputs).square().mean() / 2
            if self.can_unscale:
                loss = self.scaler.scale(loss)
            loss.backward()
            state.seen.append(mine)
            self.happen("pass")
            if state.iteration % 2:
                self.step()
            self.sampler.record_batch(0, 4)
            state.iteration += 1
            if state.iteration - 1 in self.commits:
                state.commit()
            self.happen("committed")

    def step(self):
        self.happen("backward")
        if self.can_unscale:
            self.scaler.unscale_(self.optimizer)
            self.happen("unscaled")
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.happen("stepped")
            self.scaler.update()
        else:
            self.optimizer.step()
        self.scheduler.step()
        self.average.update_parameters(self.net)
        self.happen("updated")
        self.optimizer.zero_grad()  # after the step: nothing else clears what a failed step leaves

    def happen(self, moment):
        error = self.faults.pop((self.state.iteration, moment), None)
        if error is not None:
            hvd.barrier()  # or a rank could make the next commit before the other one has failed
            raise error


def assert_close(found, wanted, tolerance, where=""):
    if isinstance(wanted, torch.Tensor):
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance, msg=lambda text: f"{where}: {text}")
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for key in wanted:
            assert_close(found[key], wanted[key], tolerance, f"{where}.{key}")
    else:
        assert found == wanted, where


def in_session(body) -> None:
    session(body)()


def check(make, *, tolerance=1e-6, commits=(1, 4, 8, 11), moments=MOMENTS, **options):
    """Compare trainings with failures after commits, also in the middle of an accumulation, with one without."""
    wanted = Training(make, {}, commits, **options).run()
    broken = hvd.HorovodInternalError("injected")
    plans = [{(7, moment): broken} for moment in moments]
    plans += [{(9, "pass"): broken, (14, "pass"): broken, (13, moments[-1]): broken}]
    for faults in plans:
        training = Training(make, faults, commits, **options)
        if not training.can_unscale and {"unscaled", "stepped"} & {moment for _, moment in faults}:
            continue
        found = training.run()
        assert_close(found, wanted, tolerance, str(list(faults)))
    assert_same_everywhere(list(wanted["net"].values())[:2])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_on_one_host(front):
    kind = torch.optim.SGD if front == "Adasum" else torch.optim.Adam  # ranks have an Adam of their own there
    # Adasum rounds as the tensors happen to arrive.
    in_session(lambda: check(FRONTS[front], kind=kind, tolerance=1e-4 if front == "Adasum" else 1e-6))


@pytest.mark.ranks(2, env={"HORA_TRANSPORT": "tcp"})
@pytest.mark.parametrize("front", BETWEEN_HOSTS)
def test_between_hosts(front):
    kind = torch.optim.SGD if front in TOLERANCES else torch.optim.Adam
    in_session(lambda: check(BETWEEN_HOSTS[front], tolerance=TOLERANCES.get(front, 1e-6), kind=kind))


@pytest.mark.ranks(2, env={"HORA_TRANSPORT": "tcp"})
@pytest.mark.parametrize("front", APART)
def test_hosts_that_train_apart(front):
    kind = partial(torch.optim.SGD, momentum=0.9) if front == "DES-LOC" else torch.optim.SGD
    in_session(lambda: check(APART[front], commits=(3, 7, 11), kind=kind))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("front", ["plain", "sharded"])
def test_per_step(front):
    """A failed step is repeated from its first pass."""
    in_session(lambda: check(FRONTS[front], per_step=True, moments=("pass", "backward", "unscaled")))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("front", ["plain", "sharded"])
def test_hosts_change_in_the_middle_of_an_accumulation(front):
    """The interrupt comes with a commit after the first of two passes: the step is made of both."""

    def body():
        wanted = Training(FRONTS[front], {}, (8,)).run()
        training = Training(FRONTS[front], {(9, "committed"): HostsUpdatedInterrupt(False)}, (8,))
        assert_close(training.run(), wanted, 1e-6)

    in_session(body)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("front", ["plain", "groups"])
def test_a_rank_that_is_a_commit_behind_takes_the_passes_of_the_root(front):
    """Rank 0 has made a commit in the middle of an accumulation; rank 1 has failed before."""

    def body():
        net = torch.nn.Linear(2, 3, bias=False)
        optimizer = FRONTS[front](
            torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters(), backward_passes_per_step=2
        )
        state = hvd.elastic.TorchState(model=net, optimizer=optimizer)
        state.sync()
        for last in (False, True):  # after the first recovery the ranks' commits are the same again
            net(torch.full((1, 2), hvd.rank() + 1.0)).sum().backward()
            if hvd.rank() == 0 or last:
                state.save()
            state.restore()
            state.sync()
            own = hvd.rank() + 1.0 if last else 1.0
            assert net.weight.grad.unique().tolist() == [own]
            before = net.weight.detach().clone()
            net(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.testing.assert_close(before - net.weight.detach(), torch.full((3, 2), 2.5 if last else 2.0))

    in_session(body)
