"""Common uses of optimizers (rows) in every mode of Hora (columns): programs for `test_habits`.

A row is a small training. It runs on every rank with the rank's own data and a column's optimizer, and in one process
with the data of all ranks and the plain optimizer. A column whose hosts train apart is compared with one process that
trains a replica for each host and averages the replicas after each step.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

import horovod.torch as hvd

STEPS = 6
Wrap = Callable[[torch.optim.Optimizer, list[tuple[str, torch.Tensor]]], Any]


def unwrapped(optimizer: torch.optim.Optimizer, _: list[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
    return optimizer


def inputs(rank: int, number: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * number + rank))


class Row:
    """A training; subclasses override parts of it. `ranks` names the ranks whose losses this process averages."""

    dtype = torch.float32
    steps = STEPS
    passes = 1  # backward passes per step
    num_left_out = 0  # steps that a GradScaler skipped; hosts that train apart count only the others

    def __init__(self, wrap: Wrap, *, is_one_rank: bool = False) -> None:
        self.wrap = wrap
        self.zeros_missing = wrap is unwrapped and not is_one_rank  # a rank's missing gradient counts as zero
        torch.manual_seed(0)
        self.net = self.model().to(self.dtype)
        self.prepare()
        self.optimizer = wrap(self.plain_optimizer(), list(self.net.named_parameters()))
        self.finish_setup()

    def model(self) -> nn.Module:
        """Return layers of which some gradients are copied at once and some together."""
        return nn.Sequential(nn.Linear(6, 80), nn.Tanh(), nn.Linear(80, 70), nn.Tanh(), nn.Linear(70, 3))

    def plain_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)

    def prepare(self) -> None:
        """Prepare the model before the optimizer is created."""

    def finish_setup(self) -> None:
        """Finish the setup after the optimizer was wrapped."""

    def loss(self, rank: int, number: int) -> torch.Tensor:
        return self.net(inputs(rank, number).to(self.dtype)).square().mean()

    def mean_loss(self, ranks: list[int], number: int) -> torch.Tensor:
        return torch.stack([self.loss(rank, number) for rank in ranks]).mean()

    def iterate(self, number: int, ranks: list[int], after_backward: Callable[[], None]) -> None:
        self.optimizer.zero_grad()
        self.mean_loss(ranks, number).backward()
        after_backward()
        self.fill_missing()
        self.optimizer.step()

    def end_step(self) -> None:
        """Run after a step, once hosts that train apart have averaged."""

    def synchronize(self) -> None:
        if self.wrap is not unwrapped:
            self.optimizer.synchronize()

    def step_reduced(self) -> None:
        """Step after `synchronize`."""
        with contextlib.nullcontext() if self.wrap is unwrapped else self.optimizer.skip_synchronize():
            self.optimizer.step()

    def fill_missing(self) -> None:
        for parameter in self.net.parameters() if self.zeros_missing else ():
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)

    def parts(self) -> dict[str, Any]:
        """Return the objects of an elastic state."""
        return {"model": self.net, "optimizer": self.optimizer}

    def averaged(self) -> list[torch.Tensor]:
        """Return the tensors that hosts which train apart average after each step."""
        return list(self.net.parameters())

    def result(self) -> list[torch.Tensor]:
        return [tensor.detach() for tensor in self.averaged()]


class Plain(Row):
    """The base training without changes."""


class Accumulation(Row):
    passes = 2

    def iterate(self, number, ranks, after_backward):
        self.optimizer.zero_grad()
        for part in range(self.passes):
            self.mean_loss(ranks, number * self.passes + part).backward()
            if part == 0:
                after_backward()
        self.optimizer.step()


class Clipping(Row):
    def iterate(self, number, ranks, after_backward):
        self.optimizer.zero_grad()
        self.mean_loss(ranks, number).backward()
        after_backward()
        clip = torch.nn.utils.clip_grad_norm_ if self.wrap is unwrapped else hvd.clip_grad_norm_
        clip(self.net.parameters(), 0.05)
        self.optimizer.step()


class ScalerInfinityEverywhere(Row):
    bad = (0, 1, 2, 3)

    def finish_setup(self):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def iterate(self, number, ranks, after_backward):
        self.optimizer.zero_grad()
        bad = number == 3 and any(rank in self.bad for rank in ranks)
        self.scaler.scale(self.mean_loss(ranks, number) * (float("inf") if bad else 1.0)).backward()
        after_backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def parts(self):
        return super().parts() | {"scaler": self.scaler}


class ScalerInfinityOnOneRank(ScalerInfinityEverywhere):
    bad = (1,)


class CheckpointAndResume(Row):
    def iterate(self, number, ranks, after_backward):
        if number == 3:
            file = io.BytesIO()
            torch.save((self.net.state_dict(), self.optimizer.state_dict()), file)
            file.seek(0)
            values, state = torch.load(file, weights_only=True)
            self.net = self.model().to(self.dtype)
            self.net.load_state_dict(values)
            self.optimizer = self.wrap(self.plain_optimizer(), list(self.net.named_parameters()))
            self.optimizer.load_state_dict(state)
            self.resumed()
        super().iterate(number, ranks, after_backward)

    def resumed(self) -> None:
        """Let an elastic state adopt the new objects."""


class FreezeAndThaw(Row):
    def prepare(self):
        self.net[0].requires_grad_(False)

    def iterate(self, number, ranks, after_backward):
        self.net[0].requires_grad_(number >= 2)
        if number == 4:
            self.net[2].requires_grad_(False)
            self.optimizer.zero_grad()
        super().iterate(number, ranks, after_backward)

    def fill_missing(self):
        """A parameter that was reduced before contributes zeros while frozen."""
        for parameter in self.net[2].parameters() if self.zeros_missing else ():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


class AddedGroup(Row):
    def plain_optimizer(self):
        return torch.optim.SGD(self.net[:3].parameters(), lr=0.05, momentum=0.9)

    def iterate(self, number, ranks, after_backward):
        if number == 2 and len(self.optimizer.param_groups) == 1:
            self.optimizer.add_param_group({"params": list(self.net[4].parameters()), "lr": 0.02})
        super().iterate(number, ranks, after_backward)
        self.net.zero_grad()


class TiedWeights(Row):
    def model(self):
        net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        net[2].weight = net[0].weight
        return net


class UnusedParameters(Row):
    def model(self):
        return nn.ModuleDict({"used": super().model(), "unused": nn.Linear(7, 70)})

    def loss(self, rank, number):
        return self.net["used"](inputs(rank, number)).square().mean()


class RankDependentUse(Row):
    def model(self):
        return nn.ModuleList(nn.Linear(6, 5) for _ in range(4))

    def loss(self, rank, number):
        return self.net[(rank + number) % 4](inputs(rank, number)).square().mean()


class TwoOptimizers(Row):
    def finish_setup(self):
        torch.manual_seed(1)
        self.other = nn.Linear(3, 90)
        plain = torch.optim.SGD(self.other.parameters(), lr=0.02)
        self.second = self.wrap(plain, [(f"other.{name}", p) for name, p in self.other.named_parameters()])

    def loss(self, rank, number):
        return self.other(self.net(inputs(rank, number))).square().mean()

    def iterate(self, number, ranks, after_backward):
        self.second.zero_grad()
        super().iterate(number, ranks, after_backward)
        self.second.step()

    def parts(self):
        return super().parts() | {"other": self.other, "second": self.second}

    def averaged(self):
        return [*super().averaged(), *self.other.parameters()]


class Closures(Row):
    def iterate(self, number, ranks, after_backward):
        def closure():
            self.optimizer.zero_grad()
            loss = self.mean_loss(ranks, number)
            loss.backward()
            after_backward()
            return loss

        self.optimizer.step(closure)


class HooksBefore(Row):
    def prepare(self):
        self.register()

    def register(self):
        for parameter in self.net.parameters():
            parameter.register_post_accumulate_grad_hook(_halve)


class HooksAfter(HooksBefore):
    def prepare(self):
        pass

    def finish_setup(self):
        self.register()


def _halve(parameter: torch.Tensor) -> None:
    parameter.grad.mul_(0.5)


class Complex(Row):
    def model(self):
        return nn.Linear(6, 5, dtype=torch.complex64)

    def loss(self, rank, number):
        return self.net(inputs(rank, number).to(torch.complex64)).abs().square().mean()

    def __init__(self, *args, **kwargs):
        self.dtype = torch.complex64
        super().__init__(*args, **kwargs)


class Float64(Row):
    dtype = torch.float64


class BFloat16(Row):
    dtype = torch.bfloat16


class ZeroDimensionalAndEmpty(Row):
    def model(self):
        net = super().model()
        net.scale, net.empty = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.empty(0, 4))
        return net

    def loss(self, rank, number):
        return super().loss(rank, number) * self.net.scale + self.net.empty.sum()


class SparseGradients(Row):
    def model(self):
        return nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Flatten(), nn.Linear(24, 3))

    def plain_optimizer(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.05)

    def loss(self, rank, number):
        chosen = torch.randint(0, 50, (4, 3), generator=torch.Generator().manual_seed(100 * number + rank))
        return self.net(chosen).square().mean()

    def fill_missing(self):
        pass


class ChannelsLast(Row):
    def model(self):
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 40, 3))
        return net.to(memory_format=torch.channels_last)

    def loss(self, rank, number):
        images = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(100 * number + rank))
        return self.net(images.to(memory_format=torch.channels_last)).square().mean()


class Compiled(Row):
    def finish_setup(self):
        self.compiled = torch.compile(self.net, backend="aot_eager")

    def loss(self, rank, number):
        return self.compiled(inputs(rank, number)).square().mean()


class ActivationCheckpointing(Row):
    def loss(self, rank, number):
        from torch.utils.checkpoint import checkpoint

        return checkpoint(self.net, inputs(rank, number), use_reentrant=False).square().mean()


class ExponentialMovingAverage(Row):
    def finish_setup(self):
        self.average = torch.optim.swa_utils.AveragedModel(
            self.net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )

    def end_step(self):
        self.average.update_parameters(self.net)

    def parts(self):
        return super().parts() | {"average": self.average}

    def result(self):
        return [*super().result(), *(p.detach() for p in self.average.parameters())]


class Schedulers(Row):
    def plain_optimizer(self):
        first, rest = self.net[:1].parameters(), self.net[1:].parameters()
        groups = [{"params": first, "lr": 0.02}, {"params": rest, "weight_decay": 0.01}]
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)

    def finish_setup(self):
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, [0.1, 0.2], total_steps=2 * self.steps)

    def iterate(self, number, ranks, after_backward):
        super().iterate(number, ranks, after_backward)
        self.scheduler.step()

    def parts(self):
        return super().parts() | {"scheduler": self.scheduler}


class InTheMiddle(Row):
    """A call between backward and step."""

    def iterate(self, number, ranks, after_backward):
        def then():
            after_backward()
            if number == 3:
                self.call()

        super().iterate(number, ranks, then)

    def call(self) -> None:
        raise NotImplementedError


class PassesSetInTheMiddle(InTheMiddle):
    def call(self):
        if self.wrap is not unwrapped:
            self.optimizer.set_backward_passes_per_step(1)


class GroupAddedInTheMiddle(InTheMiddle):
    def call(self):
        if len(self.optimizer.param_groups) == 1:
            self.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3, dtype=self.dtype))]})


class StateLoadedInTheMiddle(InTheMiddle):
    def call(self):
        self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))


class StepHook(Row):
    def finish_setup(self):
        parameters = list(self.net.parameters())
        self.optimizer.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_norm_(parameters, 0.02) and None)


class SteppedTwice(Row):
    def plain_optimizer(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.02, momentum=0.9)

    def iterate(self, number, ranks, after_backward):
        super().iterate(number, ranks, after_backward)
        self.optimizer.step()


class ClearedInPlace(Row):
    def iterate(self, number, ranks, after_backward):
        for parameter in self.net.parameters():
            if parameter.grad is not None:
                parameter.grad.data.zero_()
        self.mean_loss(ranks, number).backward()
        after_backward()
        self.optimizer.step()


class MomentumSwitchedOn(Row):
    """An entry of the state appears in the third step."""

    def plain_optimizer(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.05)

    def iterate(self, number, ranks, after_backward):
        if number == 2:
            self.optimizer.param_groups[0]["momentum"] = 0.9
        super().iterate(number, ranks, after_backward)
        saved = self.optimizer.state_dict()["state"]
        for parameter, state in zip(self.net.parameters(), saved.values(), strict=False):
            assert state["momentum_buffer"].shape == parameter.shape


class SchedulerMadeFirst(Row):
    """A scheduler is made with the plain optimizer; a state is loaded later."""

    def plain_optimizer(self):
        optimizer = super().plain_optimizer()
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return optimizer

    def iterate(self, number, ranks, after_backward):
        super().iterate(number, ranks, after_backward)
        self.scheduler.step()
        if number == 2:
            self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))

    def parts(self):
        return super().parts() | {"scheduler": self.scheduler}


class GradientsGivenData(Row):
    def iterate(self, number, ranks, after_backward):
        self.optimizer.zero_grad(set_to_none=number < 4)
        self.mean_loss(ranks, number).backward()
        after_backward()
        self.synchronize()
        if number == 2:
            for parameter in self.net.parameters():
                parameter.grad.data = parameter.grad.data.clamp(-0.01, 0.01)
        self.step_reduced()


class ParametersGivenData(Row):
    """As clipping in a WGAN, SAM, `vector_to_parameters` and `prune.remove` do."""

    def end_step(self):
        for parameter in self.net.parameters():
            parameter.data = parameter.data.clamp(-0.2, 0.2)


class Converted(Row):
    def end_step(self):
        self.net.double()
        self.net.to(self.dtype)


class SharedByTorch(Row):
    def end_step(self):
        self.net.share_memory()


class SentThroughAQueue(Row):
    """The state of the model, to a process that evaluates it, and gradients."""

    def finish_setup(self):
        self.queue = torch.multiprocessing.get_context("spawn").SimpleQueue()

    def end_step(self):
        self.queue.put((self.net.state_dict(), [parameter.grad for parameter in self.net.parameters()]))
        self.queue.get()


class KeptGradients(Row):
    """As PCGrad does: the gradients of two tasks, kept by reference over `zero_grad`."""

    def iterate(self, number, ranks, after_backward):
        kept = []
        for task in range(2):
            self.optimizer.zero_grad()
            self.mean_loss(ranks, number + 100 * task).backward()
            after_backward()
            self.synchronize()
            kept.append([parameter.grad for parameter in self.net.parameters()])
        for parameter, first, second in zip(self.net.parameters(), *kept, strict=True):
            parameter.grad = first + 2 * second
        self.step_reduced()


class CellCalledTwice(Row):
    """The cell of a notebook that makes the optimizer, and one that still holds the first one."""

    def iterate(self, number, ranks, after_backward):
        if number in (2, 4):
            self.held = self.optimizer if number == 4 else None
            self.optimizer = self.wrap(self.plain_optimizer(), list(self.net.named_parameters()))
            self.resumed()
        super().iterate(number, ranks, after_backward)

    def resumed(self) -> None:
        """Let an elastic state adopt the new optimizer."""


ROWS: dict[str, type[Row]] = {
    row.__name__: row
    for row in (
        Plain,
        Accumulation,
        Clipping,
        ScalerInfinityOnOneRank,
        ScalerInfinityEverywhere,
        CheckpointAndResume,
        FreezeAndThaw,
        AddedGroup,
        TiedWeights,
        UnusedParameters,
        RankDependentUse,
        TwoOptimizers,
        Closures,
        HooksBefore,
        HooksAfter,
        Complex,
        Float64,
        BFloat16,
        ZeroDimensionalAndEmpty,
        SparseGradients,
        ChannelsLast,
        Compiled,
        ActivationCheckpointing,
        ExponentialMovingAverage,
        Schedulers,
        PassesSetInTheMiddle,
        GroupAddedInTheMiddle,
        StateLoadedInTheMiddle,
        StepHook,
        SteppedTwice,
        ClearedInPlace,
        MomentumSwitchedOn,
        SchedulerMadeFirst,
        GradientsGivenData,
        ParametersGivenData,
        Converted,
        SharedByTorch,
        SentThroughAQueue,
        KeptGradients,
        CellCalledTwice,
    )
}


@dataclass(frozen=True)
class Column:
    """A mode. `apart`: hosts train apart and average after `every` steps; `refused`: expected errors of rows."""

    make: Callable[..., Any]
    between_hosts: bool = False
    apart: bool = False
    every: int = 1
    fails: bool = False  # a step fails halfway and is repeated
    tolerance: float = 1e-5
    refused: dict[str, tuple[str, ...]] = field(default_factory=dict)


_COMPLEX = {"Complex": ("complex64", "not supported")}
_APART = {"Complex": ("complex64", "real"), "ScalerInfinityOnOneRank": ("left out 0", "left out 1", "GradScaler")}
_DILOCO = {"outer": partial(torch.optim.SGD, lr=1.0), "every": 1, "fragments": 1, "overlap": 0}
_SHARDED = {
    "Complex": ("complex64", "not supported"),
    "SparseGradients": ("sharded=True", "sparse"),
    "SteppedTwice": ("sharded=True", "not cleared", "step() once"),
}
_POWERSGD = hvd.Compression.powersgd(rank=80, start_step=2, min_compression_rate=0.01)

COLUMNS: dict[str, Column] = {
    "plain": Column(hvd.DistributedOptimizer, refused=_COMPLEX),
    "sharded": Column(partial(hvd.DistributedOptimizer, sharded=True), refused=_SHARDED),
    "per step": Column(
        hvd.DistributedOptimizer, fails=True, refused=_COMPLEX | {"TwoOptimizers": ("per_step=True", "one optimizer")}
    ),
    "int8": Column(
        partial(hvd.DistributedOptimizer, compression=hvd.Compression.int8),
        between_hosts=True,
        tolerance=2e-3,
        refused=_COMPLEX,
    ),
    "PowerSGD": Column(
        partial(hvd.DistributedOptimizer, compression=_POWERSGD), between_hosts=True, tolerance=1e-3, refused=_COMPLEX
    ),
    "LocalSGD": Column(partial(hvd.LocalSGD, every=1), between_hosts=True, apart=True, refused=_APART),
    "DiLoCo": Column(
        partial(hvd.DiLoCo, compression=hvd.Compression.none, **_DILOCO),
        between_hosts=True,
        apart=True,
        refused=_APART,
    ),
    "DES-LOC": Column(
        partial(hvd.DESLOC, every=1, moments={"momentum_buffer": 1}), between_hosts=True, apart=True, refused=_APART
    ),
}


def wrapper(column: Column, row: type[Row]) -> Wrap:
    more = {} if row.passes == 1 else {"backward_passes_per_step": row.passes}

    def wrap(optimizer, named):
        known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return column.make(optimizer, [(name, p) for name, p in named if id(p) in known], **more)

    return wrap


def distributed(row: type[Row], column: Column) -> Row:
    """Train on this rank's data."""
    made = row(wrapper(column, row))
    if column.fails:
        _train_with_a_failure(made)
    else:
        for number in range(row.steps):
            made.iterate(number, [hvd.rank()], lambda: None)
            made.end_step()
    return made


