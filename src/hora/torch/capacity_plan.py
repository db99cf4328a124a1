"""`hora plan` and `hora.plan`: predict the step time of every compression setting on these hosts.

`measure_link` and `plan` time the network and the model for a few steps on the real hosts. `predict` computes the step
of every setting from those measurements alone, and `table` formats it. In a `hora plan` job `FirstSteps` times the
user's own optimizer, and the job ends once the table is printed.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hora import engine
from hora.engine.request import Reduce, ReduceOp
from hora.telemetry.meters import meter
from hora.torch.basics import rank
from hora.torch.compression import PowerSGD
from hora.torch.optimizer.bucket_plan import BUCKET_BYTES
from hora.torch.optimizer.buckets import Layout, make_reductions
from hora.torch.optimizer.parameters import parameters_of
from hora.torch.optimizer.powersgd import PowerSGDMemory, orthonormalise_
from hora.torch.optimizer.reducer import ReduceOptions
from hora.torch.process_sets import ProcessSet, global_process_set, host_process_set

_NUM_STEPS = 5  # timed steps
_WARM_UP = 3
_LONG_S = 0.3  # a transfer of this length measures the bandwidth
_MOST_BYTES = 32 * 2**20
_FRAGMENTS = 4  # DiLoCo's default
_ANNOUNCED = 3  # round trips that the ranks need to negotiate first


@dataclass(frozen=True, kw_only=True)
class NetworkLink:
    """Network between hosts: seconds for the smallest allreduce, and per byte of float32 plain and encoded."""

    num_hosts: int
    latency_s: float
    byte_s: float
    bf16_byte_s: float
    int8_byte_s: float
    host_byte_s: float = 0.0  # of a reduction inside the hosts
    loss: float = 0.0  # share of TCP segments that were retransmitted

    @property
    def times_sent(self) -> float:
        """Return how often a host sends each byte of an allreduce."""
        return 2.0 * (self.num_hosts - 1) / self.num_hosts

    @property
    def bandwidth(self) -> float:
        """Bits per second on each host's uplink."""
        return 8.0 * self.times_sent / self.byte_s


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """A step without a network: its time, the backward time, the gradients' shapes, and the time to factor them."""

    step_s: float
    backward_s: float
    shapes: tuple[tuple[int, ...], ...]
    factor_s: dict[int, float]  # by PowerSGD rank

    @property
    def num_bytes(self) -> int:
        return 4 * sum(math.prod(shape) for shape in self.shapes)


@dataclass(frozen=True, kw_only=True)
class StepPrediction:
    """One row of the table."""

    name: str
    step_s: float
    waiting_s: float
    wire_bytes: float  # sent by a host per step, on average
    accuracy: str
    line: str


# --- reckoning: pure ----------------------------------------------------------------------------------------------

_SAME = "as plain"
_LOW_RANK = "as plain at rank 2 to 4 (1905.13727)"
_APART = "depends on the period (2311.08105)"


def predict(link: NetworkLink, work: StepWork) -> list[StepPrediction]:
    """Return the step of every setting, ordered by how much the setting changes training."""
    found: list[StepPrediction] = []

    def add(name: str, waiting_s: float, num_bytes: float, accuracy: str, line: str, own_s: float = 0.0) -> None:
        step_s, sent = work.step_s + own_s + waiting_s, link.times_sent * num_bytes
        found.append(
            StepPrediction(name=name, step_s=step_s, waiting_s=waiting_s, wire_bytes=sent, accuracy=accuracy, line=line)
        )

    settings = (("none", link.byte_s, 1.0), ("bf16", link.bf16_byte_s, 0.5), ("int8", link.int8_byte_s, 0.254))
    for name, byte_s, share in settings:
        waiting_s = _behind_backward_s(work, link.latency_s, byte_s)
        line = f"compression=hvd.Compression.{name}"
        add("plain" if name == "none" else name, waiting_s, share * work.num_bytes, _SAME, line)
    for columns, factor_s in sorted(work.factor_s.items()):
        num_bytes = _factor_bytes(work, columns)
        waiting_s = 2 * link.latency_s + num_bytes * link.byte_s  # P overlaps with backward, but is small
        line = f"compression=hvd.Compression.powersgd(rank={columns})"
        add(f"PowerSGD {columns}", waiting_s, num_bytes, _LOW_RANK, line, own_s=factor_s)
    # Hosts reduce gradients locally; a fragment is sent in the background until it is merged.
    inside_s = _behind_backward_s(work, 0.0, link.host_byte_s)
    fragment_s = _ANNOUNCED * link.latency_s + work.num_bytes * link.bf16_byte_s / _FRAGMENTS
    for every in (10, 50, 200):
        hidden_s = every // (2 * _FRAGMENTS) * (work.step_s + inside_s)
        waiting_s = max(fragment_s - hidden_s, 0.0) * _FRAGMENTS / every
        line = f"hvd.DiLoCo(optimizer, every={every})"
        add(f"DiLoCo {every}", waiting_s, work.num_bytes / 2 / every, _APART, line, own_s=inside_s)
    return found


