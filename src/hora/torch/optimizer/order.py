"""Adaptation: the ranks agree on buckets that follow the order in which gradients really arrive.

After the first step, and again when any rank has seen another order, every member contributes the places at which its
gradients arrived; the sum orders them for all. It travels as an allreduce, so that ranks that have joined do no harm: then
a member is missing from the count and everything stays as it is. Called by the optimizer after each synchronisation.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from hora import engine
from hora.engine.request import Kind, ReduceOp
from hora.errors import HorovodInternalError
from hora.torch.compression import NoneCompressor
from hora.torch.optimizer.bucket_plan import BucketSpec, plan_buckets
from hora.torch.optimizer.buckets import Buckets
from hora.torch.optimizer.error_feedback import wire_dtype
from hora.torch.optimizer.per_parameter import EachAlone, Recipe, Reducer, summed
from hora.torch.optimizer.shared_memory import SharedMemory

__all__ = ["Adaptation", "Order", "agree_on_order", "in_common_order"]

# Steps between two agreements on a changing order; doubles each time, so that an alternating graph costs next to nothing.
_FIRST_PAUSE = 8
_NUM_HEADER = 3
# Up to this many bytes of all members together everybody reduces everything: waiting for slices would take longer.
_DIRECT_BYTES = 256 * 1024

_numbers = itertools.count()


class Order:
    """What the members agreed on: parameters in order of arrival, those that were missing somewhere, the sparse ones."""

    def __init__(
        self, number: int, parameters: list[torch.Tensor], num_everywhere: int, sparse: list[torch.Tensor]
    ) -> None:
        self.label = f"optimizer.{number}"  # one in every agreement of the set
        self.parameters = parameters
        self.num_everywhere = num_everywhere
        self.sparse = sparse


class Adaptation:
    """Decides, equally on all members, which reducer the next step uses."""

    def __init__(
        self,
        recipe: Recipe,
        names: dict[torch.Tensor, str],
        parameters: Sequence[torch.Tensor],
        *,
        grouped: bool,
    ) -> None:
        self._recipe = recipe
        self._names = names
        self._parameters = parameters
        self._pause = _FIRST_PAUSE
        self._steps = 0
        self._sparse: set[torch.Tensor] = set()
        self.possible = (
            not grouped
            and (recipe.process_set.size() or 1) > 1
            and recipe.op in (ReduceOp.AVERAGE, ReduceOp.SUM)
            and (recipe.compression is NoneCompressor or wire_dtype(recipe.compression) is not None)
            and bool(parameters)
            and all(p.is_floating_point() for p in parameters)
        )

    def next_reducer(self, current: Reducer, arrivals: Sequence[torch.Tensor]) -> Reducer:
        """The reducer of the next step, after a step in which gradients arrived in this order."""
        if not self.possible:
            return current
        if isinstance(current, Buckets):
            self._steps += 1
            if not current.change_wanted or self._steps < self._pause:
                return current
            self._steps, self._pause = 0, 2 * self._pause
        if isinstance(current, EachAlone):
            self._sparse |= current.sparse
        order = agree_on_order(self._recipe, self._names, self._parameters, arrivals, self._sparse)
        if order is None:
            return current
        return self._reducer_for(order, current)

    def _reducer_for(self, order: Order, current: Reducer) -> Reducer:
        specs = plan_buckets(
            order.parameters,
            self._names,
            breaks=frozenset((order.num_everywhere,)),
            wire_dtype=wire_dtype(self._recipe.compression),
            label=order.label,
        )
        if not specs or (isinstance(current, Buckets) and list(current.specs) == specs):
            return current
        alone = EachAlone(self._recipe, self._names, order.sparse, sparse=order.sparse) if order.sparse else None
        runtime = engine.current_runtime()
        if isinstance(current, Buckets):
            current.release()
        return Buckets(runtime, self._recipe, specs, bucket_memory(runtime, self._recipe, specs), alone)


def bucket_memory(runtime: Any, recipe: Recipe, specs: Sequence[BucketSpec]) -> list[tuple[torch.Tensor, Any]]:
    """For every bucket this rank's zeroed buffer and, where the members share memory, its bound reduction."""
    size, member = recipe.process_set.size() or 1, recipe.process_set.rank()
    set_id = recipe.process_set.process_set_id
    direct = [spec.num_elements * spec.dtype.itemsize * size <= _DIRECT_BYTES for spec in specs]
    if recipe.gradient_predivide_factor != 1.0:
        direct = [False] * len(specs)  # scaling changes the data itself, which everybody reads there
    turns = [2 if is_direct else 1 for is_direct in direct]
    memory = None
    if all(spec.device.type == "cpu" for spec in specs):
        spaces = [SharedMemory.space(spec.num_elements, spec.dtype) for spec in specs]
        num_bytes = sum(size * num * space for num, space in zip(turns, spaces, strict=True))
        memory = SharedMemory.allocate(runtime, set_id, num_bytes + SharedMemory.gate_space(size))
    if memory is None:
        return [(torch.zeros(spec.num_elements, dtype=spec.dtype, device=spec.device), None) for spec in specs]
    result = []
    for spec, num_turns in zip(specs, turns, strict=True):
        places = [[memory.take(spec.num_elements, spec.dtype) for _ in range(size)] for _ in range(num_turns)]
        flat = places[0][member] if num_turns == 1 else torch.zeros(spec.num_elements, dtype=spec.dtype)
        out = None if num_turns == 1 else flat
        gate = None
        if out is not None and spec is specs[-1]:  # the caller waits for the last bucket: no need to agree on it
            gate = memory.take_gate(runtime, f"allreduce.{spec.name}", set_id, size)
        arguments = recipe.arguments() if out is not None else recipe.arguments_after_early_scale()
        binding = runtime.prepared.bind(Kind.ALLREDUCE, places, name=spec.name, out=out, gate=gate, **arguments)
        result.append((flat, binding))
    runtime.barrier(set_id)  # a reduction may start only when everybody has bound it
    return result