def _train_with_a_failure(row: Row) -> None:
    state = hvd.elastic.TorchState(**row.parts(), number=0, per_step=True)
    left = {2, 4}

    def resumed():
        for name, value in row.parts().items():
            setattr(state, name, value)

    row.resumed = resumed

    def fail():
        if state.number in left:
            left.remove(state.number)
            raise hvd.HorovodInternalError("injected")

    def train(state):
        left.discard(state.number)  # in case another rank failed first
        while state.number < row.steps:
            row.iterate(state.number, [hvd.rank()], fail)
            row.end_step()
            state.number += 1
            state.commit()

    hvd.elastic.run(train)(state)


def alone(row: type[Row], column: Column, hosts: list[list[int]]) -> Row:
    """Train on the data of all ranks in this process; where hosts train apart, with a replica for each."""
    if not column.apart:
        made = row(unwrapped)
        for number in range(row.steps):
            made.iterate(number, [rank for ranks in hosts for rank in ranks], lambda: None)
            made.end_step()
        return made
    replicas = [row(unwrapped, is_one_rank=len(ranks) == 1) for ranks in hosts]
    made = 0
    for number in range(row.steps):
        for ranks, replica in zip(hosts, replicas, strict=True):
            replica.iterate(number, ranks, lambda: None)
        made, before = number + 1 - replicas[0].num_left_out, made
        if made > before and made % column.every == 0:
            _exchange(replicas, moments="DESLOC" in str(column.make))
        for replica in replicas:
            replica.end_step()
    return next(replica for ranks, replica in zip(hosts, replicas, strict=True) if hvd.rank() in ranks)