def _behind_backward_s(work: StepWork, latency_s: float, byte_s: float) -> float:
    """Return how long a step waits for buckets sent one after another while backward computes the next."""
    num_buckets = max(-(-work.num_bytes // BUCKET_BYTES), 1)
    travel_s = num_buckets * latency_s + work.num_bytes * byte_s
    hidden_s = work.backward_s * (num_buckets - 1) / num_buckets
    return max(travel_s - hidden_s, travel_s / num_buckets)


def _factor_bytes(work: StepWork, rank: int) -> int:
    memory, num_bytes = PowerSGDMemory(PowerSGD(rank=rank)), 0
    for shape in work.shapes:
        own = memory.rank_of(torch.empty(shape, device="meta"))
        num_bytes += 4 * (own * (shape[0] + math.prod(shape[1:])) if own else math.prod(shape))
    return num_bytes


def table(link: NetworkLink, work: StepWork, predictions: Sequence[StepPrediction]) -> str:
    """Format the plan as text."""
    lines = [
        f"{link.num_hosts} hosts: {link.bandwidth / 1e6:.0f} Mbit/s, {1e3 * link.latency_s:.1f} ms for the smallest "
        f"allreduce, {100 * link.loss:.2f} % sent again; a step without a network {1e3 * work.step_s:.0f} ms, "
        f"{work.num_bytes / 1e6:.1f} MB of gradients",
        "",
        f"{'setting':12s} {'step':>9s} {'waiting':>8s} {'MB a step':>10s}  {'accuracy':37s} what to write",
    ]
    for row in predictions:
        lines.append(
            f"{row.name:12s} {1e3 * row.step_s:6.0f} ms {100 * row.waiting_s / row.step_s:6.0f} % "
            f"{row.wire_bytes / 1e6:10.2f}  {row.accuracy:37s} {row.line}"
        )
    return "\n".join(lines)


def advice(predictions: Sequence[StepPrediction]) -> str:
    """Summarize the plan in one sentence: the plain setting, and the fastest setting of each kind that sends less."""
    first, *others = predictions
    kinds = dict.fromkeys(row.accuracy for row in others)
    best = [min((row for row in others if row.accuracy == kind), key=lambda row: row.step_s) for kind in kinds]
    told = [f"{1e3 * row.step_s:.0f} ms with {row.line}" for row in best]
    return f"plan: a step takes {1e3 * first.step_s:.0f} ms sent as it is, {', '.join(told)}"


# --- measuring: collective ----------------------------------------------------------------------------------------


def measure_link() -> NetworkLink:
    """Time allreduces of gradients over all ranks (collective, seconds); raises ValueError on a single host."""
    runtime = engine.current_runtime()
    if not runtime.spans_hosts(0):
        raise ValueError("all ranks are on one host: there is no link to plan for")
    before = _segments()
    latency_s, count = _sum_s(1), 2**16
    while (took_s := _sum_s(count)) < _LONG_S + latency_s and 4 * count < _MOST_BYTES:
        count *= 4
    by_code = {"": took_s, "bf16": _sum_s(count, "bf16"), "int8": _sum_s(count, "int8")}
    byte_s = {code: max(one_s - latency_s, 1e-9) / (4 * count) for code, one_s in by_code.items()}
    near = host_process_set()
    host_s = _sum_s(2**22, process_set=near) if _slowest(near.size() or 1) > 1 else 0.0
    sent, again = (now - then for now, then in zip(_segments(), before, strict=True))
    sums = torch.tensor([float(sent), float(again)], device="cpu")
    runtime.allreduce_(sums, "plan.segments", Reduce(ReduceOp.SUM))
    return NetworkLink(
        num_hosts=len(runtime.sharing),
        latency_s=latency_s,
        byte_s=byte_s[""],
        bf16_byte_s=byte_s["bf16"],
        int8_byte_s=byte_s["int8"],
        host_byte_s=host_s / 2**24,
        loss=float(sums[1] / max(float(sums[0]), 1.0)),
    )


def _sum_s(count: int, code: str = "", process_set: ProcessSet = global_process_set) -> float:
    """Return the seconds that the slowest rank needs to sum `count` float32 values (collective)."""
    runtime, cpu = engine.current_runtime(), torch.device("cpu")
    layout = Layout(f"plan.{count}.{code}", count, torch.float32, cpu, Reduce(ReduceOp.SUM, code=code))
    _, (reduction,) = make_reductions(runtime, ReduceOptions(process_set=process_set), [layout])
    times_s = []
    for _ in range(_WARM_UP + 3):  # the first ones open connections and warm up
        runtime.barrier()
        began = time.perf_counter()
        reduction.wait()
        times_s.append(_slowest(time.perf_counter() - began))
    reduction.release()
    return statistics.median(times_s[_WARM_UP:])


def _slowest(value: float) -> float:
    """Return the maximum over all ranks, so that all ranks compute the same plan."""
    found = torch.tensor([value], dtype=torch.float64, device="cpu")
    return float(engine.current_runtime().allreduce_(found, "plan.slowest", Reduce(ReduceOp.MAX)))


def _segments() -> tuple[int, int]:
    """Return the numbers of TCP segments that this host has sent and retransmitted; zeros where Linux reports none."""
    try:
        with open("/proc/net/snmp") as file:
            names, values = (line.split() for line in file if line.startswith("Tcp:"))
    except (OSError, ValueError):
        return 0, 0
    known = dict(zip(names, values, strict=True))
    return int(known["OutSegs"]), int(known["RetransSegs"])


def _factor_s(parameters: Sequence[torch.Tensor], rank: int) -> float:
    """Return the seconds that PowerSGD's arithmetic takes per step on the slowest rank."""
    memory = PowerSGDMemory(PowerSGD(rank=rank))
    matrices = [p for p in parameters if memory.rank_of(p)]
    gradients = [torch.randn(p.shape[0], p.numel() // p.shape[0], device=p.device) for p in matrices]
    errors = [torch.zeros_like(gradient) for gradient in gradients]
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        for q, gradient, error in zip(memory.factors(matrices), gradients, errors, strict=True):
            error.add_(gradient)
            orthonormalise_(q)
            p = error @ q
            orthonormalise_(p)
            new = p.t() @ error
            torch.mm(p, new, out=gradient)
            error.addmm_(p, new, alpha=-1)
        if parameters and parameters[0].device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return _slowest(best)


def _planned(parameters: Sequence[torch.Tensor], step_s: float, backward_s: float) -> list[StepPrediction]:
    """Measure the link, print the table on rank 0, and return its rows (collective)."""
    work = StepWork(
        step_s=_slowest(step_s),
        backward_s=_slowest(backward_s),
        shapes=tuple(tuple(p.shape) for p in parameters),
        factor_s={rank: _factor_s(parameters, rank) for rank in (1, 2, 4, 8)},
    )
    link = measure_link()
    found = predict(link, work)
    meter.link_bytes_per_s = link.bandwidth / 8
    if rank() == 0:
        meter.event("plan", advice(found))
        print(table(link, work, found), flush=True)
    return found


def plan(
    model: torch.nn.Module, batch: Any, loss: Callable[[torch.nn.Module, Any], torch.Tensor] | None = None
) -> list[StepPrediction]:
    """Measure the link and this model on all ranks, print the table on rank 0, and return its rows (collective).

    The model is copied, and SGD with momentum takes the place of the optimizer.

    Args:
        model: The model to time.
        batch: A batch for the loss; by default (inputs, classes), or inputs alone.
        loss: `loss(model, batch)` computes the loss.

    Raises:
        ValueError: All ranks are on one host.
    """
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9, momentum=0.9)
    wanted = loss or _default_loss
    backward_s, step_s = [], []
    for _ in range(_WARM_UP + _NUM_STEPS):
        engine.current_runtime().barrier()
        times = [time.perf_counter()]
        optimizer.zero_grad()
        value = wanted(model, batch)
        times.append(time.perf_counter())
        value.backward()
        times.append(time.perf_counter())
        optimizer.step()
        if value.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter())
        backward_s.append(times[2] - times[1])
        step_s.append(times[3] - times[0])
    parameters = [p for p in model.parameters() if p.requires_grad]
    return _planned(parameters, statistics.median(step_s[_WARM_UP:]), statistics.median(backward_s[_WARM_UP:]))


def _default_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    if isinstance(batch, torch.Tensor):
        return model(batch).float().square().mean()
    inputs, classes = batch
    return torch.nn.functional.cross_entropy(model(inputs), classes)


class FirstSteps:
    """Times the first steps of a `hora plan` job, which ends with the table. A step hook of its optimizer."""

    def __init__(self) -> None:
        self._began_at = meter.num_steps
        self._before: tuple[float, float, float] | None = None  # the meter's totals after the warm-up

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """After enough steps measure the link, print the table and exit (collective)."""
        now = (meter.step_s, meter.backward_s, meter.wait_s + meter.reduce_s)
        num_steps = meter.num_steps - self._began_at
        if num_steps >= _WARM_UP and self._before is None:
            self._before = now
        if num_steps >= _WARM_UP + _NUM_STEPS and self._before is not None:
            step_s, backward_s, blocked_s = (
                (new - old) / _NUM_STEPS for new, old in zip(now, self._before, strict=True)
            )
            parameters = [p for p in parameters_of(optimizer) if p.requires_grad]
            _planned(parameters, step_s - blocked_s, backward_s)
            raise SystemExit(0)
