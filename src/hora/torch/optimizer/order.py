"""The order of gradients in buckets: ranks agree on the order in which gradients arrive.

After the first step, and whenever a rank has seen another order, every member contributes the arrival positions of its
gradients; the sum defines the order. An allreduce carries it, so joined ranks do no harm: a member is then missing from
the count, and the order stays.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from hora import engine
from hora.engine.request import ReduceOp
from hora.torch.compression import Int8Compressor, NoneCompressor, PowerSGD, described, wire_dtype
from hora.torch.functions import allgather_object
from hora.torch.optimizer.autotune import DEFAULT, Autotuner
from hora.torch.optimizer.bucket_plan import plan_buckets
from hora.torch.optimizer.buckets import Buckets, make_buckets
from hora.torch.optimizer.low_rank import LowRankReducer
from hora.torch.optimizer.per_parameter import PerParameterReducer
from hora.torch.optimizer.powersgd import PowerSGDMemory
from hora.torch.optimizer.reducer import ReduceOptions, Reducer, summed
from hora.torch.optimizer.turns import raise_difference, told, turn
from hora.torch.process_sets import ProcessSet

# Steps between two agreements on a changing order; doubles each time, so that an alternating graph costs little.
_FIRST_PAUSE = 8
# This rank's part of an agreement's number, which is the sum over the members.
numbers = itertools.count()


class AgreedOrder(NamedTuple):
    """Order that the members agreed on: parameters by arrival, how many all members had, and the sparse ones."""

    label: str  # unique for every agreement of the set
    parameters: list[torch.Tensor]
    num_everywhere: int
    sparse: list[torch.Tensor]


class BucketOrder:
    """Chooses the reducer of the next step, equally on all members: buckets in the order agreed last."""

    def __init__(self, options: ReduceOptions, parameters: Sequence[torch.Tensor], *, wanted: bool) -> None:
        self._options = options
        self._parameters = parameters
        self._pause = _FIRST_PAUSE
        self._steps = 0
        self._sparse: set[torch.Tensor] = set()
        self._order: AgreedOrder | None = None
        self._tuner: Autotuner | None = None
        self._setting = DEFAULT
        self._step_ended = 0.0
        self._num_joins = 0
        known = options.compression in (NoneCompressor, Int8Compressor) or isinstance(options.compression, PowerSGD)
        known = known or wire_dtype(options.compression) is not None
        sums = options.op in (ReduceOp.AVERAGE, ReduceOp.SUM) and options.num_members > 1
        floating = bool(parameters) and all(p.is_floating_point() for p in parameters)
        self.possible = wanted and known and sums and floating

    def next_reducer(self, current: Reducer, arrivals: Sequence[torch.Tensor]) -> Reducer:
        """Return the reducer of the next step, after a step in which gradients arrived in this order."""
        if not self.possible:
            return current
        if self._options.memory is not None and self._low_rank_is_due(current):
            return self._agree(arrivals, current)
        if isinstance(current, LowRankReducer):
            return current
        tuner = self._tuner
        if isinstance(current, Buckets) and tuner is not None and not (tuner.done and tuner.setting == self._setting):
            return self._tuned(tuner, current)
        if isinstance(current, Buckets):
            self._steps += 1
            if not current.change_wanted or self._steps < self._pause:
                return current
            self._steps, self._pause = 0, 2 * self._pause
        if isinstance(current, PerParameterReducer):
            self._sparse |= current.sparse
        return self._agree(arrivals, current)

    def _agree(self, arrivals: Sequence[torch.Tensor], current: Reducer) -> Reducer:
        """Return the reducer for the order that the members agree on; the current one if some have joined."""
        with turn(self._options, self._parameters):
            order = agree_on_order(self._options, self._parameters, arrivals, self._sparse)
            return current if order is None else self._reducer_for(order, current)

    def _low_rank_is_due(self, current: Reducer) -> bool:
        """Count a step; return whether the next step is the first compressed one (between hosts only)."""
        memory, runtime = self._options.memory, engine.current_runtime()
        assert memory is not None
        memory.num_steps += 1
        if not isinstance(current, Buckets) or not runtime.spans_hosts(self._options.process_set_id):
            return False
        if memory.num_joins != runtime.num_joins:  # a rank that joined has counted fewer steps
            with turn(self._options, self._parameters):
                self._agree_on_memory(memory)
        return memory.due

    def _agree_on_memory(self, memory: PowerSGDMemory) -> None:
        options, memory.num_joins = self._options, engine.current_runtime().num_joins
        memory.agree(lambda b: summed(b, options, "optimizer.powersgd"), options.num_members)

    def _tuned(self, tuner: Autotuner, current: Buckets) -> Reducer:
        """Return the reducer for the setting to try next, or for the best one."""
        now, before = time.perf_counter(), self._step_ended
        self._step_ended = now
        if not tuner.done and engine.current_runtime().num_joins != self._num_joins:
            tuner.end()  # a rank that joined has missed steps and would be out of phase
        mine = tuner.step(now - before) if before and not tuner.done else None
        if mine is not None:
            with turn(self._options, self._parameters):
                tuner.record(summed([1, mine], self._options, "optimizer.autotune"))
        if tuner.setting == self._setting or self._order is None:
            return current
        # Agree again on the same order, for a new label: no two reductions may share a name. If it fails, a rank has
        # joined again, and the others retry.
        return self._agree(self._order.parameters[: self._order.num_everywhere], current)

    def _reducer_for(self, order: AgreedOrder, current: Reducer) -> Reducer:
        self._order = order
        others = PerParameterReducer(self._options, order.sparse, sparse=order.sparse) if order.sparse else None
        memory, runtime = self._options.memory, engine.current_runtime()
        if memory is not None and runtime.spans_hosts(self._options.process_set_id):
            if not isinstance(current, Buckets):
                self._agree_on_memory(memory)
            if memory.due:
                if isinstance(current, Buckets):
                    current.release()
                return LowRankReducer(runtime, self._options, order.parameters, memory, others, label=order.label)
        setting = self._setting = DEFAULT if self._tuner is None else self._tuner.setting
        specs = plan_buckets(
            order.parameters,
            self._options.names,
            breaks=frozenset((order.num_everywhere,)),
            wire_dtype=None if self._options.code_for(self._parameters) else wire_dtype(self._options.compression),
            label=order.label,
            bucket_bytes=setting.bucket_bytes,
        )
        if runtime.config.autotune and self._tuner is None:
            self._num_joins = runtime.num_joins
            tells, num_members = runtime.world.rank == 0, self._options.num_members
            num_bytes = sum(spec.num_elements * spec.dtype.itemsize for spec in specs)
            self._tuner = Autotuner(runtime.config, tells=tells, num_bytes=num_bytes, num_members=num_members)
        if not specs:
            return current
        if isinstance(current, Buckets):
            here, there = ([[id(p) for p in spec.parameters] for spec in found] for found in (current.specs, specs))
            if here == there and current.overlap == setting.overlap:
                return current
            current.release()
        buckets = make_buckets(runtime, self._options, specs)
        return Buckets(specs, buckets, others, overlap=setting.overlap)


def agree_on_order(
    options: ReduceOptions,
    parameters: Sequence[torch.Tensor],
    arrivals: Sequence[torch.Tensor],
    sparse: set[torch.Tensor],
) -> AgreedOrder | None:
    """Return the order over all members; None unless every member took part (some have joined)."""
    # By name, like all reductions: ranks may list their parameters in different orders.
    parameters = sorted(parameters, key=options.names.__getitem__)
    count, size = len(parameters), options.num_members
    never = count * size  # later than any sum of real positions
    places = {parameter: place for place, parameter in enumerate(arrivals)}
    mine = [told(parameter, options.names) for parameter in parameters]
    text = repr([described(options.compression), *mine])
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:5], "little")
    ballot = [1, digest, next(numbers), *(places.get(parameter, never) for parameter in parameters)]
    ballot += [parameter in sparse for parameter in parameters]
    num_members, digests, number, *rest = summed(ballot, options, "optimizer.order")
    if num_members < size:
        return None
    if digests != digest * size:
        raise_difference(mine, options)
    sums, flags = rest[:count], rest[count:]
    order = sorted((index for index in range(count) if not flags[index]), key=lambda index: (sums[index], index))
    return AgreedOrder(
        label=f"optimizer.{number}",
        parameters=[parameters[index] for index in order],
        num_everywhere=sum(sums[index] < never for index in order),
        sparse=[parameters[index] for index in range(count) if flags[index]],
    )


def in_common_order(
    parameters: Sequence[torch.Tensor], names: dict[torch.Tensor, str], process_set: ProcessSet
) -> Sequence[torch.Tensor]:
    """Return the parameters in the order of the set's first member (collective)."""
    mine = {names[parameter]: parameter for parameter in parameters}
    of_all: list[list[str]] = allgather_object(list(mine), name="optimizer.groups", process_set=process_set)
    for member, others in enumerate(of_all):
        if set(others) != set(of_all[0]):
            differing = sorted(set(others) ^ set(of_all[0]))
            raise ValueError(
                "an integer for groups needs the same parameters on all ranks, but these exist on member 0 or on "
                f"member {member} of the process set only: {', '.join(differing[:5])}; give them the same names and "
                "requires_grad"
            )
    return [mine[name] for name in of_all[0]]