@torch.no_grad()
def _exchange(replicas: list[Row], *, moments: bool) -> None:
    for alike in zip(*(replica.averaged() for replica in replicas), strict=True):
        _make_mean(alike)
        kept = [r.optimizer.state.get(p, {}) for r, p in zip(replicas, alike, strict=True)] if moments else []
        for name in sorted({name for one in kept for name in one} & {"momentum_buffer", "exp_avg", "exp_avg_sq"}):
            buffers = [one.get(name) for one in kept]
            if any(buffer is not None for buffer in buffers):
                _make_mean(buffers)


def _make_mean(tensors: Any) -> None:
    like = next(tensor for tensor in tensors if tensor is not None)
    wide = torch.float64 if like.dtype is torch.float64 else torch.float32
    whole = [torch.zeros_like(like) if tensor is None else tensor for tensor in tensors]
    mean = torch.stack([tensor.to(wide) for tensor in whole]).mean(0)
    for tensor in tensors:
        if tensor is not None:
            tensor.copy_(mean)


def compare(row: type[Row], column: Column, hosts: list[list[int]] | None = None) -> None:
    """Check a cell: equal results or an explained error. `hosts`: the ranks of each; by default one rank per host."""
    words = column.refused.get(row.__name__)
    if words is not None:
        said = "nothing: it was not refused"
        try:
            distributed(row, column)
        except (ValueError, AssertionError, hvd.HorovodInternalError) as error:
            said = str(error)
        assert all(word in said for word in words), f"it should say {words}, but it said {said}"
        return
    of_hosts = hosts or [[rank] for rank in range(hvd.size())]
    assert_alike(distributed(row, column), alone(row, column, of_hosts), column)


def assert_alike(got: Row, wanted: Row, column: Column) -> None:
    tolerance = max(column.tolerance, 0.02 if got.dtype is torch.bfloat16 else 0.0)
    if got.dtype is torch.float64 and column.tolerance == 1e-5:
        tolerance = 1e-12
    for index, (mine, theirs) in enumerate(zip(got.result(), wanted.result(), strict=True)):
        torch.testing.assert_close(
            mine, theirs, rtol=tolerance, atol=tolerance, msg=lambda text, index=index: f"tensor {index}: {text}"
        )