def agree_on_order(
    recipe: Recipe,
    names: dict[torch.Tensor, str],
    parameters: Sequence[torch.Tensor],
    arrivals: Sequence[torch.Tensor],
    sparse: set[torch.Tensor],
) -> Order | None:
    """The order of all members together; None when not every member took part (some have joined)."""
    # By name, as all reductions match: the order in which a rank's optimizer has them may be its own.
    parameters = sorted(parameters, key=names.__getitem__)
    count, size = len(parameters), recipe.process_set.size() or 1
    never = count * size  # later than any sum of real places
    places = {parameter: place for place, parameter in enumerate(arrivals)}
    digest = _digest(names, parameters)
    ballot = torch.tensor(
        [1, digest, next(_numbers)]
        + [places.get(parameter, never) for parameter in parameters]
        + [int(parameter in sparse) for parameter in parameters],
        dtype=torch.int64,
    )
    total = summed(ballot, recipe, "optimizer.order")
    if total[0] < size:
        return None
    if total[1] != digest * size:
        _raise_difference(names, parameters, recipe)
    sums, flags = total[_NUM_HEADER : _NUM_HEADER + count], total[_NUM_HEADER + count :]
    order = sorted((index for index in range(count) if not flags[index]), key=lambda index: (sums[index], index))
    return Order(
        number=total[2],
        parameters=[parameters[index] for index in order],
        num_everywhere=sum(sums[index] < never for index in order),
        sparse=[parameters[index] for index in range(count) if flags[index]],
    )


def in_common_order(
    parameters: Sequence[torch.Tensor], names: dict[torch.Tensor, str], process_set: Any
) -> Sequence[torch.Tensor]:
    """The parameters in the order in which the set's first member has them (collective)."""
    from hora.torch.functions import allgather_object

    mine = {names[parameter]: parameter for parameter in parameters}
    everybody: list[list[str]] = allgather_object(list(mine), name="optimizer.groups", process_set=process_set)
    for member, others in enumerate(everybody):
        if set(others) != set(everybody[0]):
            differing = sorted(set(others) ^ set(everybody[0]))
            raise ValueError(
                f"an integer for groups needs the same parameters on all ranks, but these exist on member 0 or on member "
                f"{member} of the process set only: {', '.join(differing[:5])}; give them the same names and requires_grad"
            )
    return [mine[name] for name in everybody[0]]


def _digest(names: dict[torch.Tensor, str], parameters: Sequence[torch.Tensor]) -> int:
    text = repr([(names[p], tuple(p.shape), str(p.dtype)) for p in parameters])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:5], "little")


def _raise_difference(names: dict[torch.Tensor, str], parameters: Sequence[torch.Tensor], recipe: Recipe) -> None:
    from hora.torch.functions import allgather_object

    mine = [(names[p], tuple(p.shape), str(p.dtype).removeprefix("torch.")) for p in parameters]
    everybody: list[list[Any]] = allgather_object(mine, name="optimizer.parameters", process_set=recipe.process_set)
    for member, theirs in enumerate(everybody):
        for here, there in itertools.zip_longest(everybody[0], theirs):
            if here != there:
                raise HorovodInternalError(
                    f"Mismatched parameters of a DistributedOptimizer: member 0 of the process set has {here}, member {member} "
                    f"has {there}; all ranks must build the same model with the same parameter names"
                )
    raise AssertionError("digests differ although the parameters do not")
